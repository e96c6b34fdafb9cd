"""The checks of `--dry-run`: opens everything that the real run would open, at full size, without training."""

import os
from pathlib import Path

import torch

from thoughtbubbles.distributed import World, find_device
from thoughtbubbles.files import check_folder, locked
from thoughtbubbles.train.config import RunConfig
from thoughtbubbles.train.data import RunData
from thoughtbubbles.train.initialize import check_tokenizer, fitting_weights
from thoughtbubbles.train.log import check_sinks
from thoughtbubbles.train.parallel import find_precision, uses_graph
from thoughtbubbles.train.resume import find_checkpoint, same_run


def check_run(config: RunConfig, *, resume: bool, made_in: Path) -> list[str]:
    """Raises the errors of the real run, and returns a description of what it would use. Writes nothing to its folder.

    Checks the data (checksums, ids, tokenizer, first batch), the weights to start from and the checkpoint to resume.
    Built-in data is written to `made_in`.
    """
    # Each rank checks on its own: a process group left here could not be joined again by the step that follows.
    rank, size = (int(os.environ.get(name, default)) for name, default in (("RANK", 0), ("WORLD_SIZE", 1)))
    world = World(torch.device(find_device(config.device)), rank, size)
    precision = find_precision(config.compute, world.device.type)
    check_sinks(config.log)
    folder = check_folder(config.folder, option="--out")
    if rank == 0 and folder.is_dir():
        with locked(folder, doing="training in"):
            pass
    uses_graph(config.compute, world._replace(is_distributed="RANK" in os.environ))
    data = RunData(config, world, made_in=made_in / f"rank-{rank}")
    data.micro_batches(0)
    said = [*data.describe(config.steps), *data.notes]
    found = find_checkpoint(config.folder, resume=resume, say=said.append)
    if found is not None:
        state = same_run(found, config, precision=precision, fingerprints=data.fingerprints)
        said.append(f"{found}: resumes after step {state.step} of {config.steps}")
    elif config.init_from is not None:
        weights, fresh = fitting_weights(config.model, config.init_from)
        check_tokenizer(config.init_from, data.tokenizer.name)
        said.append(f"{config.init_from}: {len(weights)} weights fit, {len(fresh)} of fork layers are new")
    return said
