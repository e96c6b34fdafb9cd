"""What the benchmarks wrote, and where the docs are."""

import json
from typing import Any

from common import RESULTS

DOCS = RESULTS.parents[1] / "docs"


def records(benchmark: str) -> list[dict[str, Any]]:
    found = (json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json")))
    return [record for record in found if record["benchmark"] == benchmark]


def source(record: dict[str, Any]) -> str:
    return f"`{record['command']}` at {record['commit']}, PyTorch {record['torch']}"
