"""Sampling by recomputation."""

import torch

from helpers import lively_model, random_ids, small_config
from thoughtbubbles.generate.sample import sample


def test_greedy_is_the_likeliest_token_each_time():
    model = lively_model(small_config())
    ids = random_ids(model.config, 2, 3)
    written = sample(model, ids, n_new=4, vocab_size=23, temperature=0)
    assert torch.equal(written[:, :3], ids)
    for length in range(3, 7):
        expected = model(written[:, :length], want=("logits",)).logits[:, -1].argmax(-1)
        assert torch.equal(written[:, length], expected)


def test_drawn_from_the_model_and_repeatable():
    model = lively_model(small_config())
    ids = random_ids(model.config, 1, 5).expand(4000, -1)
    written = sample(model, ids, n_new=1, vocab_size=23, generator=torch.Generator().manual_seed(0))
    again = sample(model, ids, n_new=1, vocab_size=23, generator=torch.Generator().manual_seed(0))
    assert torch.equal(written, again)
    probabilities = model(ids[:1], want=("log_probs",)).log_probs[0, -1].exp()
    found = torch.bincount(written[:, -1], minlength=23) / 4000
    assert (found - probabilities).abs().max() < 0.04  # five standard errors of a share of one half


def test_ids_without_text_never_occur():
    model = lively_model(small_config())
    ids = random_ids(model.config, 64, 4)
    written = sample(model, ids, n_new=6, vocab_size=7, temperature=5.0, generator=torch.Generator().manual_seed(0))
    assert written[:, 4:].max() < 7


def test_a_long_prefix_is_cut_on_the_left():
    model = lively_model(small_config())
    ids = random_ids(model.config, 1, 40)
    written = sample(model, ids, n_new=1, vocab_size=23, temperature=0)
    expected = model(ids[:, -16:], want=("logits",)).logits[:, -1].argmax(-1)
    assert torch.equal(written[:, -1], expected)
