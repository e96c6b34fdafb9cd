"""Differences between two rows, paired by seed, with their standard errors.

Within a seed all rows read the same text in the same order and start from the same weights where these match, so the
difference of two rows varies less than either. With two or more common seeds its standard error is that of the mean
over seeds, and a difference counts as measured if its interval of 95 % confidence (Student's t) leaves out 0. With one
seed it is taken over stretches of the validation text, since neighbouring windows are alike, and the variation between
seeds is that of the rows with several seeds. Without such rows it is left out and the error too small. Either way it is
marked.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from thoughtbubbles.recipes.reproduce.parts import PLAIN
from thoughtbubbles.recipes.reproduce.records import Results, nats
from thoughtbubbles.recipes.reproduce.study import Record
from thoughtbubbles.written import plus_minus, signed

FEW = {1: 12.71, 2: 4.30, 3: 3.18, 4: 2.78}  # 97.5 % quantiles of Student's t, by degrees of freedom
STRETCHES = 64  # at most so many of the validation text
ONE_SEED = " \\*"  # as Markdown


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Nats per token, the first row minus the second: below 0, the first row is better."""

    mean: float
    error: float | None
    """Standard error; None where it cannot be computed."""
    seeds: tuple[int, ...]
    over: Literal["seeds", "windows"]
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
        marked = ONE_SEED if self.over == "windows" else ""
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
    pairs = [(results.rows[row][seed], results.rows[other][seed]) for seed in seeds]
    each = [level(results, row, other, seed) - level(results, other, row, seed) for seed in seeds]
    if len(each) > 1:
        return of_seeds(each, seeds)
    error, n = error_over_windows(*pairs[0])
    between = variation_between_seeds(results)
    if between is None and results.like is not None:
        between = variation_between_seeds(results.like)
    if error is None or between is None:
        return Difference(mean=each[0], error=error, seeds=seeds, over="windows", degrees=max(1, n - 1))
    deviation, degrees = between
    return Difference(mean=each[0], error=math.hypot(error, deviation), seeds=seeds, over="windows", degrees=degrees)


def variation_between_seeds(results: Results) -> tuple[float, int] | None:
    """The standard deviation between seeds of the difference of two rows, and its degrees of freedom.

    From what is left of the losses when each row and each seed may have a level of its own: x_rs = a_r + b_s + e_rs by
    least squares, and sqrt(2 · Σ e² / degrees). (A two-way analysis of variance; not all rows need all seeds, and those
    with one seed tell nothing.) None if nothing is left to tell it from.
    """
    found = [(row, seed, nats(record)) for row, seeds in results.rows.items() for seed, record in seeds.items()]
    levels = {level: i for i, level in enumerate(dict.fromkeys(each for row, seed, _ in found for each in (row, seed)))}
    design = np.zeros((len(found), len(levels)))
    for i, (row, seed, _) in enumerate(found):
        design[i, [levels[row], levels[seed]]] = 1
    losses = np.array([loss for *_, loss in found])
    degrees = len(found) - int(np.linalg.matrix_rank(design)) if found else 0
    if degrees < 1:
        return None
    left = losses - design @ np.linalg.lstsq(design, losses, rcond=None)[0]
    return math.sqrt(2 * float(left @ left) / degrees), degrees


def level(results: Results, row: str, other: str, seed: int) -> float:
    """The loss of a row; of `plain` against an ensemble, the mean of all members, so that no lucky member counts."""
    planned = results.protocol.rows.get(other)
    members = range(seed, seed + (planned.ensemble if planned and row == PLAIN else 1))
    return statistics.fmean(nats(results.rows[row][each]) for each in members if each in results.rows[row])


def common_seeds(results: Results, row: str, other: str) -> tuple[int, ...]:
    return tuple(sorted(set(results.rows.get(row, ())) & set(results.rows.get(other, ()))))


def of_seeds(each: Sequence[float], seeds: Sequence[int]) -> Difference:
    """From one difference per seed."""
    error = statistics.stdev(each) / math.sqrt(len(each)) if len(each) > 1 else None
    return Difference(
        mean=statistics.fmean(each), error=error, seeds=tuple(seeds), over="seeds", degrees=max(1, len(each) - 1)
    )


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


def error_over_windows(one: Record, two: Record) -> tuple[float | None, int]:
    """And the number of stretches S. With n_i tokens in window i, the difference d_i of its means, and m that of all:

    sqrt(S / (S − 1) · Σ_s (Σ_{i in s} n_i (d_i − m))²) / Σ_i n_i, over S stretches s of neighbouring windows, which are
    often of the same document. None for a single window.
    """
    sizes = window_sizes(one)
    if sizes != window_sizes(two) or len(sizes) < 2:
        return None, 1
    gaps = [a - b for a, b in zip(one["validation"]["windows"], two["validation"]["windows"], strict=True)]
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
    return Difference(
        mean=gap["mean"], error=gap["standard_error"], seeds=tuple(found), over="windows", degrees=max(1, n - 1)
    )


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
    curves = [[curve_of(results.rows[name][seed]) for name in (row, other)] for seed in seeds]
    if not curves:
        return []
    tokens = set.intersection(*(set(curve) for pair in curves for curve in pair))
    return [(n, of_seeds([one[n] - two[n] for one, two in curves], seeds)) for n in sorted(tokens)]
