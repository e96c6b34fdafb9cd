"""Text of a request: its prompt is tokenized once, and it ends at stop strings, end ids, limits and the block."""

from dataclasses import replace

import pytest
import torch

from generate.completions import GREEDY, PIECES, assert_same_completion, model_of
from helpers import SAME_ROW, lively_model, small_config
from thoughtbubbles.data.tokenizer import Tokenizer, tokenizer
from thoughtbubbles.generate.requests import Completion, Request, generate, stream
from thoughtbubbles.generate.sample import Sampling


@pytest.fixture(scope="module")
def model():
    return model_of()


@pytest.fixture(scope="module")
def free(model) -> list[tuple[Request, Completion]]:
    """Texts that nothing ends but the block."""
    requests = [
        Request(prompt=[1], max_new=19, end_ids=(), sampling=Sampling(seed=seed, temperature=2)) for seed in range(6)
    ]
    completions = generate(model, requests, tokenizer=PIECES)
    for completion in completions:
        assert completion.finish == "length"
        assert completion.text == PIECES.decode(completion.ids)
    return list(zip(requests, completions, strict=True))


@pytest.mark.parametrize("seed", [0, 3])
def test_stop_strings_cut_the_free_text(model, free, seed):
    """Every piece of the free text as a stop string, all in one batch, with one that does not stop at all."""
    request, whole = free[seed]
    clean = whole.text.replace("�", " ").split(PIECES.decode([PIECES.end_of_text]))[0]
    stops = sorted({clean[i : i + n] for i in range(len(clean)) for n in (1, 2, 5)})[:40]
    requests = [replace(request, stop=(s,)) for s in stops if " " not in s] + [replace(request, stop=("zzz",))]
    *stopped, unstopped = generate(model, requests, tokenizer=PIECES)
    assert_same_completion(unstopped, whole)
    assert len(stopped) > 3
    for asked, completion in zip(requests, stopped, strict=False):
        [stop] = asked.stop
        n = len(completion.ids)
        assert completion.finish == "stop"
        assert completion.text == whole.text.partition(stop)[0]
        assert completion.ids == whole.ids[:n]
        assert stop in PIECES.decode(whole.ids[:n])
        assert stop not in PIECES.decode(whole.ids[: n - 1]), "the very token that completes it is the last"
        torch.testing.assert_close(completion.log_probs, whole.log_probs[:n], atol=SAME_ROW, rtol=0)


def test_a_stop_string_is_never_shown_not_even_partly(model, free):
    request, whole = free[1]
    stop = whole.text.split("�")[0].split("<")[0][-4:]
    assert len(stop) == 4
    shown = ""
    for token in stream(model, [replace(request, stop=(stop, "no such text"))], tokenizer=PIECES):
        shown += token.text
        assert whole.text.partition(stop)[0].startswith(shown)
    assert token.finish == "stop"
    assert shown == whole.text.partition(stop)[0]


def test_a_stop_string_in_the_first_token(model, free):
    request, whole = free[2]
    first = PIECES.decode(whole.ids[:1])
    assert first != "�"
    [completion] = generate(model, [replace(request, stop=(first[:1],))], tokenizer=PIECES)
    assert (completion.text, completion.ids, completion.finish) == ("", whole.ids[:1], "stop")


def test_stop_strings_in_the_prompt_do_not_count(model):
    request = Request(prompt=[0, 1, 0, 1], max_new=3, sampling=GREEDY, stop=("abab",))
    [completion] = generate(model, [request], tokenizer=PIECES)
    assert len(completion.ids) == 3 or "abab" in PIECES.decode(completion.ids)


def test_half_a_character_at_the_end_is_shown(model):
    """Two tokens make one é; a row that ends between them shows a replacement character."""
    requests = [
        Request(prompt=[1], max_new=3, end_ids=(), sampling=Sampling(seed=seed, temperature=4)) for seed in range(200)
    ]
    completions = generate(model, requests, tokenizer=PIECES, batch_size=200)
    request = next(r for r, c in zip(requests, completions, strict=True) if c.ids[1:] == [6, 7])
    whole = list(stream(model, [request], tokenizer=PIECES))
    half = list(stream(model, [replace(request, max_new=2)], tokenizer=PIECES))
    assert [token.text for token in whole] == [whole[0].text, "", "é"]
    assert [token.text for token in half] == [whole[0].text, "�"]


def test_end_ids(model, free):
    request, whole = free[5]
    ends = whole.ids[1:8]
    completions = generate(model, [replace(request, end_ids=(99, end)) for end in ends], tokenizer=PIECES)
    for end, completion in zip(ends, completions, strict=True):
        n = whole.ids.index(end) + 1
        assert completion.finish == "end"
        assert completion.ids == whole.ids[:n]
        assert completion.text == PIECES.decode(whole.ids[: n - 1])


def test_end_of_text_ends_a_row_by_default(model, free):
    ended = 0
    completions = generate(model, [replace(request, end_ids=None) for request, _ in free], tokenizer=PIECES)
    for (_, whole), completion in zip(free, completions, strict=True):
        if PIECES.end_of_text in whole.ids:
            n = whole.ids.index(PIECES.end_of_text) + 1
            assert (completion.finish, completion.ids) == ("end", whole.ids[:n])
            assert completion.text == PIECES.decode(whole.ids[: n - 1])
            ended += 1
        else:
            assert_same_completion(completion, whole)
    assert ended > 0
    for completion in generate(model, [Request(prompt=[1], sampling=Sampling(seed=s), max_new=6) for s in range(20)]):
        assert (len(completion.ids), completion.text) == (6, None), "without a tokenizer no id is special"


def test_max_new_and_the_block(model):
    """Without a limit a row continues to block_size tokens; the last one is generated though no step could read it."""
    requests = [
        Request(prompt=[1] * 13, sampling=GREEDY),
        Request(prompt=[1] * 19, sampling=GREEDY),
        Request(prompt=[1] * 19, sampling=GREEDY, max_new=1),
        Request(prompt=[1] * 13, sampling=GREEDY, max_new=3),
    ]
    for method in ("cached", "uncached"):
        completions = generate(model, requests, method=method)
        assert [len(completion.ids) for completion in completions] == [7, 1, 1, 3]
        assert all(completion.finish == "length" for completion in completions)
        assert completions[3].ids == completions[0].ids[:3]


def test_text_prompts():
    model = lively_model(small_config(vocab_size=260, block_size=24))
    of = tokenizer("bytes")
    words, ids = generate(
        model,
        [Request(prompt=prompt, max_new=5, sampling=GREEDY) for prompt in ("héllo", of.encode("héllo"))],
        tokenizer=of,
    )
    assert_same_completion(words, ids)


@pytest.mark.parametrize(
    "run", [generate, lambda *args, **options: list(stream(*args, **options))], ids=["generate", "stream"]
)
def test_every_text_prompt_is_tokenized_once(run, monkeypatch):
    encoded, encode = [], Tokenizer.encode
    monkeypatch.setattr(Tokenizer, "encode", lambda self, text: [encoded.append(text), encode(self, text)][1])
    requests = [Request(prompt=prompt, max_new=2) for prompt in ("one", [1, 2], "two")]
    run(model_of(vocab_size=260), requests, tokenizer=tokenizer("bytes"))
    assert encoded == ["one", "two"]
