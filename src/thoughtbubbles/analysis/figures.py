"""All figures in the order of the report: what each is made from, its title, and how to read it."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from pathlib import Path
from typing import Any

from thoughtbubbles.analysis import attention, dial, drawings, fates, future, kinds, leaks, places, uncertainty, writes
from thoughtbubbles.analysis.audit import Audit, audit
from thoughtbubbles.analysis.draw import Figure
from thoughtbubbles.analysis.html import token_text
from thoughtbubbles.analysis.sample import Sample
from thoughtbubbles.analysis.trace import Trace, trace
from thoughtbubbles.data.tokenizer import Tokenizer
from thoughtbubbles.evals.autoregressive import Scores, blockwise
from thoughtbubbles.evals.perplexity import perplexity
from thoughtbubbles.evals.progress import Progress
from thoughtbubbles.generate.requests import exact_method
from thoughtbubbles.model.transformer import Thoughtbubbles
from thoughtbubbles.provenance import device_name

ATTENTION = (4, 256)  # windows and tokens of the attention figure: its cost grows with the square
UNCACHED = (8, 128)  # windows and tokens where every prefix needs a forward
CACHED = (8, None)


@dataclass(frozen=True, kw_only=True)
class Job:
    """Everything the figures are made from."""

    folder: Path
    model: Thoughtbubbles
    tokenizer: Tokenizer
    plain: Thoughtbubbles | None
    shown: Sample
    """Figures along a text show its first window."""
    sample: Sample
    """All other figures."""
    stories: list[str]
    budgets: list[str]
    progress: Progress

    @property
    def own_budget(self) -> str:
        own = Fraction(str(self.model.config.budget))
        return next(each for each in self.budgets if Fraction(each) == own)

    def trace(self, ids: list[int], **options: Any) -> Trace:
        return trace(self.model, ids, tokenizer=self.tokenizer, top=0, **options)

    @cached_property
    def traces(self) -> list[Trace]:
        return list(self.each("reading the text", self.sample.rows, self.trace))

    @cached_property
    def scores(self) -> dict[str, Scores]:
        """In one parallel forward, by budget."""

        def score(budget: str) -> tuple[str, Scores]:
            return budget, blockwise(self.model, self.sample.windows, budget=budget)

        return dict(self.each("losses at all budgets", self.budgets, score))

    def each(self, title: str, items: list[Any], work: Callable[[Any], Any]) -> Iterator[Any]:
        """The results, with progress."""
        share = self.progress.begin(title)
        for done, item in enumerate(items, start=1):
            yield work(item)
            share(done / len(items))


def all_figures(job: Job) -> Iterator[Figure]:
    if not job.model.config.chooses_forks:  # every token forks: there is no choice to look at, and no smaller budget
        yield attention_figure(job)
        yield future_figure(job)
        if has_later_tokens(job):
            yield leak_figure(job)
        return
    yield along_text(job)
    yield from along_stories(job)
    yield kind_figure(job)
    yield uncertainty_figure(job)
    yield attention_figure(job)
    yield from fate_figures(job)
    yield dial_figure(job)
    yield gain_figure(job)
    yield future_figure(job)
    if has_later_tokens(job):
        yield leak_figure(job)


def has_later_tokens(job: Job) -> bool:
    return int(job.sample.windows.lengths.max()) > 1


def _map(found: Trace, *, name: str, title: str, note: str) -> Figure:
    numbers = places.numbers(found)
    if len(numbers["tokens"]) > drawings.MOST:
        note += f" The drawing has the first {drawings.MOST} of {len(numbers['tokens'])} tokens."
    return Figure(
        name=name,
        title=title,
        numbers=numbers,
        sentence=places.sentence(numbers),
        draw=drawings.places,
        note=note,
        html=token_text(numbers),
    )


def along_text(job: Job) -> Figure:
    note = f"Text: {job.shown.name if not job.shown.is_own else 'a passage that comes with the package'}."
    return _map(job.trace(job.shown.rows[0]), name="where-it-forks", title="Where it forks", note=note)


def along_stories(job: Job) -> Iterator[Figure]:
    for number, story in enumerate(job.stories, start=1):
        ids = job.tokenizer.encode(story)[: job.model.config.block_size]
        title = f"Where it forks: CLUTRR, story {number}"
        note = "CLUTRR asks how two people of a story are related; this is one of its longest stories."
        yield _map(job.trace(ids), name=f"where-it-forks-clutrr-{number}", title=title, note=note)


def kind_figure(job: Job) -> Figure:
    numbers = kinds.bubble_numbers(job.traces, kinds.kinds_of_rows(job.sample.rows, job.tokenizer))
    return _figure(
        job, "token-kinds", "Which tokens get bubbles", numbers, kinds.bubble_sentence(numbers), drawings.kinds,
        "In brackets: tokens of that kind. The last two kinds above “all tokens” overlap with the others. Rare words: "
        "the least frequent ones of this text, about a quarter of all words, or those that occur once.",
    )  # fmt: skip


def uncertainty_figure(job: Job) -> Figure:
    streams = [[token.streams[-1] for token in each.tokens] for each in job.traces]
    entropies = {"the model itself": [[token.entropy for token in each.tokens] for each in job.traces]}
    if job.plain is not None:
        plain = job.plain

        def entropy(ids: list[int]) -> list[float]:
            return [token.entropy for token in trace(plain, ids, tokenizer=job.tokenizer, top=0).tokens]

        entropies["a plain model"] = list(job.each("reading with the plain model", job.sample.rows, entropy))
    numbers = uncertainty.numbers(streams, entropies)
    return _figure(
        job, "uncertainty", "Forks and uncertainty", numbers, uncertainty.sentence(numbers), drawings.uncertainty,
        f"Each dot is {uncertainty.GROUP} consecutive tokens; the line is a fitted parabola, large dots are means of "
        "eighths ± standard error. The interval treats groups as independent, so it is rather too narrow. "
        + "Give --plain for the entropy of an independent model." * (job.plain is None),
    )  # fmt: skip


def attention_figure(job: Job) -> Figure:
    windows, tokens = ATTENTION
    part = job.sample.first(windows=windows, tokens=tokens)
    found = job.each("attention", part.rows, lambda ids: job.trace(ids, attention=True))
    numbers = attention.numbers(found)
    return _figure(
        job, "attention", "Who looks at whom", numbers, attention.sentence(numbers), drawings.attention,
        "A fork is left of its original, and attention looks to the left only: a fork never sees its own original.",
        n_tokens=part.n_tokens,
    )  # fmt: skip


def fate_figures(job: Job) -> Iterator[Figure]:
    numbers = fates.score_numbers(job.traces)
    yield _figure(job, "scores", "Scores of the streams", numbers, fates.score_sentence(numbers), drawings.scores, "")
    numbers = fates.survival_numbers(job.traces)
    sentence = fates.survival_sentence(numbers)
    yield _figure(job, "survival", "What becomes of forks", numbers, sentence, drawings.survival, "")
    part = job.sample.first(windows=ATTENTION[0])
    numbers = writes.numbers(job.model, part.rows, tokenizer=job.tokenizer)
    yield _figure(
        job, "writes", "What the blocks write", numbers, writes.sentence(numbers), drawings.writes,
        "Mean norm over all streams of what a block computes (before) and of what it adds to the residual, multiplied "
        "by the stream's score (after). Dashed: fork layers.",
        n_tokens=part.n_tokens,
    )  # fmt: skip


def dial_figure(job: Job) -> Figure:
    numbers = dial.numbers(job.scores, own=job.own_budget)
    timed = job.each("speed at all budgets", job.budgets, lambda r: dial.timing(job.model, job.sample.rows[0], r))
    numbers["timings"] = [each for each in timed if each is not None]
    numbers["device"] = device_name(job.model.embedding.weight.device)
    return _figure(
        job, "dial", "The thinking dial", numbers, dial.sentence(numbers), drawings.dial,
        "Bars: standard error of the paired difference over windows. Tokens chosen for being hard at budget 1 look "
        "better at any other budget, also by chance; the choice by the mean over all budgets does not favour one.",
    )  # fmt: skip


def gain_figure(job: Job) -> Figure:
    rows = [
        row[:length]
        for row, length in zip(job.sample.windows.targets.tolist(), job.sample.windows.lengths.tolist(), strict=True)
    ]
    of_targets = kinds.kinds_of_rows([[max(token, 0) for token in row] for row in rows], job.tokenizer)
    numbers = kinds.gain_numbers(job.scores[job.own_budget], job.scores["1"], of_targets, budget=job.own_budget)
    return _figure(
        job, "what-forks-bring", "What forks bring", numbers, kinds.gain_sentence(numbers), drawings.gain,
        "By kind of the predicted token. The same weights, with forks cut away at run time (budget 1): the model was "
        "not trained that way, so this is not a comparison with a model without forks.",
    )  # fmt: skip


def future_figure(job: Job) -> Figure:
    is_cached = exact_method(job.model.config) == "cached"
    windows, tokens = CACHED if is_cached else UNCACHED
    part = job.sample.first(windows=windows, tokens=tokens).windows
    size = job.tokenizer.size
    scores = perplexity(job.model, part, vocab_size=size, report=job.progress.begin)
    end = job.tokenizer.end_of_text
    numbers = future.numbers(job.model.config, scores, part, vocab_size=size, end_of_text=end)
    return _figure(
        job, "future", "Does it need the future?", numbers, future.sentence(numbers), drawings.future,
        "Each dot is a document, or the part of it in one window.", n_tokens=numbers["tokens"],
    )  # fmt: skip


def leak_figure(job: Job) -> Figure:
    model = leaks.in_float64(job.model)
    # None: the passages as one text, as in `thoughtbubbles audit`, which has the same numbers.
    ids = None if job.sample.is_own else leaks.same_length(job.sample.rows)

    def work(rule: str | None) -> Audit:
        return audit(model, ids, tokenizer=job.tokenizer, selection=rule, rows=leaks.ROWS)

    chooses = job.model.config.chooses_forks
    own = job.model.config.selection if chooses else leaks.NO_RULE
    numbers = leaks.numbers(list(job.each("leak audit", [*leaks.RULES] if chooses else [None], work)), own=own)
    return _figure(
        job, "leak-audit", "Do predictions depend on later tokens?", numbers, leaks.sentence(numbers), drawings.leaks,
        f"{numbers['rows']} rows of {numbers['tokens']} tokens in {numbers['dtype']}, with the budget of the model, "
        f"{numbers['budget']}. At {numbers['cuts']} positions of each row all tokens from there on are replaced, and "
        "each prediction before is compared. Moved: any log-probability changed. log p: of the true next token.",
        n_tokens=numbers["rows"] * numbers["tokens"],
    )  # fmt: skip


def _figure(
    job: Job, name: str, title: str, numbers: Mapping[str, Any], sentence: str, draw: Callable[..., Any], note: str, *,
    n_tokens: int | None = None,
) -> Figure:  # fmt: skip
    """With the text it was made from: all of it, or so many tokens."""
    note = f"{note} Text: {n_tokens or job.sample.n_tokens:,} tokens of {job.sample.name}.".strip()
    return Figure(
        name=name, title=title, numbers={"text": job.sample.name, **numbers}, sentence=sentence, draw=draw, note=note
    )
