"""Differences between two rows, paired by seed, with their standard errors.

Within a seed all rows read the same text in the same order and start from the same weights where these match, so the
difference of two rows varies less than either. It still varies with the seed and with the text that it is measured on:

    error² = (deviation between seeds)² / seeds + (error over the text)²

The deviation is that of all rows with several seeds together, since two or three differences agree, or do not, by luck;
it takes for granted that all differences vary alike. The error over the text is that of stretches of it, since
neighbouring windows are alike; a seed changes some windows more than others, so part of it is counted twice, and errors
are a little too large. A difference counts as measured if its interval of 95 % confidence leaves out 0, by Student's t
with the degrees of freedom of the deviation. Where no row has a second seed, only the text counts, which is too little.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from thoughtbubbles.recipes.reproduce.parts import PLAIN
from thoughtbubbles.recipes.reproduce.records import Results, nats
from thoughtbubbles.recipes.reproduce.study import Record
from thoughtbubbles.written import plus_minus, signed

FEW = {1: 12.71, 2: 4.30, 3: 3.18, 4: 2.78}  # 97.5 % quantiles of Student's t, by degrees of freedom
STRETCHES = 64  # at most so many of the validation text
ONE_SEED = " \\*"  # as Markdown
Number = Callable[[Record], float | None]
Deviation = tuple[float, int]  # between seeds, of the difference of two rows, and its degrees of freedom


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Nats per token, the first row minus the second: below 0, the first row is better."""

    mean: float
    error: float | None
    """Standard error; None where it cannot be computed."""
    seeds: tuple[int, ...]
    degrees: int
    """Of freedom of the error."""

    @property
    def is_measurable(self) -> bool:
        """Whether its interval of 95 % confidence leaves out 0."""
        return self.error is not None and self.mean != 0 and abs(self.mean) >= self.quantile * self.error

    @property
    def quantile(self) -> float:
        """Half the width of that interval, in standard errors."""
        return t_quantile(self.degrees)

    @property
    def seeds_in_words(self) -> str:
        return f"{len(self.seeds)} seeds" if len(self.seeds) > 1 else "one seed"

    @property
    def size(self) -> str:
        """Without the sign: for a sentence that names the better row."""
        return f"{abs(self.mean):.4f}{plus_minus(self.error)}"

    @property
    def cell(self) -> str:
        """For a table, whose page explains the mark."""
        marked = ONE_SEED if len(self.seeds) == 1 else ""
        return f"{signed(self.mean)}{plus_minus(self.error)}{marked}"


