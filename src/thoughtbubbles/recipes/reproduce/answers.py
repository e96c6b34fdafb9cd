"""The questions of docs/results, each with its answer: a paragraph generated from the records."""

import math
from collections.abc import Callable, Mapping, Sequence

from thoughtbubbles.files import read_object
from thoughtbubbles.recipes.reproduce.compare_rows import (
    Difference,
    autoregressive_gap,
    common_seeds,
    curve_differences,
    curve_of,
    difference,
    of_seeds,
    plus_minus,
    signed,
)
from thoughtbubbles.recipes.reproduce.parts import PLAIN
from thoughtbubbles.recipes.reproduce.records import Evidence, Results, Value, flops, gpu_seconds, nats, tokens
from thoughtbubbles.recipes.reproduce.sentences import PRESET, compared, lead, needs, sentence
from thoughtbubbles.recipes.reproduce.tables import PAPER

ABOUT = 1.25  # costs within this factor of each other are about equal
NOT_SLOWER = 1.05
QUARTERS = (0.25, 0.5, 0.75, 1.0)  # of the training
BATCHES = ("1", "32")  # sizes at which decoding is measured
GATED, LONGER_GATED = "head-gate", "longer-gate"
NO_WINDOW = "feedback-3-gate"
GATE = "a sigmoid per head (Qiu et al., arXiv 2505.06708)"


def answers(evidence: Evidence) -> str:
    return "\n\n".join(f"### {question}\n\n{answer(evidence)}" for question, answer in QUESTIONS.items())


def equal_tokens(evidence: Evidence) -> str:
    gain, source = paper_gain()
    parts = [f"In `{name}`: {compared(evidence.results[name], 'r2', PLAIN)}" for name in ("long", "short", "scarce")]
    gap, ours = difference(evidence.results["long"], "r2", PLAIN), ""
    if gap is not None and gap.is_measurable and gap.mean < 0:
        ours = f" The gain in `long` is {-gap.mean / gain:.0%} of that, per token of a smaller vocabulary."
    low, high = paper_range()
    paper = (
        f"The paper's gain at r = 2 is {gain:.3f} nats per token ({source}), and from {low:.3f} to {high:.3f} over the "
        f"six settings of that table; it is scored blockwise, with block selection.{ours}"
    )
    preset = difference(evidence.results["long"], PRESET, PLAIN)
    more = [] if preset is None else [f"{lead(preset)}In `long`, {sentence(preset, PRESET, PLAIN)}."]
    return "\n\n".join([lead(gap) + " ".join([*parts, paper]), *more])


def paper_gain() -> tuple[float, str]:
    """Nats that r = 2 gains in the paper's smallest setting, and where they come from."""
    part = read_object(PAPER)["zero_shot"][0]
    plain, forked = (float(part["rows"][row]["perplexity"]) for row in (PLAIN, "block, r = 2"))
    source = f"the paper, table {part['table']}: {part['model']}, perplexity {plain:.2f} against {forked:.2f}"
    return math.log(plain / forked), source


def paper_range() -> tuple[float, float]:
    """The smallest and the largest gain of r = 2 in the paper's table of sizes and corpora."""
    gains = [math.log(plain / forked) for plain, forked in read_object(PAPER)["perplexities"]["plain, r = 2"].values()]
    return min(gains), max(gains)


def without_forks(results: Results, *, gated: bool = False) -> list[str]:
    """Plain GPTs of another size or length: what a model with forks competes with at equal cost.

    gated  with a gate per head too, for forks that have it
    """
    special = {"fork_layers", "copies", "block", *(() if gated else ("head_gate",))}
    return [row for row, known in results.protocol.rows.items() if row != PLAIN and not special & set(known.model)]


def equal_cost(evidence: Evidence, value: Value, what: str) -> str:
    """r2, and the form of the presets, against larger, longer or ensembled plain models: losses and ratios of costs."""
    paragraphs = [cost_paragraph(evidence, "r2", ("long", "scarce"), value, what)]
    if difference(evidence.results["long"], PRESET, PLAIN) is not None:
        paragraphs.append(cost_paragraph(evidence, PRESET, ("long",), value, what))
    return "\n\n".join(paragraphs)


def cost_paragraph(evidence: Evidence, row: str, names: Sequence[str], value: Value, what: str) -> str:
    parts, first = [], ""
    for name in names:
        results = evidence.results[name]
        known = without_forks(results, gated=row == PRESET)
        rivals = [rival for rival in known if difference(results, row, rival)]
        if PLAIN not in results or not rivals:
            parts.append(f"In `{name}`: {needs(results, (PLAIN, row, *known))}")
        elif value is gpu_seconds and not results.same_device:
            devices = ", ".join(results.devices)
            parts.append(f"In `{name}`, rows ran on different devices ({devices}): their times cannot be compared.")
        else:
            parts.append(f"In `{name}`, `{row}` takes {results.ratio(row, value):.2f} × the {what} of `plain`.")
            parts += [rival_sentence(results, row, rival, value, what) for rival in rivals]
            first = cost_lead(results, row, rivals, value) if name == "long" else first
    return first + " ".join(parts)


