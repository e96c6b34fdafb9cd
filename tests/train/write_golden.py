"""Rewrites the golden losses: `python -m train.write_golden` in tests/. Explain the change in the commit message."""

import json
import tempfile
from dataclasses import replace
from pathlib import Path

import torch

from thoughtbubbles.train.config import RunConfig
from thoughtbubbles.train.loop import train
from train.runs import losses, tiny

FORMS = ("tiny", "tiny-gate", "tiny-causal", "tiny-block", "tiny-plain")


def golden_run(form: str, folder: Path) -> RunConfig:
    config = tiny(form)
    return replace(
        config,
        out=folder / form,
        tokens=6 * config.tokens_per_step,
        compute=replace(config.compute, precision="float64"),
        eval=replace(config.eval, tokens=2048, sample_tokens=0),
    )


def golden(form: str, folder: Path) -> dict[str, object]:
    result = train(golden_run(form, folder))
    return {"losses": losses(folder / form), "validation_loss": result.validation_loss["synthetic"]}


if __name__ == "__main__":
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        found = {form: golden(form, Path(folder)) for form in FORMS}
    path = Path(__file__).parents[1] / "golden" / "tiny.json"
    path.write_text(json.dumps(found, indent=2) + "\n")
