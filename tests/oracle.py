"""The whole architecture as slow float64 loops, one row and one stream at a time: the oracle of the tests.

Nothing here is batched. A stream is a 1-D vector, the streams of a layer are a Python list, and every sum over
streams, tokens or heads is a Python loop, so that each line can be checked against the equation it stands for.
Autograd runs through everything except the choice of survivors, which is made on plain Python numbers.
"""

import math
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor

IGNORED = -100  # a target that does not count
LOWEST = -20.0  # floor of one fork layer's log scores
KEY_STEPS = 4096  # log scores are ranked in steps of 1/4096
EPSILON = 1e-5  # of every LayerNorm
ROPE_BASE = 10000.0

Weights = dict[str, Tensor]
Key = tuple[bool, int, int]


@dataclass
class Settings:
    """Definition of a model, without its weights. Values are not checked."""

    n_layer: int
    n_head: int
    width: int
    vocab_size: int
    block_size: int
    fork_layers: tuple[int, ...] = ()
    copies: int = 1
    budget: str | int | float = 2
    budget_mode: str = "proportional"  # or "fixed" (block only)
    selection: str = "causal"  # or "block"
    merge: str = "mixture"  # or "residual", "original", "forks"
    fork_reach: int | None = None  # forks are seen by tokens up to this far after theirs; None: by all
    feedback: bool = False  # originals pass all blocks without forks; then forks, which get the previous token's result
    scores: bool = True  # False: every candidate survives with score 1
    gate_qk: bool = True
    gate_v: bool = True
    gate_residual: bool = True
    score_scale: str = "head"  # or "one"
    own_scores: bool = False
    relative_scores: bool = False
    head_gate: bool = False
    block: str = "gpt2"  # or "modern"


@dataclass
class ForkRecord:
    """What one fork layer decided."""

    layer: int
    own: list[tuple[float, float]]  # per stream before the fork: this layer's (fork, keep) log scores
    log_score: list[float]  # per candidate: cumulative, neither rounded nor forced
    selected: list[bool]  # per candidate
    parent: list[int]  # per survivor: index, among the streams before, of its parent or of itself
    is_fork: list[bool]  # per survivor
    token: list[int]  # per survivor
    bubble_size: list[int]  # per token


@dataclass
class Result:
    """Predictions of one row, and the streams they came from."""

    log_probs: list[Tensor]  # per token, a vector over the vocabulary
    nll: list[Tensor | None]  # per token; None where the target is ignored
    loss: Tensor | None  # mean over the real targets; None if there are none
    forks: list[ForkRecord]
    log_score: list[Tensor]  # per final stream
    token: list[int]  # per final stream
    x: list[Tensor]  # per final stream, before the final norm


@dataclass
class Stream:
    """One residual vector, the log of its score, and the token it belongs to."""

    x: Tensor
    log_score: Tensor
    token: int


# ---- small pieces ---------------------------------------------------------------------------------------------------


def linear(weights: Weights, name: str, x: Tensor) -> Tensor:
    """y = W x + b."""
    return weights[f"{name}.weight"] @ x + weights[f"{name}.bias"]


def layer_norm(weights: Weights, name: str, x: Tensor) -> Tensor:
    """y = (x - mean) / sqrt(variance + eps) * weight + bias, the variance divided by D."""
    centred = x - x.sum() / len(x)
    variance = (centred * centred).sum() / len(x)
    return centred / torch.sqrt(variance + EPSILON) * weights[f"{name}.weight"] + weights[f"{name}.bias"]


def rms_norm(weights: Weights, name: str, x: Tensor) -> Tensor:
    """y = x / sqrt(mean of squares + eps) * weight."""
    return x / torch.sqrt((x * x).sum() / len(x) + EPSILON) * weights[f"{name}.weight"]


def block_norm(weights: Weights, settings: Settings, name: str, x: Tensor) -> Tensor:
    return rms_norm(weights, name, x) if settings.block == "modern" else layer_norm(weights, name, x)


def gelu(x: Tensor) -> Tensor:
    """x * Phi(x), with Phi the normal distribution function (no tanh approximation)."""
    return x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0)))


def log_softmax(x: Tensor) -> Tensor:
    """x_i - log sum_j exp(x_j), of one vector."""
    return x - torch.logsumexp(x, dim=0)


def positions(streams: list[Stream]) -> list[float]:
    """k - p/q for a stream of token k, with p streams of its bubble to its right, out of q in the bubble."""
    tokens = [stream.token for stream in streams]
    return [k - tokens[i + 1 :].count(k) / tokens.count(k) for i, k in enumerate(tokens)]


