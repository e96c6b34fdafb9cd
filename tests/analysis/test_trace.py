"""The trace, on hand-made models whose streams, scores and attention are known, and against the model's own outputs."""

import json
import math
from fractions import Fraction

import pytest
import torch

from helpers import SAME_FUNCTION, lively_model, random_ids, small_config
from thoughtbubbles.analysis import trace
from thoughtbubbles.checkpoint import load, load_tokenizer, save_model
from thoughtbubbles.data.tokenizer import Tokenizer, tokenizer
from thoughtbubbles.model.config import ModelConfig
from thoughtbubbles.model.transformer import Thoughtbubbles

BYTES = tokenizer("bytes")
PLAIN = {"fork_layers": (), "merge": "original"}


def logit(probability: float) -> float:
    return math.log(probability / (1 - probability))


def close(value: float) -> object:
    return pytest.approx(value, abs=SAME_FUNCTION)


def hand_made(*scores: tuple[float, float], **changes) -> Thoughtbubbles:
    """Blocks that add nothing and attend by score alone. Fork layer i, before block i + 1, gives every stream
    `scores[i]`, (fork, keep), except that a stream of "b" has a fork score of 0.9 in the first one."""
    n = len(scores)
    config = ModelConfig(
        **{
            "n_layer": n + 1,
            "n_head": 1,
            "width": 4,
            "vocab_size": 257,
            "block_size": 16,
            "fork_layers": tuple(range(1, n + 1)),
            "merge": "residual",
            "score_bias": 0,
            **changes,
        }
    )
    model = Thoughtbubbles(config).double().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.zero_()
        model.embedding.weight[:] = torch.tensor([1.0, -1, 0, 0])
        model.embedding.weight[ord("b")] = torch.tensor([0.0, 0, 1, -1])
        for layer, (fork, keep) in zip(config.fork_layers, scores, strict=True):
            model.forks[str(layer)].score.bias[:] = torch.tensor([logit(fork), logit(keep)], dtype=torch.float64)
        if n:
            first = model.forks["1"]
            normed = first.norm(model.embedding.weight[ord("b")])[2]  # the third channel, and minus it the fourth
            slope = (logit(0.9) - logit(scores[0][0])) / (2 * normed)
            first.score.weight[0, 2:] = torch.stack([slope, -slope])
    return model


def columns(stage, *names: str) -> list[tuple[object, ...]]:
    return [tuple(getattr(stream, name) for name in names) for stream in stage.streams]


@pytest.mark.parametrize(("selection", "budget"), [("causal", "4/3"), ("block", "5/4")])
def test_exactly_one_token_forks(selection, budget):
    """There is room for one fork at b, the best one: those of a are dropped."""
    found = trace(hand_made((0.2, 0.5)), "aaba", tokenizer=BYTES, selection=selection, budget=budget)
    first, second = found.stages
    assert (first.layer, second.layer) == (0, 1)
    assert columns(first, "token", "place", "position", "score", "weight", "parent", "is_fork") == [
        (t, 0, t, 1, 1, None, False) for t in range(4)
    ]
    assert first.dropped == ()
    assert columns(second, "token", "place", "position", "parent", "is_fork") == [
        (0, 0, 0, 0, False),
        (1, 0, 1, 1, False),
        (2, 1, 1.5, 2, True),
        (2, 0, 2, 2, False),
        (3, 0, 3, 3, False),
    ]
    assert [stream.score for stream in second.streams] == [close(score) for score in (0.5, 0.5, 0.9, 0.5, 0.5)]
    assert [stream.weight for stream in second.streams] == [close(share) for share in (1, 1, 0.9 / 1.4, 0.5 / 1.4, 1)]
    assert [(each.token, each.parent, each.is_fork) for each in second.dropped] == [(t, t, True) for t in (0, 1, 3)]
    assert [each.score for each in second.dropped] == [close(0.2)] * 3
    assert [token.streams for token in found.tokens] == [(1, 1), (1, 1), (1, 2), (1, 1)]
    assert second.bubble(2) == list(second.streams[2:4])
    assert (found.settings["selection"], found.settings["budget"]) == (selection, budget)


