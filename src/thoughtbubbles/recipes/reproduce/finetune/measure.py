"""What is measured of a fine-tuned model: its answers to the test questions, and where it has streams.

CLUTRR's answers are chosen from 18 relations, in two ways:

    accuracy      the lowest mean loss per token, as `thoughtbubbles eval` scores the task
    whole_answer  the most likely answer with the end-of-text that training puts after it: what the model would say

The first is meant for models that have not learned where an answer ends. It prefers "mother-in-law" to "mother" as soon
as "mother" is uncertain, since the rest of the longer word is easy to predict.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any, NamedTuple

import torch

from thoughtbubbles.data.tokenizer import Tokenizer
from thoughtbubbles.evals.documents import Benchmark
from thoughtbubbles.evals.evaluate import Conditions, evaluate
from thoughtbubbles.evals.likelihood import BATCH_TOKENS, Query, batches, encode_choices, log_likelihoods
from thoughtbubbles.evals.metrics import Answer, summary
from thoughtbubbles.evals.tasks.task import Choices, Question
from thoughtbubbles.generate.padding import padded
from thoughtbubbles.generate.requests import exact_method
from thoughtbubbles.model.transformer import Thoughtbubbles

WHOLE = "whole_answer"
NAMES, QUESTION, ELSEWHERE = "names", "question", "elsewhere"
BRACKETED = re.compile(r"\[([^\[\]]+)\]")
ANSWERS_AT_ONCE = 128
SAMPLES, SAMPLE_CHARACTERS = 3, 300


def measure_stories(
    model: Thoughtbubbles, tokenizer: Tokenizer, benchmark: Benchmark, names: Mapping[int, set[str]]
) -> dict[str, Any]:
    """`names`: of the people in each story of CLUTRR."""
    answers: dict[int, Answer] = {}
    evaluate(model, tokenizer, benchmark.task, benchmark.documents, keep=answers.__setitem__)
    stories = {number: each for number, each in benchmark.documents.items() if isinstance(each, Choices)}
    right = whole_answers(model, tokenizer, list(stories.values()))
    scored = [
        replace(answers[number], scores={**answers[number].scores, WHOLE: float(is_right)})
        for number, is_right in zip(stories, right, strict=True)
    ]
    found = summary(benchmark.task, scored)
    rows = [tokenizer.encode(story.context)[-model.config.block_size :] for story in stories.values()]
    kinds = [kinds_of(row, names[number], tokenizer) for number, row in zip(stories, rows, strict=True)]
    return {
        **_few(found),
        "truncated": found["truncated"],
        "by": {name: {part: _few(each) for part, each in parts.items()} for name, parts in found["by"].items()},
        "right": "".join(str(int(each)) for each in right),  # by story, to compare two models on the same ones
        "streams": by_kind(traced(model, rows, vocab_size=tokenizer.size), kinds) if model.config.fork_layers else None,
    }


def _few(found: Mapping[str, Any]) -> dict[str, Any]:
    return {name: found[name] for name in ("documents", WHOLE, "accuracy")}


def whole_answers(model: Thoughtbubbles, tokenizer: Tokenizer, stories: Sequence[Choices]) -> list[bool]:
    """Whether the most likely answer, with the end-of-text after it, is the right one."""
    queries = [
        Query(query.context, (*query.continuation, tokenizer.end_of_text))
        for story in stories
        for query in encode_choices(tokenizer, story.context, story.choices)
    ]
    each = iter(log_likelihoods(model, queries, vocab_size=tokenizer.size))
    found = []
    for story in stories:
        log_probs = [next(each).log_prob for _ in story.choices]
        found.append(log_probs.index(max(log_probs)) == story.gold)
    return found


def names_in(story: str) -> set[str]:
    """Of a record of CLUTRR, where they are in brackets."""
    return set(BRACKETED.findall(story))


def kinds_of(row: Sequence[int], names: set[str], tokenizer: Tokenizer) -> list[str]:
    """Of each token of a prompt: part of a name, the last one (which predicts the answer), or anything else."""
    pieces = [tokenizer.token_bytes(token) for token in row]
    text, at_name = b"".join(pieces), set()
    for name in names:
        for found in re.finditer(rb"\b" + re.escape(name.encode()) + rb"\b", text):
            at_name |= set(range(*found.span()))
    kinds, end = [], 0
    for piece in pieces:
        begin, end = end, end + len(piece)
        kinds.append(NAMES if at_name & set(range(begin, end)) else ELSEWHERE)
    return [*kinds[:-1], QUESTION]


def measure_answers(
    model: Thoughtbubbles, tokenizer: Tokenizer, benchmark: Benchmark, *, answers_at_once: int = ANSWERS_AT_ONCE
) -> dict[str, Any]:
    """GSM8K's questions, answered greedily; on cuda with compiled decoding.

    An answer has ended by itself if end-of-text is the most likely token after it: one that was cut goes on.
    """
    answers: dict[int, Answer] = {}
    method = exact_method(model.config)
    on_gpu = model.embedding.weight.device.type == "cuda"
    is_compiled = method == "cached" and on_gpu
    conditions = Conditions(answers_at_once=answers_at_once, method=method, compiled=is_compiled)
    evaluate(model, tokenizer, benchmark.task, benchmark.documents, conditions, keep=answers.__setitem__)
    rows, kinds, texts = [], [], []
    for number, document in benchmark.documents.items():
        assert isinstance(document, Question)
        texts.append(answers[number].text or "")
        asked, said = tokenizer.encode(document.prompt), tokenizer.encode(texts[-1])
        rows.append([*asked, *said][-model.config.block_size :])
        kinds.append([*["questions"] * len(asked), *["answers"] * len(said)][-model.config.block_size :])
    found = traced(model, rows, vocab_size=tokenizer.size)
    ended = sum(each.likeliest == tokenizer.end_of_text for each in found)
    numbers = summary(benchmark.task, [answers[number] for number in benchmark.documents])
    return {
        "documents": numbers["documents"],
        "exact_match": numbers["accuracy"],
        "truncated": numbers["truncated"],
        "method": method,
        "ended": ended,
        "answer_tokens": fmean(row.count("answers") for row in kinds),
        "right": "".join(str(int(answers[number].scores["accuracy"])) for number in benchmark.documents),
        "streams": by_kind(found, kinds) if model.config.fork_layers else None,
        "samples": [text[:SAMPLE_CHARACTERS] for text in texts[:SAMPLES]],
    }


class Traced(NamedTuple):
    streams: list[list[int]]  # of each token, after each fork layer
    likeliest: int  # the most likely next token


@torch.no_grad()
def traced(model: Thoughtbubbles, rows: Sequence[Sequence[int]], *, vocab_size: int) -> list[Traced]:
    device = model.embedding.weight.device
    found: dict[int, Traced] = {}
    for batch in batches([len(row) for row in rows], limit=BATCH_TOKENS[device.type]):
        ids, lengths = padded([rows[i] for i in batch], device=device)
        out = model(ids, lengths=lengths, want=("next_logits",), trace=True)
        likeliest = out.next_logits[:, :vocab_size].argmax(-1).tolist()
        sizes = [record.bubble_size for record in out.forks]
        streams = torch.stack(sizes, dim=-1).tolist() if sizes else [[] for _ in batch]
        for place, i in enumerate(batch):
            found[i] = Traced(streams[place][: len(rows[i])], likeliest[place])
    return [found[i] for i in range(len(rows))]


def by_kind(found: Sequence[Traced], kinds: Sequence[Sequence[str]]) -> dict[str, dict[str, Any]]:
    """Mean streams per token after each fork layer, by kind of token."""
    sizes: dict[str, list[list[int]]] = {}
    for row, of_row in zip(found, kinds, strict=True):
        for streams, kind in zip(row.streams, of_row, strict=True):
            sizes.setdefault(kind, []).append(streams)
    return {
        kind: {"tokens": len(each), "streams": [fmean(layer) for layer in zip(*each, strict=True)]}
        for kind, each in sorted(sizes.items())
    }
