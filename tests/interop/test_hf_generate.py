"""`generate` is ours: greedy, batched, sampled, with beams, through our cache and without; and what a cache can do."""

import copy
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, pipeline

import thoughtbubbles
from helpers import SAME_FUNCTION_FLOAT32, SAME_ROW, SAME_ROW_FLOAT32, lively_model, random_ids
from interop.hf_models import CACHED, KINDS, config_of, pair, slow_but
from thoughtbubbles.checkpoint import save_model
from thoughtbubbles.data.tokenizer import tokenizer
from thoughtbubbles.generate.requests import Request, generate
from thoughtbubbles.generate.sample import BatchSampling, Sampling, processed
from thoughtbubbles.interop.export import export
from thoughtbubbles.interop.hf import ThoughtbubblesCache, ThoughtbubblesForCausalLM

pytestmark = pytest.mark.slow

PROMPTS = [[3, 1, 4, 1, 5, 9, 2], [6], [5, 3, 5]]
N_IDS = 20
PENALTY = 3.0  # without it a tied model of random weights repeats itself, and equal texts would prove little
GREEDY = {"do_sample": False, "repetition_penalty": PENALTY}
OUR_GREEDY = Sampling(temperature=0, repetition_penalty=PENALTY)


def batch(prompts):
    """Padded with a token that the prompt has: Hugging Face's repetition penalty sees padding too."""
    width = max(map(len, prompts))
    ids = torch.tensor([[p[0]] * (width - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    return {"input_ids": ids, "attention_mask": mask}


def ours(core, prompts, *, max_new, **request):
    requests = [Request(prompt=p, max_new=max_new, **request) for p in prompts]
    return [completion.ids for completion in generate(core, requests)]


GREEDY_CASES = [*((kind, None) for kind in KINDS), ("causal", 1.5), ("block", 4)]
FAST_CASES = [("plain", None), ("causal", 1.5), ("block", None)]


@pytest.mark.parametrize(("kind", "budget"), slow_but(FAST_CASES, GREEDY_CASES))
def test_greedy_equals_ours(tmp_path, kind, budget):
    model, core = pair(tmp_path / "model", kind, dtype=torch.float64)
    options = {"max_new_tokens": 6, **GREEDY, **({} if budget is None else {"budget": budget})}
    expected = ours(core, PROMPTS, max_new=6, sampling=OUR_GREEDY, budget=budget)
    assert len({token for text in expected for token in text}) > 3
    together = model.generate(**batch(PROMPTS), **options)
    assert together[:, 7:].tolist() == expected
    assert model.generate(torch.tensor([PROMPTS[2]]), **options)[0, 3:].tolist() == expected[2]
    if kind in CACHED:
        assert torch.equal(model.generate(**batch(PROMPTS), **options, use_cache=False), together)


def test_a_budget_for_each_row(tmp_path):
    model, core = pair(tmp_path / "model", "causal", dtype=torch.float64, budget=4)
    budgets = [1, "4/3", 3]
    requests = [
        Request(prompt=p, max_new=6, sampling=OUR_GREEDY, budget=r) for p, r in zip(PROMPTS, budgets, strict=True)
    ]
    expected = [completion.ids for completion in generate(core, requests)]
    assert model.generate(**batch(PROMPTS), max_new_tokens=6, **GREEDY, budget=budgets)[:, 7:].tolist() == expected
    assert model.generate(**batch(PROMPTS), max_new_tokens=6, **GREEDY)[:, 7:].tolist() != expected


@pytest.mark.parametrize(
    "copies", [{"num_beams": 3}, {"do_sample": True, "num_return_sequences": 2, "top_k": 1}], ids=str
)
@pytest.mark.parametrize("use_cache", [True, False])
def test_a_budget_for_each_row_and_all_its_texts(tmp_path, copies, use_cache):
    model, _ = pair(tmp_path / "model", "causal", dtype=torch.float64, budget=4)
    options = {"max_new_tokens": 6, "repetition_penalty": PENALTY, "use_cache": use_cache, **copies}
    n = copies.get("num_return_sequences", 1)
    rows = [batch([prompt]) for prompt in PROMPTS]
    alone = [
        model.generate(**row, **options, budget=r)[:, len(p) :]
        for row, p, r in zip(rows, PROMPTS, (1, "4/3", 3), strict=True)
    ]
    together = model.generate(**batch(PROMPTS), **options, budget=[1, "4/3", 3])[:, 7:]
    assert together.shape == (3 * n, 6)
    assert torch.equal(together, torch.cat(alone))
    assert not torch.equal(together, model.generate(**batch(PROMPTS), **options, budget=[3, "4/3", 1])[:, 7:])
    same = model.generate(**batch(PROMPTS), **options, budget=[1.5])
    assert torch.equal(same, model.generate(**batch(PROMPTS), **options, budget=1.5))


@pytest.mark.parametrize(
    "given", [{}, {"generation_config": GenerationConfig(max_new_tokens=9, **GREEDY)}], ids=["", "config"]
)
@pytest.mark.parametrize(("written", "opened"), [("causal", "block"), ("block", "causal")])
def test_the_cache_follows_the_selection_that_a_model_is_opened_with(tmp_path, written, opened, given):
    _, core = pair(tmp_path / "model", written, dtype=torch.float64, budget=1.2)
    folder = export(tmp_path / "model", out=tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(folder, selection=opened).eval()
    save_model(tmp_path / "ours", lively_model(replace(core.config, selection=opened), dtype=torch.float64))
    expected = ours(thoughtbubbles.load(tmp_path / "ours").eval(), PROMPTS, max_new=9, sampling=OUR_GREEDY)
    options = given or {"max_new_tokens": 9, **GREEDY}
    found = model.generate(**batch(PROMPTS), **options)
    assert found[:, 7:].tolist() == expected
    out = model.generate(**batch(PROMPTS), **GREEDY, max_new_tokens=9, return_dict_in_generate=True)
    assert (out.past_key_values is None) == (opened == "block")
    model.save_pretrained(tmp_path / "saved")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", selection=written).eval()
    out = again.generate(**batch(PROMPTS), **GREEDY, max_new_tokens=2, return_dict_in_generate=True)
    assert (out.past_key_values is None) == (written == "block")
    model.generation_config.use_cache = True  # what the user says is kept
    assert model.generate(**batch(PROMPTS), max_new_tokens=2, return_dict_in_generate=True).past_key_values is not None


def test_the_cache_of_block_selection_is_the_causal_rule(tmp_path):
    model, core = pair(tmp_path / "model", "block", dtype=torch.float64, budget=1.2)
    greedy = {"max_new_tokens": 9, **GREEDY}
    requests = [Request(prompt=p, max_new=9, sampling=OUR_GREEDY) for p in PROMPTS]
    approximate = [completion.ids for completion in generate(core, requests, method="cached")]
    assert model.generate(**batch(PROMPTS), **greedy, use_cache=True)[:, 7:].tolist() == approximate
    exact = model.generate(**batch(PROMPTS), **greedy)[:, 7:].tolist()
    assert exact != approximate
    assert model.generate(**batch(PROMPTS), generation_config=GenerationConfig(**greedy))[:, 7:].tolist() == exact
    assert model.generation_config.use_cache is None  # decided at each call, and not saved
    fixed, _ = pair(tmp_path / "fixed", "block-fixed")
    with pytest.raises(ValueError, match="a fixed budget applies to the full context"):
        fixed.generate(**batch(PROMPTS), **greedy, use_cache=True)


SETTINGS = {
    "temperature": {"temperature": 0.7},
    "top_k": {"top_k": 4},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.1, "temperature": 1.3},
    "all": {"temperature": 1.5, "top_k": 9, "top_p": 0.95, "min_p": 0.02, "repetition_penalty": 1.3},
}


CASES = [*(("causal", name) for name in SETTINGS), ("block-residual", "all")]


@pytest.mark.parametrize(("kind", "name"), slow_but([("causal", "all"), ("block-residual", "all")], CASES))
def test_sampled_distributions_equal_ours(tmp_path, kind, name):
    """What may be drawn, and how likely, at each step of the text that Hugging Face has drawn."""
    model, core = pair(tmp_path / "model", kind, dtype=torch.float64)
    model.config.n_ids = N_IDS
    settings = {"top_k": 0, **SETTINGS[name]}
    out = model.generate(
        **batch(PROMPTS), do_sample=True, max_new_tokens=4, output_scores=True, return_dict_in_generate=True, **settings
    )
    own = BatchSampling.of([Sampling(**SETTINGS[name])], device="cpu")
    for step, scores in enumerate(out.scores):
        for row, prompt in enumerate(PROMPTS):
            text = [*prompt, *out.sequences[row, 7 : 7 + step].tolist()]
            assert max(text) < N_IDS
            with torch.no_grad():
                logits = core(torch.tensor([text]), want=("next_logits",)).next_logits
            seen = torch.zeros_like(logits, dtype=torch.bool)
            seen[0, text] = True
            expected = processed(logits, own, n_ids=N_IDS, seen=seen)
            torch.testing.assert_close(
                scores[row].log_softmax(-1),
                expected[0].log_softmax(-1).to(scores.dtype),
                atol=SAME_FUNCTION_FLOAT32,
                rtol=0,
            )


@pytest.mark.parametrize("kind", ["causal"])
def test_padding_ids_are_never_written(tmp_path, kind):
    """Weights that would write nothing else, by every way to write, and with a generation config that knows nothing."""
    core = lively_model(config_of(kind, vocab_size=300, merge="original"), dtype=torch.float32)
    with torch.no_grad():
        core.final_norm.weight.zero_()
        core.final_norm.bias.normal_()
        core.embedding.weight[257:] = core.final_norm.bias * 10
    save_model(tmp_path / "model", core, tokenizer=tokenizer("bytes"))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval()
    ids = torch.tensor([[65, 66]])
    assert model(ids).logits.argmax(-1).min() >= 257  # the model's own logits are left as they are
    for options in (
        {"do_sample": False},
        {"do_sample": True},
        {"num_beams": 3},
        {"do_sample": False, "use_cache": False},
    ):
        assert model.generate(ids, max_new_tokens=3, **options).max() <= 256
    model.generation_config = GenerationConfig()
    assert model.generate(ids, max_new_tokens=3, do_sample=False).max() <= 256


@pytest.mark.parametrize("kind", slow_but(["causal"], CACHED))
def test_beams_through_the_cache_equal_those_without(tmp_path, kind):
    model, _ = pair(tmp_path / "model", kind, dtype=torch.float64)
    options = {"max_new_tokens": 6, "num_beams": 3, "return_dict_in_generate": True, "output_scores": True}
    options |= {"num_return_sequences": 2, "repetition_penalty": PENALTY}
    cached = model.generate(**batch(PROMPTS), **options)
    uncached = model.generate(**batch(PROMPTS), **options, use_cache=False)
    assert torch.equal(cached.sequences, uncached.sequences)
    torch.testing.assert_close(cached.sequences_scores, uncached.sequences_scores, atol=SAME_FUNCTION_FLOAT32, rtol=0)
    assert isinstance(cached.past_key_values, ThoughtbubblesCache)
    assert cached.past_key_values.get_seq_length() == 7 + 6 - 1
    greedy = model.generate(**batch(PROMPTS), max_new_tokens=6, **GREEDY)
    assert not torch.equal(cached.sequences[::2], greedy)  # beams found something else, so rows were moved


WAYS = ["prefill_chunk_size", "prompt_lookup_num_tokens", "assistant_model"]


@pytest.mark.parametrize("way", slow_but(["prompt_lookup_num_tokens"], WAYS))
def test_ways_that_read_several_tokens_at_a_time(tmp_path, way):
    """In pieces; with guesses that are read together, and removed again where they were wrong."""
    model, core = pair(tmp_path / "model", "causal", dtype=torch.float64)
    prompt = [3, 1, 4, 1, 5, 9, 3, 1]
    guesser = lively_model(core.config, seed=1, dtype=torch.float64).eval()
    save_model(tmp_path / "guesser", guesser)
    given = {"assistant_model": ThoughtbubblesForCausalLM.from_pretrained(tmp_path / "guesser").eval()}.get(way, 3)
    written = model.generate(torch.tensor([prompt]), max_new_tokens=5, do_sample=False, **{way: given})
    assert written[0, 8:].tolist() == ours(core, [prompt], max_new=5, sampling=Sampling(temperature=0))[0]


@pytest.mark.parametrize("whose", ["this model", "the assistant"])
def test_guesses_that_could_not_be_taken_back_are_refused_before_the_first_token(tmp_path, whose):
    near, _ = pair(tmp_path / "near", "causal", fork_reach=2)
    plain, _ = pair(tmp_path / "model", "causal")
    model, assistant = (near, plain) if whose == "this model" else (plain, near)
    ids = torch.tensor([[3, 1, 4, 1, 5]])
    with pytest.raises(ValueError, match=f"assistant_model: {whose} has fork_reach = 2"):
        model.generate(ids, max_new_tokens=5, do_sample=False, assistant_model=assistant)
    with pytest.raises(ValueError, match="prompt_lookup_num_tokens: this model has fork_reach = 2"):
        near.generate(ids, GenerationConfig(prompt_lookup_num_tokens=3, max_new_tokens=5))
    assert near.generate(ids, max_new_tokens=5, do_sample=False).shape == (1, 10)
    near.generation_config.prompt_lookup_num_tokens = 3
    with pytest.raises(ValueError, match="prompt_lookup_num_tokens: this model has fork_reach = 2"):
        near.generate(ids, max_new_tokens=5)
    no_forks, _ = pair(tmp_path / "plain", "plain", fork_reach=2)
    assert no_forks.generate(ids, max_new_tokens=5, do_sample=False, prompt_lookup_num_tokens=3).shape == (1, 10)


def test_a_dialogue_continues_from_its_cache(tmp_path):
    """A prompt, its continuation, and more text, read through one cache that has to grow twice."""
    model, core = pair(tmp_path / "model", "causal", dtype=torch.float64)
    cache = ThoughtbubblesCache(capacity=4)
    ids = torch.tensor([[3, 1, 4]])
    first = model.generate(ids, max_new_tokens=3, **GREEDY, past_key_values=cache)
    assert cache.get_seq_length() == 5
    longer = torch.cat([first, torch.tensor([[7, 7, 2]])], dim=1)
    second = model.generate(longer, max_new_tokens=4, **GREEDY, past_key_values=cache)
    assert cache.state.capacity == 16
    assert second[0, 9:].tolist() == ours(core, [longer[0].tolist()], max_new=4, sampling=OUR_GREEDY)[0]


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("kind", slow_but(["causal"], CACHED))
def test_reading_in_pieces_equals_reading_in_parallel(tmp_path, kind, side):
    model, core = pair(tmp_path / "model", kind, dtype=torch.float64)
    lengths, width = [12, 5, 9], 12
    ids = random_ids(core.config, 3, width)
    at = torch.arange(width)
    mask = torch.stack([(at >= width - n) if side == "left" else (at < n) for n in lengths]).long()
    with torch.no_grad():
        whole = model(ids, attention_mask=mask).logits
        for cuts in ([12], [7, 5], [1, 1, 10], [4, 4, 4]):
            cache, begin, pieces = ThoughtbubblesCache(), 0, []
            for n in cuts:
                out = model(
                    ids[:, begin : begin + n], attention_mask=mask[:, : begin + n], past_key_values=cache, budget=None
                )
                assert out.past_key_values is cache
                pieces.append(out.logits)
                begin += n
            torch.testing.assert_close(torch.cat(pieces, dim=1), whole, atol=SAME_ROW, rtol=0)
            assert (cache.get_seq_length(), cache.batch_size) == (12, 3)
            assert cache.is_real.sum(1).tolist() == lengths


def test_what_a_cache_can_do(tmp_path):
    model, core = pair(tmp_path / "model", "causal", dtype=torch.float64)
    inputs = batch(PROMPTS)
    more = random_ids(core.config, 3, 4, seed=9)
    mask = torch.cat([inputs["attention_mask"], torch.ones(3, 4, dtype=torch.long)], dim=1)

    def read(cache, rows, ids=more, columns=11):
        return model(ids[rows], attention_mask=mask[rows][:, :columns], past_key_values=cache).logits

    with torch.no_grad():
        fresh = model(**inputs, use_cache=True).past_key_values
        expected = read(copy.deepcopy(fresh), [0, 1, 2])

        cache = copy.deepcopy(fresh)
        cache.reorder_cache(torch.tensor([2, 0, 0]))
        torch.testing.assert_close(read(cache, [2, 0, 0]), expected[[2, 0, 0]], atol=SAME_ROW, rtol=0)

        cache = copy.deepcopy(fresh)
        cache.batch_repeat_interleave(2)
        assert cache.batch_size == 6
        rows = [0, 0, 1, 1, 2, 2]
        torch.testing.assert_close(read(cache, rows), expected[rows], atol=SAME_ROW, rtol=0)

        cache = copy.deepcopy(fresh)
        cache.batch_select_indices(torch.tensor([True, False, True]))
        torch.testing.assert_close(read(cache, [0, 2]), expected[[0, 2]], atol=SAME_ROW, rtol=0)

        cache = copy.deepcopy(fresh)
        read(cache, [0, 1, 2], ids=more.flip(1))
        cache.crop(-4)
        assert cache.get_seq_length() == 7
        torch.testing.assert_close(read(cache, [0, 1, 2]), expected, atol=SAME_ROW, rtol=0)

        cache.reset()
        assert cache.get_seq_length() == 0
        model(**inputs, past_key_values=cache)
        torch.testing.assert_close(read(cache, [0, 1, 2]), expected, atol=SAME_ROW, rtol=0)
        cache.crop(-99)
        assert not cache.is_initialized

    cache = copy.deepcopy(fresh)
    with pytest.raises(ValueError, match="as a negative number"):
        cache.crop(2)
    with pytest.raises(ValueError, match="a row keeps at least its first token"):
        cache.crop(-3)  # the second row has one token only
    with pytest.raises(ValueError, match="input_ids has 1 rows, past_key_values 3"):
        model(more[:1], past_key_values=cache)
    with pytest.raises(ValueError, match=r"input_ids have shape \(3, 4\), attention_mask \(3, 9\)"):
        model(more, attention_mask=mask[:, :9], past_key_values=cache)
    with pytest.raises(ValueError, match="hole in row 0"):
        model(more, attention_mask=mask.index_fill(1, torch.tensor(8), 0), past_key_values=cache)
    with pytest.raises(ValueError, match="use_cache=False with past_key_values"):
        model(more, past_key_values=cache, use_cache=False)
    assert cache.get_seq_length() == 7


def test_the_block_size_is_the_end(tmp_path):
    model, core = pair(tmp_path / "model", "causal")
    assert model.generate(**batch(PROMPTS), max_new_tokens=9).shape == (3, 16)
    message = r"a prompt of 7 and 10 new tokens are more than block_size = 16.*ask for at most 9"
    for use_cache in (True, False):
        with pytest.raises(ValueError, match=message):
            model.generate(**batch(PROMPTS), max_new_tokens=10, use_cache=use_cache)
        with pytest.raises(ValueError, match=message):  # one row: the library drops its mask
            model.generate(torch.tensor(PROMPTS[:1]), max_new_tokens=10, use_cache=use_cache)
        with pytest.raises(ValueError, match=r"(max_length = 17|7 and 10 new tokens).* block_size = 16"):
            model.generate(torch.tensor(PROMPTS[:1]), max_length=17, use_cache=use_cache)
    with pytest.raises(ValueError, match=r"give max_length of at most 16$"):
        model.generate(**batch(PROMPTS), max_length=20)
    assert model.generate(torch.tensor(PROMPTS[:1]), max_length=16).shape == (1, 16)
    ids = random_ids(core.config, 1, 16)
    with pytest.raises(ValueError, match=r"shorten the prompt to 13$"):
        model.generate(ids, max_new_tokens=3)
    with pytest.raises(ValueError, match=r"shorten the prompt$"):
        model.generate(ids, max_new_tokens=16)
    cache = model(ids[:, :14], use_cache=True).past_key_values
    with pytest.raises(ValueError, match="the cache is full"):
        model(torch.tensor([[1, 2, 3]]), past_key_values=cache)
    out = model(ids[:, 14:], past_key_values=cache)  # what was refused has left nothing behind
    torch.testing.assert_close(out.logits, model(ids).logits[:, 14:], atol=SAME_ROW_FLOAT32, rtol=0)
    with pytest.raises(ValueError, match="the cache is full"):
        model(torch.tensor([[1]]), past_key_values=cache)


@pytest.mark.parametrize("selection", slow_but(["causal"], ["causal", "block"]))
def test_the_pipeline(tmp_path, selection):
    core = lively_model(config_of("causal", vocab_size=300, selection=selection), dtype=torch.float64).eval()
    save_model(tmp_path / "model", core, tokenizer=tokenizer("bytes"))
    write = pipeline("text-generation", model=str(tmp_path / "model"), dtype=torch.float64, batch_size=2)
    prompts = ["fork", "a"]
    with pytest.raises(ValueError, match=r"a prompt of 4 and 256 new tokens .* ask for at most 12"):  # its own default
        write("fork")
    found = write(prompts, max_new_tokens=6, do_sample=False, return_full_text=False)
    requests = [Request(prompt=p, max_new=6, sampling=Sampling(temperature=0)) for p in prompts]
    expected = [completion.text for completion in generate(core, requests, tokenizer=tokenizer("bytes"))]
    assert [row[0]["generated_text"] for row in found] == expected
    theirs = AutoTokenizer.from_pretrained(tmp_path / "model", padding_side="left")
    inputs = theirs(prompts, return_tensors="pt", padding=True)
    assert theirs.batch_decode(write.model.generate(**inputs, max_new_tokens=6, do_sample=False)[:, 4:]) == expected


@pytest.mark.parametrize("options", [{"use_cache": True}, {"use_cache": False}, {"num_beams": 2}], ids=str)
def test_stop_strings(tmp_path, options):
    core = lively_model(config_of("causal", vocab_size=300, merge="original"), dtype=torch.float32).eval()
    with torch.no_grad():  # it writes "n", whatever it reads
        core.final_norm.weight.zero_()
        core.final_norm.bias.normal_()
        core.embedding.weight[ord("n")] = core.final_norm.bias * 10
    save_model(tmp_path / "model", core, tokenizer=tokenizer("bytes"))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval()
    theirs = AutoTokenizer.from_pretrained(tmp_path / "model")
    inputs = theirs("a", return_tensors="pt")
    found = model.generate(
        **inputs, max_new_tokens=9, do_sample=False, stop_strings=["nnn"], tokenizer=theirs, **options
    )
    assert theirs.decode(found[0]) == "annn"
