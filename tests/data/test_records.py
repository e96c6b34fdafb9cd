"""Stories of CLUTRR as examples: the same prompt as in the evaluation, and no test story is ever trained on."""

import json

import numpy as np
import pytest

from thoughtbubbles.data.encode import encode_parts
from thoughtbubbles.data.prepare import prepare
from thoughtbubbles.data.records import FIELDS, Example, Part, read_record, relation_prompt
from thoughtbubbles.data.shards import open_dataset
from thoughtbubbles.data.tokenizer import tokenizer
from thoughtbubbles.evals.likelihood import encode_choices
from thoughtbubbles.evals.tasks.clutrr import RELATIONS, document

STORY = {
    "id": "7",
    "story": " [Una] has a brother, [Ivo]. [Ivo] is the father of [Kim]. ",
    "clean_story": "not used",
    "query": "('Kim', 'Una')",
    "target": "aunt",
    "task_name": "task_1.2",
    "split": "train",
}
PROMPT = "Una has a brother, Ivo. Ivo is the father of Kim. Una is Kim's"


def test_a_story_is_an_example():
    assert read_record(STORY) == Example((Part(PROMPT, False), Part(" aunt", True)))
    assert read_record({name: STORY[name] for name in ("story", "query", "target")}) == read_record(STORY)
    assert {"story", "query", "target", "split"} <= set(FIELDS)  # or a table would lose the split, and train on it


def test_test_stories_are_never_trained_on(tmp_path):
    assert read_record({**STORY, "split": "test"}) is None
    source = tmp_path / "stories.jsonl"
    tested = [{**STORY, "split": "test", "query": f"('Kim', 'T{n}')"} for n in range(20)]
    trained = [{**STORY, "query": f"('Kim', 'A{n}')"} for n in range(20)]
    source.write_text("".join(json.dumps(record) + "\n" for record in tested + trained))
    prepare((str(source),), out=tmp_path / "data", tokenizer="bytes", val_fraction=0.3, processes=1)
    shards = [open_dataset(tmp_path / "data", split=split).shards for split in ("train", "val")]
    text = "".join(tokenizer("bytes").decode(shard.tokens.tolist()) for each in shards for shard in each)
    assert all(f"A{n} is Kim's aunt" in text for n in range(20))
    assert " T" not in text


@pytest.mark.parametrize("relation", RELATIONS)
def test_training_and_evaluation_have_the_same_ids(relation):
    """The prompt, the answer, and where one ends and the other begins; then end-of-text."""
    tok = tokenizer("gpt2")
    asked = document({**STORY, "target": relation, "split": "test"})
    assert asked.context == relation_prompt(STORY["story"], STORY["query"]) == PROMPT
    query = encode_choices(tok, asked.context, asked.choices)[asked.gold]
    ids, mask = encode_parts(tok, read_record({**STORY, "target": relation}).parts)
    assert ids.tolist() == [*query.context, *query.continuation, tok.end_of_text]
    assert np.flatnonzero(mask).tolist() == list(range(len(query.context), len(ids)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query": "Kim, Una"}, r"query is 'Kim, Una': it must be a pair of names, such as \('Ann', 'Bob'\)"),
        ({"query": "('Kim',)"}, "it must be a pair of names"),
        ({"query": "(" * 10_000}, r"query is '\(\(.{95,100}…: it must be a pair of names"),
        ({"query": ["Kim", "Una"]}, "query is list, not text: give text"),
        ({"story": None}, "story is NoneType, not text: give text"),
        ({"target": None}, "target is NoneType, not text: give text"),
    ],
)
def test_malformed_stories(change, message):
    with pytest.raises(ValueError, match=message):
        read_record({**STORY, **change})


def test_a_story_without_a_target_is_no_record():
    with pytest.raises(ValueError, match=r"has the fields story, query: give .*\{story, query, target\} or"):
        read_record({"story": "A story.", "query": "('Kim', 'Una')"})
