"""A corpus that takes some seconds to prepare, and what is prepared from it without an interruption."""

import pytest

from data.prepared import CORPUS_OPTIONS, contents, random_texts, write_lines
from thoughtbubbles.data.prepare import prepare


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Some seconds of work."""
    texts = random_texts(4000, words=150)
    return write_lines(tmp_path_factory.mktemp("corpus") / "corpus.jsonl", [{"text": text} for text in texts])


@pytest.fixture(scope="module")
def uninterrupted(corpus, tmp_path_factory):
    out = tmp_path_factory.mktemp("out") / "prepared"
    prepare((str(corpus),), out=out, processes=1, **CORPUS_OPTIONS)
    return contents(out)