def t_quantile(degrees: int) -> float:
    """97.5 %, of Student's t; from five degrees of freedom on by its series around that of the normal distribution."""
    if degrees in FEW:
        return FEW[degrees]
    z = statistics.NormalDist().inv_cdf(0.975)
    first, second = (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / degrees + second / degrees**2 + third / degrees**3


def difference(results: Results, row: str, other: str) -> Difference | None:
    """Of the validation loss; None without a common seed."""
    seeds = common_seeds(results, row, other)
    if not seeds:
        return None
    each = [level(results, row, other, seed) - level(results, other, row, seed) for seed in seeds]
    pairs = [(results.rows[row][seed], results.rows[other][seed]) for seed in seeds]
    return with_error(each, seeds, between_seeds(results), error_over_windows(pairs))


def with_error(
    each: Sequence[float],
    seeds: Sequence[int],
    deviation: Deviation | None,
    over_text: tuple[float | None, int] = (None, 1),
) -> Difference:
    """From one difference per seed. `over_text`: the error, and how many stretches it is from."""
    error, n = over_text
    degrees, parts = max(1, n - 1), [] if error is None else [error]
    if deviation is not None:
        degrees = deviation[1]
        parts.append(deviation[0] / math.sqrt(len(seeds)))
    return Difference(
        mean=statistics.fmean(each), error=math.hypot(*parts) if parts else None, seeds=tuple(seeds), degrees=degrees
    )


def between_seeds(results: Results) -> Deviation | None:
    """Of the final loss, in a protocol and the one with the same model together."""
    found = [each for each in map(variation_between_seeds, with_like(results)) if each is not None]
    degrees = sum(n for _, n in found)
    return (math.sqrt(sum(n * deviation**2 for deviation, n in found) / degrees), degrees) if found else None


def with_like(results: Results) -> list[Results]:
    return [results] if results.like is None else [results, results.like]


def variation_between_seeds(results: Results, number: Number = nats) -> Deviation | None:
    """The standard deviation between seeds of the difference of two rows, and its degrees of freedom.

    From what is left of the losses when each row and each seed may have a level of its own: x_rs = a_r + b_s + e_rs by
    least squares, and sqrt(2 · Σ e² / degrees). (A two-way analysis of variance; not all rows need all seeds, and those
    with one seed tell nothing.) None if nothing is left to tell it from.
    """
    rows = {row: seeds for row, seeds in results.rows.items() if has_runs_of_its_own(results, row)}
    every = [(row, seed, number(record)) for row, seeds in rows.items() for seed, record in seeds.items()]
    found = [(row, seed, value) for row, seed, value in every if value is not None]
    levels = {level: i for i, level in enumerate(dict.fromkeys(each for row, seed, _ in found for each in (row, seed)))}
    design = np.zeros((len(found), len(levels)))
    for i, (row, seed, _) in enumerate(found):
        design[i, [levels[row], levels[seed]]] = 1
    losses = np.array([value for *_, value in found])
    degrees = len(found) - int(np.linalg.matrix_rank(design)) if found else 0
    if degrees < 1:
        return None
    left = losses - design @ np.linalg.lstsq(design, losses, rcond=None)[0]
    return math.sqrt(2 * float(left @ left) / degrees), degrees


def has_runs_of_its_own(results: Results, row: str) -> bool:
    """Not an ensemble of other runs, nor the same as another one until its forks begin."""
    planned = results.protocol.rows.get(row)
    return planned is None or (planned.ensemble == 1 and "forks_from" not in planned.run)


def level(results: Results, row: str, other: str, seed: int) -> float:
    """The loss of a row; of `plain` against an ensemble, the mean of all members, so that no lucky member counts."""
    planned = results.protocol.rows.get(other)
    members = range(seed, seed + (planned.ensemble if planned and row == PLAIN else 1))
    return statistics.fmean(nats(results.rows[row][each]) for each in members if each in results.rows[row])


def common_seeds(results: Results, row: str, other: str) -> tuple[int, ...]:
    return tuple(sorted(set(results.rows.get(row, ())) & set(results.rows.get(other, ()))))


def of_seeds(each: Sequence[float], seeds: Sequence[int]) -> Difference:
    """From one difference per seed and nothing else: for numbers that vary more in some rows than in others."""
    error = statistics.stdev(each) / math.sqrt(len(each)) if len(each) > 1 else None
    return Difference(mean=statistics.fmean(each), error=error, seeds=tuple(seeds), degrees=max(1, len(each) - 1))


def window_sizes(record: Record) -> list[int]:
    """Tokens of each window: the context length, but for the last one, which has the rest."""
    validation, block = record["validation"], record["config"]["model"]["block_size"]
    n = len(validation["windows"])
    last = validation["tokens"] - (n - 1) * block
    if not 0 < last <= block:
        raise ValueError(
            f"{record['protocol']}/{record['row']}-seed{record['seed']}: {n} windows of {block} tokens "
            f"do not make {validation['tokens']} tokens; the record is damaged, use another copy"
        )
    return [block] * (n - 1) + [last]


def error_over_windows(pairs: Sequence[tuple[Record, Record]]) -> tuple[float | None, int]:
    """Of the mean difference of some pairs, and the number of stretches S.

    With n_i tokens in window i, the mean d_i of the differences there, and m that of all windows:
    sqrt(S / (S − 1) · Σ_s (Σ_{i in s} n_i (d_i − m))²) / Σ_i n_i, over S stretches s of neighbouring windows, which are
    often of the same document. None for a single window.
    """
    sizes, *others = (window_sizes(record) for pair in pairs for record in pair)
    if any(other != sizes for other in others) or len(sizes) < 2:
        return None, 1
    means = ([record["validation"]["windows"] for record in pair] for pair in pairs)
    each_pair = ([a - b for a, b in zip(one, two, strict=True)] for one, two in means)
    gaps = [statistics.fmean(gap) for gap in zip(*each_pair, strict=True)]
    total = sum(sizes)
    mean = sum(n * gap for n, gap in zip(sizes, gaps, strict=True)) / total
    each = math.ceil(len(sizes) / STRETCHES)
    weighted = [n * (gap - mean) for n, gap in zip(sizes, gaps, strict=True)]
    stretches = [sum(weighted[i : i + each]) for i in range(0, len(weighted), each)]
    squares = sum(stretch**2 for stretch in stretches)
    return math.sqrt(len(stretches) / (len(stretches) - 1) * squares) / total, len(stretches)


def autoregressive_gap(results: Results, row: str, name: str = "autoregressive - blockwise") -> Difference | None:
    """Between two ways to score a row; None where it was not measured."""
    found = {
        seed: (record["autoregressive"]["differences"][name], record["autoregressive"]["windows"])
        for seed, record in results.rows.get(row, {}).items()
        if name in (record.get("autoregressive") or {}).get("differences", {})
    }
    if not found:
        return None
    if len(found) > 1:
        return of_seeds([gap["mean"] for gap, _ in found.values()], tuple(found))
    ((gap, n),) = found.values()
    return Difference(mean=gap["mean"], error=gap["standard_error"], seeds=tuple(found), degrees=max(1, n - 1))


def curve_of(record: Record) -> dict[int, float]:
    """Validation loss during training, by training tokens, without an evaluation just before that at the end.

    If forks begin late, it begins with them: until then the model is its control without forks.
    """
    per_step, (*points, last) = record["config"]["tokens_per_step"], record["curve"]
    between = points[0][0] if points else 0
    begin = round(record["config"].get("forks_from", 0) * record["steps"])
    kept = [*(point for point in points if last[0] - point[0] > between / 2 and point[0] > begin), last]
    return {step * per_step: loss for step, loss in kept}


def curve_differences(results: Results, row: str, other: str) -> list[tuple[int, Difference]]:
    """(training tokens, difference) for every evaluation that both rows have, in all common seeds."""
    seeds = common_seeds(results, row, other)
    shared = [set(curve_of(results.rows[name][seed])) for name in (row, other) for seed in seeds]
    tokens = sorted(set.intersection(*shared)) if shared else []
    return [(n, gap_of(results, row, other, partial(loss_at, n=n))) for n in tokens]


def loss_at(record: Record, n: int) -> float | None:
    """After n training tokens."""
    return curve_of(record).get(n)


def gap_of(results: Results, row: str, other: str, number: Number) -> Difference:
    """Of a number that all records of both rows have. Its error is the variation between seeds alone."""
    seeds = common_seeds(results, row, other)
    pairs = [[number(results.rows[name][seed]) for name in (row, other)] for seed in seeds]
    each = [one - two for one, two in pairs if one is not None and two is not None]
    assert len(each) == len(seeds), "the caller has looked"
    return with_error(each, seeds, variation_between_seeds(results, number))