def test_lines_of_descent():
    """No limit: a' and a fork again, and every stream is left of its parent's continuation."""
    found = trace(hand_made((0.2, 0.5), (0.6, 0.3), budget=4), "a", tokenizer=BYTES)
    _, first, second = found.stages
    assert columns(first, "place", "position", "parent", "is_fork") == [(1, -0.5, 0, True), (0, 0, 0, False)]
    assert columns(second, "place", "position", "parent", "is_fork") == [
        (3, -0.75, 0, True),
        (2, -0.5, 0, False),
        (1, -0.25, 1, True),
        (0, 0, 1, False),
    ]
    scores = [0.2 * 0.6, 0.2 * 0.3, 0.5 * 0.6, 0.5 * 0.3]
    assert [stream.score for stream in second.streams] == [close(score) for score in scores]
    assert [stream.weight for stream in second.streams] == [close(score / sum(scores)) for score in scores]
    assert second.dropped == ()
    assert found.tokens[0].streams == (1, 2, 4)
    assert found.tokens[0].loss is None
    assert found.loss is None


def test_a_fork_can_be_dropped_later():
    """Room for two streams: the fork of the first layer loses to the original's second fork."""
    found = trace(hand_made((0.5, 0.75), (0.6, 0.5), budget=2), "a", tokenizer=BYTES)
    last = found.stages[-1]
    assert columns(last, "parent", "is_fork", "place") == [(1, True, 1), (1, False, 0)]
    assert [stream.score for stream in last.streams] == [close(0.75 * 0.6), close(0.75 * 0.5)]
    assert [(each.parent, each.is_fork, each.score) for each in last.dropped] == [
        (0, True, close(0.5 * 0.6)),
        (0, False, close(0.5 * 0.5)),
    ]


def test_attention_of_known_scores():
    """Without keys and queries, a stream attends to those up to itself in proportion to score^(1/√H), H = 4."""
    found = trace(hand_made((0.2, 0.5)), "aaba", tokenizer=BYTES, budget="4/3", attention=True)
    assert [weights.shape for weights in found.attention] == [(1, 4, 4), (1, 5, 5)]
    for stage, weights in zip(found.stages, found.attention, strict=True):
        strength = torch.tensor([stream.score for stream in stage.streams], dtype=torch.float64) ** 0.5
        expected = strength.expand(len(strength), -1).tril()
        expected = expected / expected.sum(-1, keepdim=True)
        torch.testing.assert_close(weights[0], expected, atol=SAME_FUNCTION, rtol=0)
    assert trace(hand_made((0.2, 0.5)), "ab", tokenizer=BYTES).attention is None


FORMS = {
    "plain": PLAIN,
    "copy-3": {**PLAIN, "copies": 3},
    "mixture": {"budget": 1.5},
    "residual": {"merge": "residual", "budget": 4},
    "forks": {"merge": "forks", "budget": 1.5},
    "block": {"selection": "block", "budget": 1.5},
    "fork layer before block 0": {"fork_layers": (0, 2)},
}