def rope(x: Tensor, position: float) -> Tensor:
    """Rotate the pair (x_i, x_{i+H/2}) by position * base^(-2i/H)."""
    size, half = len(x), len(x) // 2
    angle = [position * ROPE_BASE ** (-2.0 * i / size) for i in range(half)]
    cos, sin = x.new_tensor([math.cos(a) for a in angle]), x.new_tensor([math.sin(a) for a in angle])
    left, right = x[:half], x[half:]
    return torch.cat([cos * left - sin * right, sin * left + cos * right])


# ---- selection ------------------------------------------------------------------------------------------------------


def make_keys(log_score: list[float], forced: list[bool]) -> list[Key]:
    """Larger wins: an original's keep first, then the log score in steps of 1/4096, then the earlier candidate."""
    return [(forced[c], round(log_score[c] * KEY_STEPS), -c) for c in range(len(log_score))]


def select_block(keys: list[Key], n_tokens: int, settings: Settings) -> list[bool]:
    """The ceil(r T) largest keys of the row; "fixed" allows what a full block would have, and at least T."""
    ratio = Fraction(str(settings.budget))
    if settings.budget_mode == "fixed":
        allowed = max(n_tokens, math.ceil(ratio * settings.block_size))
    else:
        allowed = math.ceil(ratio * n_tokens)
    survivors = sorted(keys, reverse=True)[:allowed]
    return [key in survivors for key in keys]


def select_causal(keys: list[Key], token: list[int], n_tokens: int, settings: Settings) -> list[bool]:
    """Token by token: cap = floor(r (t+1)); candidates ranked within the cap pass; the best that still fit are kept."""
    ratio = Fraction(str(settings.budget))
    selected = [False] * len(keys)
    alive = 0  # survivors among the tokens so far
    for t in range(n_tokens):
        cap = math.floor(ratio * (t + 1))
        seen = [c for c in range(len(keys)) if token[c] <= t]
        passing = []
        for c in seen:
            rank = sum(keys[other] > keys[c] for other in seen)  # dropped candidates still count
            if token[c] == t and rank < cap:
                passing.append(c)
        alive_before, alive = alive, min(alive + len(passing), cap)
        passing.sort(key=lambda c: keys[c], reverse=True)
        for c in passing[: alive - alive_before]:
            selected[c] = True
    return selected


# ---- layers ---------------------------------------------------------------------------------------------------------


def own_scores(weights: Weights, name: str, x: Tensor) -> tuple[Tensor, Tensor]:
    """[fork, keep] = max(log sigmoid(W LN(x) + b), -20), with b only if the weights have one."""
    z = weights[f"{name}.score.weight"] @ layer_norm(weights, f"{name}.norm", x)
    if f"{name}.score.bias" in weights:
        z = z + weights[f"{name}.score.bias"]
    fork, keep = torch.nn.functional.logsigmoid(z).clamp(min=LOWEST)
    return fork, keep


