"""The command `thoughtbubbles analyze`: a folder of figures, each with its numbers, and one report of them all."""

import shlex
import sys
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import tyro

from thoughtbubbles.analysis import dial
from thoughtbubbles.analysis.draw import write
from thoughtbubbles.analysis.figures import Job, all_figures
from thoughtbubbles.analysis.html import report
from thoughtbubbles.analysis.sample import clutrr_stories, data_sample, file_sample, own_sample
from thoughtbubbles.checkpoint import NUMBERED, find_model, load, load_tokenizer
from thoughtbubbles.data.tokenizer import Tokenizer
from thoughtbubbles.distributed import find_device
from thoughtbubbles.evals.progress import Progress
from thoughtbubbles.evals.settings import MOST
from thoughtbubbles.files import (
    SHIPPED,
    check_folder,
    or_shipped,
    partial_folder,
    publish,
    read_object,
    shipped_model,
    short_name,
    write_atomically,
    write_json,
)
from thoughtbubbles.generate.requests import budget_problem
from thoughtbubbles.model.transformer import Thoughtbubbles
from thoughtbubbles.plotting import check_matplotlib
from thoughtbubbles.provenance import device_name, provenance

INDEX, REPORT = "analysis.json", "report.html"
STORIES = 3
NO_CHOICE = "every token forks (so there are no figures of where it forks, of scores and of budgets)"


def analyze(
    *,
    checkpoint: Path | None = None,
    data: Path | None = None,
    data_dir: Path | None = None,
    text: Path | None = None,
    plain: Path | None = None,
    out: Path | None = None,
    windows: int = 8,
    budgets: Annotated[tuple[str, ...], tyro.conf.arg(metavar="R [R …]")] = (),
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto",
) -> None:
    """Look inside a model: figures of where it forks, what becomes of the forks and what they bring, and a report.

    Every figure is written as PNG and SVG next to a JSON file of its numbers; report.html shows them all in one file.

    Args:
        checkpoint: The model: its folder, a checkpoint of a run, or a run (its newest checkpoint). Default: the one in
            the package.
        data: A folder written by `thoughtbubbles prepare`: most figures are then made from its validation split.
            Without it they use the text, or short passages that come with the package, which is little.
        data_dir: Folder with CLUTRR (clutrr.data_NAME.jsonl, also .gz or .xz), directly or in its eval/, to show where
            the model forks in its stories. Default: the environment variable THOUGHTBUBBLES_DATA.
        text: A text file to show the forks of; default: a passage that comes with the package.
        plain: A model without fork layers and with the same tokenizer, for an independent measure of uncertainty.
        out: The folder to write: a new or empty one, or that of an earlier analysis, which is replaced.
            Default: runs/analyze-NAME.
        windows: Number of windows of the data, spread evenly over it, or the first ones of the text.
        budgets: Budgets of the thinking dial, in addition to 1. Default: 1 1.25 1.5 2 3 4 … up to the model's limit. A
            model that keeps all forks has no dial, nor any other figure of what is chosen.
        device: auto: cuda if there is one, else mps, else cpu.
    """
    check_matplotlib()
    if not 1 <= windows <= MOST:
        raise ValueError(f"--windows {windows}: give a whole number from 1 to {MOST:,}")
    found = find_model(or_shipped(checkpoint))
    target = check_target(default_out(found) if out is None else out)
    on = torch.device(find_device(device))
    with Progress() as progress:
        job = open_job(found, checkpoint=checkpoint, data=data, data_dir=data_dir, text=text, plain=plain,
                       windows=windows, budgets=budgets, device=on, progress=progress)  # fmt: skip
        write_all(job, target, about=about(job, on))
    print(f"written: {target / REPORT}")


def open_job(
    folder: Path, *, checkpoint: Path | None, data: Path | None, data_dir: Path | None, text: Path | None,
    plain: Path | None, windows: int, budgets: tuple[str, ...], device: torch.device, progress: Progress,
) -> Job:  # fmt: skip
    model, tokenizer = open_model(folder, device)
    config = model.config
    if not config.fork_layers:
        raise ValueError(
            f"{short_name(folder)} has no fork layers, so there are no forks to look at: give a model that has them, "
            "and this one with --plain"
        )
    for budget in budgets:
        if wrong := budget_problem(config, budget):
            raise ValueError(f"--budgets: {wrong}")
    own = own_sample(config, tokenizer)
    shown = own if text is None else file_sample(text, config, tokenizer, windows=windows)
    sample = shown
    if data is not None:
        sample = data_sample(data, config, tokenizer, windows=windows, checkpoint=checkpoint)
    return Job(
        folder=folder,
        model=model,
        tokenizer=tokenizer,
        plain=None if plain is None else open_plain(plain, tokenizer, device, block_size=config.block_size),
        shown=shown,
        sample=sample,
        stories=clutrr_stories(data_dir, most=STORIES),
        budgets=chosen_budgets(model, budgets),
        progress=progress,
    )