@pytest.mark.parametrize("form", FORMS)
def test_numbers_are_the_model_s(form):
    model = lively_model(small_config(vocab_size=257, **FORMS[form]))
    text = "hello, streams"
    ids = torch.tensor([BYTES.encode(text)])
    found = trace(model, text, tokenizer=BYTES, attention=True, top=7)
    out = model(ids, want=("log_probs",), trace="attention")
    log_probs, n = out.log_probs[0], ids.shape[1]

    assert [token.id for token in found.tokens] == ids[0].tolist()
    losses = torch.nn.functional.nll_loss(log_probs[:-1], ids[0, 1:], reduction="none").tolist()
    assert [token.loss for token in found.tokens] == [None, *(close(loss) for loss in losses)]
    assert found.loss == close(sum(losses) / (n - 1))
    for t, token in enumerate(found.tokens):
        assert token.entropy == close(torch.distributions.Categorical(logits=log_probs[t]).entropy().item())
        ranked = log_probs[t].argsort(descending=True)[:7]
        assert [guess.id for guess in token.top] == ranked.tolist()
        assert [guess.probability for guess in token.top] == [close(p) for p in log_probs[t, ranked].exp().tolist()]

    assert len(found.stages) == 1 + len(model.config.fork_layers)
    assert [stage.layer for stage in found.stages[1:]] == list(model.config.fork_layers)
    sizes = [[model.config.copies] * n, *(record.bubble_size[0].tolist() for record in out.forks)]
    for index, stage in enumerate(found.stages):
        assert [token.streams[index] for token in found.tokens] == sizes[index]
        assert [len(stage.bubble(t)) for t in range(n)] == sizes[index]
        for t in range(n):
            bubble = stage.bubble(t)
            assert [stream.place for stream in bubble] == list(range(len(bubble)))[::-1]
            assert [stream.position for stream in bubble] == [close(t - s.place / len(bubble)) for s in bubble]
            assert sum(stream.weight for stream in bubble) == close(1)
            if form == "forks":
                assert bubble[-1].weight == (len(bubble) == 1)
    for before, stage, record in zip(found.stages, found.stages[1:], out.forks, strict=False):
        n_used = len(stage.streams)
        assert [stream.parent for stream in stage.streams] == record.parent[0, :n_used].tolist()
        assert [stream.is_fork for stream in stage.streams] == record.is_fork[0, :n_used].tolist()
        assert all(before.streams[stream.parent].token == stream.token for stream in stage.streams)
        assert len(stage.streams) + len(stage.dropped) == 2 * len(before.streams)
    last = torch.tensor([stream.score for stream in found.stages[-1].streams], dtype=torch.float64)
    torch.testing.assert_close(last, out.streams.log_score[0, : len(last)].exp(), atol=SAME_FUNCTION, rtol=0)

    assert len(found.attention) == model.config.n_layer
    for block, weights in enumerate(found.attention):
        stage = next(stage for stage in reversed(found.stages) if stage.layer <= block)
        size = len(stage.streams)
        assert weights.shape == (model.config.n_head, size, size)
        torch.testing.assert_close(weights.sum(-1), torch.ones_like(weights[..., 0]), atol=SAME_FUNCTION, rtol=0)
        assert torch.equal(weights, out.attention[block][0, :, :size, :size])


@pytest.mark.parametrize("form", ["plain", "copy-3"])
def test_models_without_forks_have_one_stage(form):
    found = trace(lively_model(small_config(vocab_size=257, **FORMS[form])), "abc", tokenizer=BYTES)
    (stage,) = found.stages
    copies = 3 if form == "copy-3" else 1
    assert [(s.token, s.place, s.score, s.weight) for s in stage.streams] == [
        (t, place, 1, close(1 / copies)) for t in range(3) for place in reversed(range(copies))
    ]
    assert stage.dropped == ()
    assert found.settings["budget"] is found.settings["selection"] is None


def test_the_authors_positions_begin_at_1():
    model = lively_model(small_config(vocab_size=257, authors_compat=True, merge="residual", selection="block"))
    found = trace(model, "abc", tokenizer=BYTES)
    for stage in found.stages:
        assert [stage.bubble(t)[-1].position for t in range(3)] == [1, 2, 3]


def rejected(name: str) -> None:
    raise AssertionError(f"{name} is not JSON")


@pytest.mark.parametrize("budget", [None, 1.5, "4/3", Fraction(4, 3), [2]])
def test_json(budget):
    model = lively_model(small_config(vocab_size=257))
    found = trace(model, 'a "quoted"\nω', tokenizer=BYTES, budget=budget)
    read = json.loads(found.as_json(), parse_constant=rejected)
    assert read == found.as_dict()
    assert read["version"] == 1
    assert read["text"] == 'a "quoted"\nω'
    assert read["loss"] == found.loss
    assert read["settings"]["budget"] == {None: 2, 1.5: 1.5}.get(budget, "4/3") if budget != [2] else [2]
    assert read["settings"]["fork_layers"] == [1, 2, 3]
    assert read["tokens"][0].keys() == {"id", "text", "begin", "end", "streams", "loss", "entropy", "top"}
    assert read["stages"][0]["streams"][0] == {
        "token": 0,
        "place": 0,
        "position": 0,
        "score": 1,
        "weight": 1,
        "parent": None,
        "is_fork": False,
    }
    assert [len(stage["streams"]) for stage in read["stages"]] == [len(stage.streams) for stage in found.stages]