def fork_layer(
    weights: Weights, settings: Settings, layer: int, streams: list[Stream], n_tokens: int
) -> tuple[list[Stream], ForkRecord]:
    """Candidates fork_0, keep_0, fork_1, keep_1, ...; log score = parent's + own; a fork's vector = x + embedding."""
    name = f"forks.{layer}"
    own: list[tuple[float, float]] = []
    candidates: list[Stream] = []
    forced: list[bool] = []
    for i, stream in enumerate(streams):
        zero = torch.zeros_like(stream.log_score)
        fork, keep = own_scores(weights, name, stream.x) if settings.scores else (zero, zero)
        own.append((fork.item(), keep.item()))
        is_original = i + 1 == len(streams) or streams[i + 1].token != stream.token
        before = torch.zeros_like(keep) if settings.own_scores else stream.log_score
        candidates.append(Stream(stream.x + weights[f"{name}.embedding"], before + fork, stream.token))
        candidates.append(Stream(stream.x, before + keep, stream.token))
        forced += [False, is_original]

    log_score = [candidate.log_score.item() for candidate in candidates]
    token = [candidate.token for candidate in candidates]
    keys = make_keys(log_score, forced)
    if not settings.scores:
        selected = [True] * len(candidates)
    elif settings.selection == "block":
        selected = select_block(keys, n_tokens, settings)
    else:
        selected = select_causal(keys, token, n_tokens, settings)

    kept = [c for c in range(len(candidates)) if selected[c]]
    kept_token = [token[c] for c in kept]
    record = ForkRecord(
        layer=layer,
        own=own,
        log_score=log_score,
        selected=selected,
        parent=[c // 2 for c in kept],
        is_fork=[c % 2 == 0 for c in kept],
        token=kept_token,
        bubble_size=[kept_token.count(t) for t in range(n_tokens)],
    )
    return [candidates[c] for c in kept], record


def attenuation(streams: list[Stream], settings: Settings) -> list[Tensor]:
    """log P of every stream: its log score, or with relative_scores that minus the largest of its bubble."""
    if not settings.relative_scores:
        return [stream.log_score for stream in streams]
    return [
        stream.log_score - torch.stack([other.log_score for other in streams if other.token == stream.token]).max()
        for stream in streams
    ]


def attend(
    query: Tensor, keys: list[Tensor], values: list[Tensor], log_scores: list[Tensor], settings: Settings
) -> Tensor:
    """One head of one stream: sum_j softmax_j(c (q.k_j + log P_j)) P_j v_j, with c = 1/sqrt(H).

    With score_scale "one" the logit is c q.k_j + log P_j.
    """
    c = 1.0 / math.sqrt(len(query))
    log_p = torch.stack(log_scores)
    logits = c * (torch.stack(keys) @ query)
    if settings.gate_qk:
        logits = logits + (log_p if settings.score_scale == "one" else c * log_p)
    weights = log_softmax(logits).exp()
    return (weights * log_p.exp() if settings.gate_v else weights) @ torch.stack(values)


def sees(streams: list[Stream], i: int, j: int, reach: int | None) -> bool:
    """Stream j stands at or left of stream i, and is an original, or of a token at most `reach` before that of i."""
    is_original = j + 1 == len(streams) or streams[j + 1].token != streams[j].token
    return j <= i and (reach is None or is_original or streams[i].token - streams[j].token <= reach)


def attention_layer(
    weights: Weights, settings: Settings, name: str, streams: list[Stream], log_scores: list[Tensor], place: list[float]
) -> list[Tensor]:
    """W_o [head_0, head_1, ...] + b_o for every stream; stream i sees streams 0..i, of forks only those within reach.

    With head_gate, head_n is multiplied by 1 / (1 + exp(-z_n)); z = W_g LN(x) + b_g has one number per head.
    """
    width, size = settings.width, settings.width // settings.n_head
    normed = [block_norm(weights, settings, f"{name}.attention_norm", stream.x) for stream in streams]
    qkv = [linear(weights, f"{name}.attention.qkv", x) for x in normed]
    heads: list[list[Tensor]] = [[] for _ in streams]
    for n in range(settings.n_head):
        channels = slice(n * size, (n + 1) * size)
        queries = [row[:width][channels] for row in qkv]
        keys = [row[width : 2 * width][channels] for row in qkv]
        if settings.block == "modern":
            queries = [rms_norm(weights, f"{name}.attention.query_norm", query) for query in queries]
            keys = [rms_norm(weights, f"{name}.attention.key_norm", key) for key in keys]
        queries = [rope(query, p) for query, p in zip(queries, place, strict=True)]
        keys = [rope(key, p) for key, p in zip(keys, place, strict=True)]
        values = [row[2 * width :][channels] for row in qkv]
        for i in range(len(streams)):
            visible = [j for j in range(i + 1) if sees(streams, i, j, settings.fork_reach)]
            head = attend(
                queries[i],
                [keys[j] for j in visible],
                [values[j] for j in visible],
                [log_scores[j] for j in visible],
                settings,
            )
            if settings.head_gate:
                z = linear(weights, f"{name}.attention.gate", normed[i])[n]
                head = head / (1.0 + torch.exp(-z))
            heads[i].append(head)
    return [linear(weights, f"{name}.attention.out", torch.cat(parts)) for parts in heads]


def mlp(weights: Weights, settings: Settings, name: str, x: Tensor) -> Tensor:
    """W_down gelu(W_up LN(x) + b_up) + b_down; modern: a and b are the halves of W_up RMSNorm(x) + b_up, and
    W_down (a sigmoid(a) b) + b_down."""
    up = linear(weights, f"{name}.mlp.up", block_norm(weights, settings, f"{name}.mlp_norm", x))
    if settings.block == "modern":
        gate, rest = up[: len(up) // 2], up[len(up) // 2 :]
        return linear(weights, f"{name}.mlp.down", gate / (1.0 + torch.exp(-gate)) * rest)
    return linear(weights, f"{name}.mlp.down", gelu(up))


def block(
    weights: Weights,
    settings: Settings,
    layer: int,
    streams: list[Stream],
    log_p: list[Tensor] | None = None,
    at: list[float] | None = None,
) -> list[Stream]:
    """x <- x + P attention(x), then x <- x + P MLP(x), with P the stream's score, or its relative score.

    Some streams of a row: log P and the positions are given, since they depend on the others too.
    """
    name = f"blocks.{layer}"
    after = []
    log_p = attenuation(streams, settings) if log_p is None else log_p
    updates = attention_layer(weights, settings, name, streams, log_p, positions(streams) if at is None else at)
    for stream, update, own in zip(streams, updates, log_p, strict=True):
        gate = own.exp() if settings.gate_residual else 1.0
        x = stream.x + gate * update
        x = x + gate * mlp(weights, settings, name, x)
        after.append(Stream(x, stream.log_score, stream.token))
    return after


def with_feedback(weights: Weights, settings: Settings, layer: int, streams: list[Stream]) -> list[Stream]:
    """Originals pass the blocks from `layer` on alone. Then forks do, which get the last state of the token before. In
    each block, one sees originals of earlier tokens as these entered it, forks of tokens within reach, and itself."""
    name = f"forks.{layer}"
    log_p = attenuation(streams, settings)  # relative scores are those within the whole bubble
    is_last = [i + 1 == len(streams) or streams[i + 1].token != streams[i].token for i in range(len(streams))]
    n_tokens = streams[-1].token + 1
    spots = positions(streams)
    own = [i for i in range(len(streams)) if is_last[i]]
    entered = []
    row = [streams[i] for i in own]
    for number in range(layer, settings.n_layer):
        entered.append(row)
        row = block(weights, settings, number, row, log_p=[log_p[i] for i in own], at=[spots[i] for i in own])
    after = {own[t]: row[t] for t in range(n_tokens)}
    forks = {}
    for i, stream in enumerate(streams):
        if not is_last[i]:
            t, x = stream.token, stream.x
            if t > 0:
                x = x + linear(weights, f"{name}.feedback", layer_norm(weights, f"{name}.feedback_norm", row[t - 1].x))
            forks[i] = Stream(x, stream.log_score, t)
    assert settings.fork_reach is not None
    for number, before in zip(range(layer, settings.n_layer), entered, strict=True):
        passed = {}
        for i, fork in forks.items():
            near = [j for j in forks if j < i and fork.token - forks[j].token <= settings.fork_reach]
            group = [*before[: fork.token], *(forks[j] for j in near), fork]
            chosen = [*own[: fork.token], *near, i]
            found = block(
                weights, settings, number, group, log_p=[log_p[j] for j in chosen], at=[spots[j] for j in chosen]
            )
            passed[i] = found[-1]
        forks = passed
    return [{**after, **forks}[i] for i in range(len(streams))]


# ---- from ids to predictions ----------------------------------------------------------------------------------------


def embed(weights: Weights, settings: Settings, ids: list[int]) -> list[Stream]:
    """Every token enters as `copies` equal streams of score 1."""
    table = weights["embedding.weight"]
    one = torch.zeros((), dtype=table.dtype)  # log 1
    return [Stream(table[word], one, t) for t, word in enumerate(ids) for _ in range(settings.copies)]


def decode(weights: Weights, x: Tensor) -> Tensor:
    """log softmax(W_e LN_f(x)), the head being the embedding."""
    return log_softmax(weights["embedding.weight"] @ layer_norm(weights, "final_norm", x))


def merge(weights: Weights, settings: Settings, bubble: list[Stream]) -> Tensor:
    """log p(next token) of one bubble, with w the softmax of its log scores.

    original: p of the last stream. residual: p of sum_j w_j x_j. mixture: sum_j w_j p_j.
    forks: residual without the original, unless it is alone; w is the softmax of the others then.
    """
    if settings.merge == "original" or settings.copies > 1:
        return decode(weights, bubble[-1].x)
    if settings.merge == "forks" and len(bubble) > 1:
        bubble = bubble[:-1]
    log_w = log_softmax(torch.stack([stream.log_score for stream in bubble]))
    if settings.merge in ("residual", "forks"):
        mean = torch.zeros_like(bubble[0].x)
        for weight, stream in zip(log_w.exp(), bubble, strict=True):
            mean = mean + weight * stream.x
        return decode(weights, mean)
    total = log_w[0] + decode(weights, bubble[0].x)
    for j in range(1, len(bubble)):
        total = torch.logaddexp(total, log_w[j] + decode(weights, bubble[j].x))
    return total


def run(weights: Weights, settings: Settings, ids: list[int], targets: list[int] | None = None) -> Result:
    """One unpadded row through the whole model."""
    streams = embed(weights, settings, ids)
    forks = []
    for layer in range(settings.n_layer):
        if layer in settings.fork_layers:
            streams, record = fork_layer(weights, settings, layer, streams, len(ids))
            forks.append(record)
            if settings.feedback:
                streams = with_feedback(weights, settings, layer, streams)
                break
        streams = block(weights, settings, layer, streams)

    log_probs = [merge(weights, settings, [s for s in streams if s.token == t]) for t in range(len(ids))]
    nll: list[Tensor | None] = []
    if targets is not None:
        nll = [None if y == IGNORED else -row[y] for row, y in zip(log_probs, targets, strict=True)]
    real = [value for value in nll if value is not None]
    loss = torch.stack(real).sum() / len(real) if real else None
    return Result(
        log_probs=log_probs,
        nll=nll,
        loss=loss,
        forks=forks,
        log_score=[s.log_score for s in streams],
        token=[s.token for s in streams],
        x=[s.x for s in streams],
    )