def rival_sentence(results: Results, row: str, rival: str, value: Value, what: str) -> str:
    gap = difference(results, row, rival)
    assert gap is not None
    share = results.ratio(rival, value, over=row)
    return f"`{rival}` takes {share:.2f} × the {what} of `{row}`: {sentence(gap, row, rival)}."


def cost_lead(results: Results, row: str, rivals: Sequence[str], value: Value) -> str:
    """Against the best plain model of about the same cost."""
    near = [rival for rival in rivals if 1 / ABOUT <= results.ratio(rival, value, over=row) <= ABOUT]
    gap = hardest(results, row, near)
    return "No plain model of about equal cost was run. " if gap is None else lead(gap[1])


def hardest(results: Results, row: str, rivals: Sequence[str]) -> tuple[str, Difference] | None:
    """The rival with the lowest loss, and the difference of the row to it."""
    gaps = [(rival, gap) for rival in rivals if (gap := difference(results, row, rival)) is not None]
    return max(gaps, key=lambda each: each[1].mean) if gaps else None


def equal_latency(evidence: Evidence) -> str:
    results, decode = evidence.results["long"], evidence.decode
    if decode is None:
        return "Not measured yet: needs the decoding times of the rows of `long`."
    if difference(results, "r2", PLAIN) is None:
        return needs(results, (PLAIN, "r2"))
    times = {
        batch: {row: at[batch]["milliseconds"] for row, at in decode["rows"].items() if batch in at}
        for batch in BATCHES
    }
    found = [latency_paragraph(results, row, times) for row in ("r2", PRESET) if difference(results, row, PLAIN)]
    return "\n\n".join([*found, f"Device: {decode['device']}."])


def latency_paragraph(results: Results, row: str, times: Mapping[str, Mapping[str, float]]) -> str:
    """By batch size and row: milliseconds of a decoded token."""
    parts, leads = [], []
    for batch, of_row in times.items():
        rivals = [rival for rival in (PLAIN, *without_forks(results, gated=row == PRESET)) if rival in of_row]
        if row not in of_row or not rivals:
            continue
        shown = ", ".join(f"`{each}` {of_row[each]:.3f} ms" for each in (row, *rivals))
        parts.append(f"Decoding at batch size {batch}, per token: {shown}.")
        best = hardest(results, row, [rival for rival in rivals if of_row[rival] <= NOT_SLOWER * of_row[row]])
        if best is not None:
            parts.append(f"Against the best plain model that takes no longer, {sentence(best[1], row, best[0])}.")
            leads.append(f"Batch size {batch}: {lead(best[1])}")
    if not parts:
        return f"Not measured yet: needs the decoding times of `{row}`."
    return "".join(leads) + " ".join(parts)


def which_part(evidence: Evidence) -> str:
    results = evidence.results["long"]
    both, gate = difference(results, "r2", PLAIN), difference(results, "r1", PLAIN)
    share = ""
    if both and gate and both.is_measurable and both.mean < 0 and len(both.seeds) > 1 and both.seeds == gate.seeds:
        losses = {row: [nats(results.rows[row][seed]) for seed in both.seeds] for row in (PLAIN, "r1", "r2")}
        each = [(r1 - plain) / (r2 - plain) for plain, r1, r2 in zip(*losses.values(), strict=True)]
        share = f" That is {gate.mean / both.mean:.0%} of the gain of `r2`, by seed {min(each):.0%} to {max(each):.0%}."
    pairs = {
        "Attenuation alone": ("r1", PLAIN),
        "Forks in addition to it": ("r2", "r1"),
        "Forks without choosing and without scores": ("all-forked", PLAIN),
        "Choosing and scores, with as many streams": ("r2", "all-forked"),
        f"A plain model's own gate, {GATE}": ("head-gate", PLAIN),
        "The attenuation against that gate": ("r1", "head-gate"),
        "Forks against that gate": ("r2", "head-gate"),
        "Forks in the last quarter of the training only": ("r2-late", "r1"),
        "The same, 4 streams per token": ("r4-late", "r1"),
    }
    lines = [f"- {what}: {compared(results, *pair)}{share * (pair == ('r1', PLAIN))}" for what, pair in pairs.items()]
    return "\n".join(lines)


def better_forks(evidence: Evidence) -> str:
    """Forks that come after originals, against plain models with the same gate."""
    results, screen = evidence.results["long"], evidence.results["screen"]
    best = difference(results, PRESET, GATED)
    pairs = {
        "Against the gate alone": (PRESET, GATED),
        "Against the paper's forks with causal selection": (PRESET, "r2"),
        "Without seeing other forks, against the gate alone": (NO_WINDOW, GATED),
        "Against the gate alone with more tokens": (PRESET, LONGER_GATED),
    }
    lines = [f"- {what}: {compared(results, *pair)}" for what, pair in pairs.items()]
    if difference(results, PRESET, LONGER_GATED) and results.same_device:
        time, text = (results.ratio(LONGER_GATED, value, over=PRESET) for value in (gpu_seconds, tokens))
        lines[-1] += f" `{LONGER_GATED}` takes {time:.2f} × its GPU time, and reads {text:.2f} × as many tokens."
    lines += [
        f"- In `screen`, with a third of the tokens: {compared(screen, row, GATED)}" for row in (PRESET, NO_WINDOW)
    ]
    about = (
        f"`{PRESET}` has a gate per head. Its forks begin after all originals, from the last state of the previous "
        "token too; originals see none of them, and forks those of the 64 tokens before."
    )
    return "\n\n".join([lead(best) + about, "\n".join(lines)])