@pytest.mark.parametrize("tok", [BYTES, load_tokenizer()], ids=["bytes", "bpe"])
def test_tokens_cover_the_bytes_of_the_text(tok):
    text = "naïve €5 😀, здравствуй\t\n  שלום"
    model = lively_model(small_config(vocab_size=tok.size, block_size=64), dtype=torch.float32)
    found = trace(model, text, tokenizer=tok, top=1)
    encoded = text.encode()
    assert found.tokens[0].begin == 0
    assert found.tokens[-1].end == len(encoded)
    for before, token in zip(found.tokens, found.tokens[1:], strict=False):
        assert before.end == token.begin
    for token in found.tokens:
        assert encoded[token.begin : token.end] == tok.token_bytes(token.id)
        assert token.text == tok.token_bytes(token.id).decode(errors="replace")
    assert any("\N{REPLACEMENT CHARACTER}" in token.text for token in found.tokens)


def test_ids_and_end_of_text():
    """End-of-text takes no bytes of the text."""
    model = lively_model(small_config(vocab_size=257))
    ids = [BYTES.end_of_text, *BYTES.encode("abc")]
    found = trace(model, ids, tokenizer=BYTES)
    assert found.text == "abc"
    assert [(token.text, token.begin, token.end) for token in found.tokens] == [
        ("", 0, 0),
        ("a", 0, 1),
        ("b", 1, 2),
        ("c", 2, 3),
    ]
    assert trace(model, torch.tensor(ids).tolist(), tokenizer=BYTES).tokens == found.tokens


def test_lone_surrogates_are_replaced():
    """JSON allows them, UTF-8 does not: the trace can always be written to a file."""
    found = trace(lively_model(small_config(vocab_size=257)), "a\ud800b", tokenizer=BYTES)
    assert found.text == "a\N{REPLACEMENT CHARACTER}b"
    assert found.tokens[-1].end == len(found.as_dict()["text"].encode())


def test_padding_of_the_vocabulary_is_never_among_the_guesses():
    model = hand_made((0.2, 0.5), vocab_size=300)
    with torch.no_grad():
        model.embedding.weight[260] = 100 * model.embedding.weight[ord("a")]
    found = trace(model, "a", tokenizer=BYTES, top=257)
    assert {guess.id for guess in found.tokens[0].top} == set(range(257))


def test_a_folder_has_its_tokenizer(tmp_path):
    model = lively_model(small_config(vocab_size=257), dtype=torch.float32)
    save_model(tmp_path, model, tokenizer=BYTES)
    assert trace(tmp_path, "abc") == trace(load(tmp_path), "abc", tokenizer=BYTES)
    assert trace(str(tmp_path), "abc").settings["tokenizer"] == "bytes"


def test_the_shipped_model():
    found = trace(None, "The cell is the basic unit of life.", budget=4)
    assert found.settings["fork_layers"] == (3, 7, 11)
    assert [stage.layer for stage in found.stages] == [0, 3, 7, 11]
    assert max(token.streams[-1] for token in found.tokens) > 1
    assert all(0 <= stream.score <= 1 for stage in found.stages for stream in stage.streams)
    assert found.tokens[1].text == " cell"


@pytest.mark.usefixtures("no_shape_checks")
@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("", {}, "text is empty"),
        ([], {}, "text is empty"),
        ("a" * 17, {}, "text has 17 tokens, more than the model's context length, 16"),
        ("a", {"tokenizer": None}, "tokenizer is missing"),
        ("a", {"top": -1}, "top = -1: give a number from 0 to 257"),
        ("a", {"top": 258}, "top = 258"),
        ("a", {"budget": 0.5}, "below 1"),
        ("a", {"selection": "both"}, "selection = 'both'"),
        ([300], {}, "ids has 300"),
        ([-1], {}, "ids has -1"),
    ],
)
def test_mistakes(text, options, message):
    model = lively_model(small_config(vocab_size=257))
    with pytest.raises(ValueError, match=message):
        trace(model, text, **{"tokenizer": BYTES, **options})


def test_a_model_of_nan_is_named():
    model = lively_model(small_config(vocab_size=257))
    with torch.no_grad():
        model.final_norm.bias.fill_(math.nan)
    with pytest.raises(ValueError, match="NaN"):
        trace(model, "abc", tokenizer=BYTES)


def test_top_of_zero():
    tok: Tokenizer = BYTES
    found = trace(
        lively_model(small_config(vocab_size=257)), random_ids(small_config(), 1, 5)[0].tolist(), tokenizer=tok, top=0
    )
    assert all(token.top == () for token in found.tokens)