def open_model(folder: Path, device: torch.device) -> tuple[Thoughtbubbles, Tokenizer]:
    tokenizer = load_tokenizer(folder)
    if tokenizer is None:
        raise ValueError(
            f"{short_name(folder)} has no tokenizer.json, which is needed to encode the text: save the model with "
            "save_model(…, tokenizer=…)"
        )
    return load(folder, device=device, dtype=torch.float32), tokenizer


def open_plain(plain: Path, tokenizer: Tokenizer, device: torch.device, *, block_size: int) -> Thoughtbubbles:
    model, other = open_model(find_model(plain), device)
    if model.config.fork_layers:
        raise ValueError(f"--plain {short_name(plain)} has fork layers: give a model without them")
    if other.name != tokenizer.name:
        raise ValueError(
            f"--plain {short_name(plain)}: its tokenizer is {other.name!r}, that of the model {tokenizer.name!r}: give "
            "a model with the same tokenizer"
        )
    if model.config.block_size < block_size:
        raise ValueError(
            f"--plain {short_name(plain)}: its context length is {model.config.block_size}, that of the model "
            f"{block_size}: give a model that reads as much"
        )
    return model


def chosen_budgets(model: Thoughtbubbles, budgets: tuple[str, ...]) -> list[str]:
    """In order, each once, with 1 and the model's own among them."""
    if not budgets:
        return dial.default_budgets(model.config)
    exact = {Fraction(each): each for each in (*budgets, str(model.config.budget))}
    if model.config.scores:
        exact[Fraction(1)] = "1"
    return [exact[key] for key in sorted(exact)]


def default_out(folder: Path) -> Path:
    """runs/analyze-NAME: of the package's model, of a run and its step, or of a model folder."""
    real = folder.resolve()
    if real == shipped_model().resolve():
        return Path("runs") / f"analyze-{SHIPPED}"
    step = real.parent
    is_step = real.name == "model" and NUMBERED.fullmatch(step.name) is not None
    return Path("runs") / f"analyze-{f'{step.parent.name}-{step.name}' if is_step else real.name}"


def check_target(out: Path) -> Path:
    """New, empty, or written by an earlier analysis with nothing added."""
    target = check_folder(out, option="--out")
    if not target.exists() or not any(target.iterdir()):
        return target
    listed = read_object(target / INDEX).get("files") if (target / INDEX).is_file() else None
    known = {INDEX, *listed} if isinstance(listed, list) else {INDEX}
    foreign = sorted(path.name for path in target.iterdir() if path.name not in known)
    if foreign:
        raise ValueError(
            f"--out {short_name(out)} has files that are not of an analysis, such as {short_name(foreign[0])}: give a "
            "new folder"
        )
    return target


def write_all(job: Job, target: Path, *, about: dict[str, Any]) -> None:
    """Into a partial folder, which is renamed when it is complete."""
    partial = partial_folder(target)
    figures, svgs = [], {}
    for figure in all_figures(job):
        figures.append(figure)
        svgs[figure.name] = write(figure, partial)
    name = job.folder.name if job.folder.name != "model" else default_out(job.folder).name.removeprefix("analyze-")
    page = report(figures, svgs, title=f"Inside {name}", about=about["table"])
    write_atomically(partial / REPORT, [page.encode()])
    files = sorted(path.name for path in partial.iterdir())
    index = {"files": files, "figures": {figure.name: figure.sentence for figure in figures}, **about["index"]}
    write_json(partial / INDEX, index)
    publish(partial, target)


def about(job: Job, device: torch.device) -> dict[str, Any]:
    config, made = job.model.config, provenance()
    parameters = sum(weight.numel() for weight in job.model.parameters())
    own = " (little text: give --data for firmer numbers)" if job.sample.is_own else ""
    rule = f"budget {config.budget}, {config.selection} selection" if config.scores else NO_CHOICE
    table = {
        "model": f"{job.folder.name}, {parameters / 1e6:.1f}M parameters: {config.n_layer} blocks of width "
        f"{config.width}, fork layers {', '.join(map(str, config.fork_layers))}, {rule}, {config.merge} merge"
        + ("" if config.fork_reach is None else f", forks reach {config.fork_reach} tokens")
        + ", feedback" * config.feedback,
        "text": f"{job.sample.name}, {job.sample.n_tokens:,} tokens{own}",
        "command": shlex.join(["thoughtbubbles", *sys.argv[1:]]),
        "commit": made["commit"] or "not known",
        "versions": ", ".join(f"{name} {version}" for name, version in made["versions"].items()),
        "device": device_name(device),
        "time": made["time"],
    }
    return {"table": table, "index": {"about": table, **made}}
