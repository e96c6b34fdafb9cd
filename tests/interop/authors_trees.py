"""What the tests of the authors' checkpoints share: a tree of random arrays, its settings, and the model made of it."""

import json

import torch

from interop.authors_reference import random_tree
from thoughtbubbles.interop.authors import import_model

PLAN = ["regular", "regular", "fork", "regular", "regular", "fork", "regular", "regular", "fork", "regular"]
WIDTH, HEADS, VOCABULARY, TOKENS = 12, 3, 23, 8


def tree_of(plan=PLAN, **options):
    return random_tree(plan, width=WIDTH, vocab_size=VOCABULARY, **options)


def imported(tree, **options):
    return import_model(tree, **{"heads": HEADS, "block_size": TOKENS, "budget": 2, **options})


def settings(**changes):
    """What their trainer stores next to a checkpoint, as far as a model is concerned."""
    found = {"n_head": HEADS, "n_embd": WIDTH, "vocab_size": VOCABULARY, "plan": PLAN, "bias": True, "dropout": 0.0}
    found |= {"block_size": TOKENS, "max_block_size": 2 * TOKENS, "averaging_method": "residual", "lr": 2.5e-4}
    return json.dumps({"config": {**found, **changes}, "steps": 40, "score": 0.3, "wandb": None})


def rows_of_ids(rows, *, tokens=TOKENS, seed=1):
    return torch.randint(VOCABULARY, (rows, tokens), generator=torch.Generator().manual_seed(seed))
