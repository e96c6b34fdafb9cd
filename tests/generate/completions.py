"""What the tests of requests share: a small tokenizer and model, varied requests, and completions without a cache."""

import torch

from helpers import SAME_ROW, lively_model, small_config
from thoughtbubbles.data.tokenizer import Tokenizer
from thoughtbubbles.generate.decode import predict_uncached
from thoughtbubbles.generate.requests import Completion, Request
from thoughtbubbles.generate.sample import BatchSampling, Sampling, pick, uniform

# Tokens of several characters, and of less than one; the models below have three ids more.
PIECES = Tokenizer("pieces", [b"a", b"b", b"ab", b"ba", b"c", b"ca", b"\xc3", b"\xa9", b"d", b"bd"])


GREEDY = Sampling(temperature=0)


def model_of(**changes):
    return lively_model(
        small_config(**{"n_layer": 3, "fork_layers": (1, 2), "vocab_size": 14, "block_size": 20, **changes}), seed=11
    )


def varied() -> list[Request]:
    """Prompts, lengths, budgets and settings all different; some end long before others."""
    return [
        Request(prompt=[1, 2, 3], max_new=9, budget=1, sampling=Sampling(seed=3), end_ids=()),
        Request(prompt=[5], max_new=12, budget=4, sampling=Sampling(seed=4, top_p=0.8), end_ids=(), top=2),
        Request(prompt=[4, 4, 4, 4, 9, 1, 0], max_new=2, sampling=GREEDY),
        Request(prompt=[7, 1] * 5, budget="7/3", sampling=Sampling(seed=5, temperature=1.5, repetition_penalty=1.4)),
        Request(prompt=list(range(10)), max_new=6, budget=1.5, sampling=Sampling(seed=6, top_k=3), end_ids=(2, 9)),
        Request(
            prompt=[3, 0],
            max_new=11,
            budget=1.15,
            sampling=Sampling(seed=7, min_p=0.01, temperature=3),
            stop=("ab", "d"),
            end_ids=(),
            top=4,
        ),
    ]


def assert_same_completion(ours: Completion, theirs: Completion) -> None:
    for name in ("ids", "text", "streams", "finish", "error"):
        assert getattr(ours, name) == getattr(theirs, name), name
    torch.testing.assert_close(ours.log_probs, theirs.log_probs, atol=SAME_ROW, rtol=0)
    assert [[i for i, _ in place] for place in ours.top] == [[i for i, _ in place] for place in theirs.top]
    for a, b in zip(ours.top, theirs.top, strict=True):
        torch.testing.assert_close([p for _, p in a], [p for _, p in b], atol=SAME_ROW, rtol=0)


def by_hand(model, request: Request) -> Completion:
    """One request without cache, engine or text: each token is drawn from a forward over all tokens before it."""
    text, found = [int(i) for i in request.prompt], Completion()
    settings = BatchSampling.of([request.sampling], device="cpu")
    room = model.config.block_size - len(text)
    for n in range(room if request.max_new is None else request.max_new):
        prediction = predict_uncached(model, torch.tensor([text]), budget=request.budget)
        seen = torch.zeros(1, model.config.vocab_size, dtype=torch.bool)
        seen[0, text] = True
        draw = torch.tensor([uniform(request.sampling.seed, n)], dtype=torch.float64)
        picked = pick(prediction.logits, settings, draw, n_ids=model.config.vocab_size, seen=seen, n_top=request.top)
        text.append(int(picked.id))
        found.ids.append(text[-1])
        found.log_probs.append(float(picked.log_prob))
        found.top.append(tuple(zip(picked.top_id[0].tolist(), picked.top_log_prob[0].tolist(), strict=True)))
        found.streams.append(int(prediction.streams))
        if request.end_ids and text[-1] in request.end_ids:
            found.finish = "end"
            return found
    found.finish = "length"
    return found


def brute_force(model, request: Request, *, n_ids: int, **options) -> tuple[list[int], list[float], list[int]]:
    """Ids, log-probabilities and streams of one request, each token from a forward over all before it."""
    ids, log_probs, streams = [int(i) for i in request.prompt], [], []
    budget = request.budget
    for n in range(request.max_new):
        out = model(torch.tensor([ids]), budget=budget, want=("log_probs",), trace=True, **options)
        row = out.log_probs[0, -1].detach()
        aim, chosen = uniform(request.sampling.seed, n) * float(row[:n_ids].exp().sum()), 0
        if request.sampling.temperature == 0:
            chosen = max(range(n_ids), key=lambda i: float(row[i]))
        else:
            while (aim := aim - float(row[chosen].exp())) > 0:
                chosen += 1
        ids.append(chosen)
        log_probs.append(float(row[chosen]))
        streams.append(int(out.forks[-1].bubble_size[0, -1]) if out.forks else model.config.copies)
    return ids[len(request.prompt) :], log_probs, streams