def causal_or_block(evidence: Evidence) -> str:
    both = {name: evidence.results[name] for name in ("long", "short")}
    parts = [f"In `{name}`, scored blockwise: {compared(results, 'r2', 'block')}" for name, results in both.items()]
    parts += [leak(name, autoregressive_gap(results, "block")) for name, results in both.items()]
    paper = read_object(PAPER)["autoregression"]
    blockwise, stepwise = (float(paper["perplexity"][way]) for way in ("blockwise", "autoregressive"))
    parts.append(
        f"The paper's own difference is {signed(math.log(stepwise / blockwise))} nats per token (figure "
        f"{paper['figure']}: perplexity {blockwise:.2f} blockwise, {stepwise:.2f} token by token; {paper['model']})."
    )
    others = [
        abs(gap.mean)
        for results in both.values()
        for row in results.rows
        if row != "block" and (gap := autoregressive_gap(results, row)) is not None
    ]
    if others:
        parts.append(f"Rows without block selection differ by {max(others):.0e} nats per token at most.")
    return " ".join(parts)


def leak(name: str, gap: Difference | None) -> str:
    if gap is None:
        return f"The leak in `{name}`: not measured yet, needs row `block`."
    seeds = f"{len(gap.seeds)} seeds" if len(gap.seeds) > 1 else "one seed, ± over windows"
    shown = f"({signed(gap.mean)}{plus_minus(gap.error)} nats per token, {seeds})"
    if gap.is_measurable and gap.mean > 0:
        return (
            f"In `{name}` the blockwise number of `block` is too low: scored token by token, the same weights have a "
            f"higher loss {shown}. That is the leak, and streams that a prefix chooses otherwise, together."
        )
    return f"In `{name}`, `block` has no leak that we can measure: token by token against blockwise {shown}."


def growth(evidence: Evidence) -> str:
    results, parts = evidence.results["long"], []
    if PLAIN not in results:
        return needs(results, (PLAIN, "r1", "r2"))
    for row in ("r2", "r1"):
        points = curve_differences(results, row, PLAIN)
        if not points:
            parts.append(needs(results, (PLAIN, row)))
            continue
        at = [closest(points, share) for share in QUARTERS]
        shown = ", ".join(
            f"{signed(gap.mean)}{plus_minus(gap.error)} at {share:.0%}"
            for share, (_, gap) in zip(QUARTERS, at, strict=True)
        )
        n = len(at[-1][1].seeds)
        text = f"on {results.records[0]['config']['eval']['tokens']:,} validation tokens"
        parts.append(f"`{row}` − `plain`, by share of the training: {shown} ({n} seed{'s' * (n > 1)}, {text}).")
        parts.append(trend(results, row, at[1][0], at[-1][0]))
    return " ".join(parts)


def closest(points: Sequence[tuple[int, Difference]], share: float) -> tuple[int, Difference]:
    return min(points, key=lambda point: abs(point[0] - share * points[-1][0]))


def trend(results: Results, row: str, middle: int, end: int) -> str:
    """Whether the difference at the end is not that of the middle of the training, seed by seed."""
    changes, seeds = [], common_seeds(results, row, PLAIN)
    for seed in seeds:
        one, two = (curve_of(results.rows[name][seed]) for name in (row, PLAIN))
        changes.append(one[end] - two[end] - (one[middle] - two[middle]))
    change = of_seeds(changes, seeds)
    if change.error is None:
        return "With one seed we cannot say whether that is a trend."
    shown = f"({signed(change.mean)}{plus_minus(change.error)} nats per token)"
    if not change.is_measurable:
        return f"From half of the training to its end there is no change that we can measure {shown}."
    direction = "moves in favour of" if change.mean < 0 else "moves against"
    return f"From half of the training to its end the difference {direction} `{row}` {shown}."


QUESTIONS: dict[str, Callable[[Evidence], str]] = {
    "Does it help at equal tokens?": equal_tokens,
    "Does it help at equal FLOPs?": lambda evidence: equal_cost(evidence, flops, "training FLOPs"),
    "Does it help at equal GPU time?": lambda evidence: equal_cost(evidence, gpu_seconds, "GPU time of training"),
    "Does it help at equal decoding latency?": equal_latency,
    "Is it the forks, the choosing or the attenuation?": which_part,
    "Do forks pay if they come after originals?": better_forks,
    "Is causal selection as good as the paper's, and does the paper's blockwise number leak?": causal_or_block,
    "Does the gain grow or shrink with training?": growth,
}
