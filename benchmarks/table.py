"""Writes the tables of the docs from the files in benchmarks/results, between the markers that name them.

python benchmarks/table.py            rewrite the pages
python benchmarks/table.py --check    exit 1 if a page is not up to date
"""

import re
import sys
from pathlib import Path

from tables.data import loader_table, prepare_table
from tables.inference import decode_table, evals_table, serve_table
from tables.model import chunks_table, effect_table, loss_table, memory_table, selection_table
from tables.readme import readme_table
from tables.records import DOCS
from tables.training import train_step_table, train_table

TABLES = {
    DOCS.parent / "README.md": {"results": readme_table},
    DOCS / "index.md": {"loss": loss_table, "selection": selection_table, "memory": memory_table},
    DOCS / "guides" / "data.md": {"prepare": prepare_table, "loader": loader_table},
    DOCS / "guides" / "evaluation.md": {"evals": evals_table},
    DOCS / "guides" / "generation.md": {"decode": decode_table},
    DOCS / "guides" / "serving.md": {"serve": serve_table},
    DOCS / "guides" / "speed.md": {"train-step": train_step_table},
    DOCS / "guides" / "training.md": {"train": train_table},
    DOCS / "log.md": {"loss-chunks": chunks_table, "effect": effect_table},
}


def written(page: Path) -> str:
    text = page.read_text(encoding="utf-8")
    for name, table in TABLES[page].items():
        marked = re.compile(f"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
        assert marked.search(text), f"{page} has no markers for {name}"
        text = marked.sub(lambda match, table=table: f"{match[1]}{table()}\n{match[2]}", text)  # type: ignore[misc]
    return text


if __name__ == "__main__":
    if sys.argv[1:] == ["--check"]:
        sys.exit(any(page.read_text(encoding="utf-8") != written(page) for page in TABLES))
    for page in TABLES:
        page.write_text(written(page), encoding="utf-8")
