"""The text that the figures are made from: passages of our own, a file, or windows of prepared data; and CLUTRR."""

from dataclasses import dataclass
from pathlib import Path

import torch

from thoughtbubbles.data.tokenizer import Tokenizer
from thoughtbubbles.evals.autoregressive import Windows
from thoughtbubbles.evals.documents import data_folder, find_files, records
from thoughtbubbles.evals.settings import Evaluation
from thoughtbubbles.evals.tasks.clutrr import CLUTRR
from thoughtbubbles.evals.windows import windows_for
from thoughtbubbles.files import named, read_bytes, short_name
from thoughtbubbles.model.config import ModelConfig
from thoughtbubbles.model.loss import IGNORED
from thoughtbubbles.recipes.showcase import PARAGRAPH

LONGEST = 1 << 22  # bytes of a text file that are read: more than any number of windows needs
PASSAGES = (
    PARAGRAPH
    + """ the lamp went out. He took a lantern, went up in the dark and found the glass broken, and a gull on the \
floor. He held the lantern to the window until morning, and no ship was lost.""",
    """\
To measure how fast the river flows, you need two posts, a watch and an orange. Put the posts 20 metres apart on the \
bank. Throw the orange into the middle of the river above the first post, and count the seconds from one post to the \
other. If it takes 16 seconds, the water moves at 1.25 metres per second. Repeat this five times, because the wind \
and small whirls change the result, and take the mean.

An orange is better than a stick: it floats low in the water, so the wind hardly moves it, and it is easy to see.""",
    """\
"You are late," said Mrs. Harding without looking up from her book.

"The train stood still for an hour," Peter answered. "There was a cow on the line. Then there were two cows."

"Two cows!" She closed the book. "And what did the driver do?"

"He asked if anyone knew how to talk to a cow. Nobody did, of course. So we waited, and in the end they left on their \
own, as if they had only been waiting for a better idea." """.strip(),
    """\
Yeast is a fungus of a single cell. It feeds on sugar and gives off carbon dioxide and alcohol. In dough the gas is \
caught in a net of gluten, a protein that forms when flour and water are kneaded, and so the dough rises. At about \
27 °C yeast grows fastest; above 55 °C it dies. Salt slows it down. That is why bakers weigh the salt exactly: with \
too little the dough rises too fast and tastes of nothing, with too much it stays flat.""",
    """\
Minutes of the meeting of 14 March 2019

1. The roof of the hall leaks in three places. Repairs will cost 4,800 dollars; the insurance pays 3,000 of it.
2. The library asks for longer opening hours on Saturdays. Ms. Okafor and Mr. Lindqvist will look for volunteers.
3. The summer concert takes place on 6 July, or on 7 July if it rains.
4. Other business: the key to the kitchen is still missing.

The next meeting is on 11 April at 7:30 pm.""",
    """\
A sorting algorithm is stable if items that compare as equal keep their order. Suppose a list of letters is sorted by \
date, and then again by sender. With a stable algorithm the letters of each sender are still in the order of their \
dates; with an unstable one they may be in any order. Merge sort is stable and needs additional memory. Quicksort \
needs almost none, but it is not stable, and with an unlucky choice of pivots it takes quadratic time.""",
)


@dataclass(frozen=True, kw_only=True)
class Sample:
    """Windows of text, and what to call them in a sentence."""

    name: str
    windows: Windows
    is_own: bool = False

    @property
    def rows(self) -> list[list[int]]:
        """The ids of each window, without padding."""
        pairs = zip(self.windows.ids.tolist(), self.windows.lengths.tolist(), strict=True)
        return [ids[:length] for ids, length in pairs]

    @property
    def n_tokens(self) -> int:
        return int(self.windows.lengths.sum())

    def first(self, *, windows: int | None = None, tokens: int | None = None) -> "Sample":
        """At most so many windows, cut to so many tokens."""
        ids, targets, lengths = (part[:windows] for part in self.windows)
        lengths = lengths.clamp(max=ids.shape[1] if tokens is None else tokens)
        return Sample(
            name=self.name, windows=Windows(ids[:, :tokens], targets[:, :tokens], lengths), is_own=self.is_own
        )


def own_sample(config: ModelConfig, tokenizer: Tokenizer) -> Sample:
    rows = [tokenizer.encode(passage) for passage in PASSAGES]
    name = f"{len(PASSAGES)} short passages that come with the package"
    return Sample(name=name, windows=as_windows(config, rows), is_own=True)


def file_sample(path: Path, config: ModelConfig, tokenizer: Tokenizer, *, windows: int) -> Sample:
    """A text file, cut into windows of the context length: the first ones."""
    text = read_text(path)
    ids = tokenizer.encode(text)
    if len(ids) < 2:
        raise ValueError(f"--text {short_name(path)} has {len(ids)} tokens: give a text of at least 2")
    size = config.block_size
    rows = [ids[begin : begin + size + 1] for begin in range(0, len(ids) - 1, size)][:windows]
    return Sample(name=path.name, windows=as_windows(config, rows))


def read_text(path: Path) -> str:
    content = read_bytes(path, remedy="give a text file with --text")
    try:
        return content[:LONGEST].decode(errors="strict" if len(content) <= LONGEST else "ignore")
    except UnicodeDecodeError as error:
        raise ValueError(f"--text {short_name(path)} is not UTF-8 (byte {error.start}): give a text file") from None


def data_sample(
    data: Path, config: ModelConfig, tokenizer: Tokenizer, *, windows: int, checkpoint: Path | None
) -> Sample:
    found = windows_for(Evaluation(checkpoint=checkpoint, data=data, windows=windows), config, tokenizer)
    return Sample(name=f"{len(found.ids)} windows of the validation split of {data.resolve().name}", windows=found)


def as_windows(config: ModelConfig, rows: list[list[int]]) -> Windows:
    """Rows of ids x_0 … x_T, padded: the first T are the input, the last T the targets."""
    rows = [row[: config.block_size + 1] for row in rows]
    lengths = [len(row) - 1 for row in rows]
    ids = torch.zeros(len(rows), max(lengths), dtype=torch.long)
    targets = torch.full_like(ids, IGNORED)
    for place, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        ids[place, :length], targets[place, :length] = torch.tensor(row[:-1]), torch.tensor(row[1:])
    return Windows.of(config, ids, targets=targets, lengths=torch.tensor(lengths))


def clutrr_stories(folder: Path | None, *, most: int) -> list[str]:
    """Stories of CLUTRR, the longest of each file first; none where the folder does not have them."""
    try:
        paths = find_files(CLUTRR, data_folder(folder))
    except ValueError:
        if folder is not None:
            with named(f"--data-dir {short_name(folder)}", "give the folder with the benchmarks"):
                if not folder.is_dir():
                    raise
        return []
    found: list[str] = []
    for path in paths:
        stories = (record.get("story") for _, record in records(path))
        longest = max((story for story in stories if isinstance(story, str)), key=len, default="")
        if longest:
            found.append(longest.replace("[", "").replace("]", "").strip())
        if len(found) == most:
            break
    return found
