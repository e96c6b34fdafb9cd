"""ModelConfig: everything that defines a model, validated on construction, and the paper's model sizes by name.

One class, three settings: plain GPT (no fork layers), copy-N (`copies=N`) and Thoughtbubbles (fork layers).
"""

from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, get_args

from thoughtbubbles.model.budget import Budget, BudgetLike, brief

Selection = Literal["block", "causal"]
Merge = Literal["mixture", "residual", "original", "forks"]
BlockKind = Literal["gpt2", "modern"]
ScoreScale = Literal["head", "one"]
BudgetMode = Literal["proportional", "fixed"]

# Upper bounds, far beyond any model that can be run: a larger value comes from a damaged file.
MOST = {
    "n_layer": 10_000,
    "n_head": 10_000,
    "width": 2**24,
    "vocab_size": 2**24,
    "block_size": 2**24,
    "copies": 1_000,
}
FIXED_BUDGET = "a fixed budget applies to the full context, so it"  # …: the beginning of several errors


REMOVED = {"second_pass": None}  # fields that there are no more, and their only value that a saved model may have

# Fields that mean nothing without forks; so do `fork_layers` and `merge`, which have another value then.
ABOUT_FORKS = (
    *("budget", "budget_mode", "selection", "fork_reach", "feedback", "gate_qk", "gate_v", "gate_residual"),
    *("score_scale", "scores", "own_scores", "relative_scores", "score_noise", "score_bias"),
)


class Form(NamedTuple):
    """The details in which the authors' code and ours differ."""

    first_position: int = 0  # position of token 0
    score_channel: bool = False  # the key's log score replaces the last channel of q·k
    tanh_gelu: bool = False  # the tanh approximation of GELU
    levels: int = 4096  # log scores are ranked in steps of 1/levels; within a step the earlier candidate wins
    residual_sum: bool = False  # residual merge: Σ P x in place of the weighted average


OURS = Form()
# Levels: their bfloat16 scores distinguish values near 1 that are equal in our steps.
AUTHORS = Form(first_position=1, score_channel=True, tanh_gelu=True, levels=2**20, residual_sum=True)


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    n_layer: int
    """Number of transformer blocks."""
    n_head: int
    """Attention heads in each block."""
    width: int
    """D: size of a residual stream. A head has width / n_head channels, an even number."""
    vocab_size: int = 50304
    """V: rows of the tied embedding; GPT-2's 50257, padded to a multiple of 128."""
    block_size: int = 512
    """Context length: the largest number of tokens in a row (tokens, not streams)."""
    fork_layers: tuple[int, ...] = ()
    """Blocks (0-based) preceded by a fork layer. Empty: a plain GPT or copy-N."""
    copies: int = 1
    """N of the copy-N baseline: every embedding is repeated N times."""
    budget: int | float = 2
    """r: streams allowed per token, at least 1, read as an exact decimal. With n fork layers, 2^n or more means no
    limit."""
    budget_mode: BudgetMode = "proportional"
    """proportional: the cap scales with a row's tokens. fixed: always the cap of a full row (block selection only)."""
    selection: Selection = "causal"
    """Which candidates survive a fork layer. causal: decided from tokens up to their own. block: the paper's top-k."""
    merge: Merge = "mixture"
    """How a bubble becomes one prediction: mixture of distributions, residual average, the original stream alone, or
    the residual average of its forks, so that originals carry state and forks predict (the original if it has none)."""
    fork_reach: int | None = None
    """Forks are visible to their own token and to so many tokens after it; 0: to their own bubble alone. None: to all
    later tokens. Originals are always visible to all, and what nobody will see falls out of the KV cache. With
    `feedback`, of later tokens only forks see them."""
    feedback: bool = False
    """Forks also start from the last state of the previous token: originals go through all blocks first, without seeing
    any fork. Needs a `fork_reach` and a single fork layer."""
    scores: bool = True
    """False: forks are not scored. Every stream forks in every fork layer, nothing is attenuated, and merges weigh all
    streams alike. Needs a budget without effect: 2^n or more with n fork layers."""
    gate_qk: bool = True
    """Add the key's log score to the attention logits."""
    gate_v: bool = True
    """Multiply values by the key's score."""
    gate_residual: bool = True
    """Multiply what a block adds to a stream by the stream's score."""
    score_scale: ScoreScale = "head"
    """head: the log score is divided by sqrt(head size), like q·k. one: it is added without scaling."""
    own_scores: bool = False
    """A stream's score is what the last fork layer gave it, not the product along its line of descent."""
    relative_scores: bool = False
    """Attenuate by scores relative to the best stream of the bubble, which counts as 1: a token as a whole is never
    attenuated. Selection and merges do not change."""
    score_noise: int | float = 0
    """In training, forks are chosen by log scores less the absolute value of normal noise of this deviation, so that
    candidates just below the budget are tried too. Scores themselves stay as they are. The numbers drawn depend on the
    device, the ranks and the micro-batch size."""
    score_bias: int | float | None = None
    """Initial value of the bias of the score heads. None: no bias."""
    block: BlockKind = "gpt2"
    """gpt2: LayerNorm and a GELU MLP of 4 · width, as in the paper. modern: RMSNorm, a SwiGLU MLP of 8/3 · width, and
    RMSNorm of each head's queries and keys; as many weights."""
    head_gate: bool = False
    """Multiply each head's attention output by a sigmoid gate, computed from the block's normalised input."""
    authors_compat: bool = False
    """Compute as the authors' code does where ours differs: for weights imported from it."""

    def __post_init__(self) -> None:
        _require(
            isinstance(self.fork_layers, (tuple, list)), "fork_layers", self.fork_layers, "give a tuple, e.g. (3, 7)"
        )
        object.__setattr__(self, "fork_layers", tuple(self.fork_layers))
        for name, most in MOST.items():
            value = getattr(self, name)
            _require(is_whole(value) and 1 <= value <= most, name, value, f"give a whole number from 1 to {most:,}")
        _require(self.width % self.n_head == 0, "width", self.width, f"make it a multiple of n_head = {self.n_head}")
        _require(
            self.head_size % 2 == 0,
            "width",
            self.width,
            f"its {self.n_head} heads have {self.head_size} channels each; rotary positions pair them, so make it even",
        )
        for name, kind in (
            ("budget_mode", BudgetMode),
            ("selection", Selection),
            ("merge", Merge),
            ("score_scale", ScoreScale),
            ("block", BlockKind),
        ):
            value = getattr(self, name)  # an array would be compared elementwise
            _require(isinstance(value, str) and value in get_args(kind), name, value, f"choose one of {get_args(kind)}")
        self._check_forks()
        for name in (
            "feedback",
            "scores",
            "gate_qk",
            "gate_v",
            "gate_residual",
            "own_scores",
            "relative_scores",
            "head_gate",
            "authors_compat",
        ):
            _require(isinstance(getattr(self, name), bool), name, getattr(self, name), "give True or False")
        _require(is_number(self.budget), "budget", self.budget, "give one number, e.g. 2 or 1.5")
        Budget.of(self.budget, name="ModelConfig.budget").check_range(self.block_size, name="ModelConfig.budget")
        _require(
            self.score_bias is None or (is_number(self.score_bias) and abs(self.score_bias) <= 1e6),
            "score_bias",
            self.score_bias,
            "give a finite number between -1e6 and 1e6, or None for no bias",
        )
        _require(
            is_number(self.score_noise) and 0 <= self.score_noise <= 10,
            "score_noise",
            self.score_noise,
            "give a number from 0 (none) to 10",
        )
        if not self.scores:
            self._check_no_scores()
        if self.authors_compat:
            self._check_authors_compat()

    def _check_forks(self) -> None:
        for layer in self.fork_layers:
            _require(
                is_whole(layer) and 0 <= layer < self.n_layer,
                "fork_layers",
                self.fork_layers,
                f"{brief(layer)} is not a block of this model: give numbers from 0 to n_layer - 1 = {self.n_layer - 1}",
            )
        _require(
            list(self.fork_layers) == sorted(set(self.fork_layers)),
            "fork_layers",
            self.fork_layers,
            "list each layer once, in increasing order",
        )
        if self.copies > 1:
            _require(
                not self.fork_layers,
                "fork_layers",
                self.fork_layers,
                f"copies = {self.copies} is the baseline that does not fork: set fork_layers=() or copies=1",
            )
            _require(
                self.merge == "original", "merge", self.merge, "copy-N decodes the rightmost copy: set merge='original'"
            )
            _require(self.fork_reach is None, "fork_reach", self.fork_reach, "copy-N has no forks: leave it None")
        most = MOST["block_size"]
        _require(
            self.fork_reach is None or (is_whole(self.fork_reach) and 0 <= self.fork_reach <= most),
            "fork_reach",
            self.fork_reach,
            f"give a whole number of tokens from 0 to {most:,}, or None for no limit",
        )
        if self.feedback is True:
            self._check_feedback()
        _require(
            self.budget_mode == "proportional" or self.selection == "block",
            "budget_mode",
            self.budget_mode,
            f"{FIXED_BUDGET} requires selection='block'",
        )

    def _check_feedback(self) -> None:
        name, on = "feedback", self.feedback
        _require(len(self.fork_layers) == 1, name, on, f"give one fork layer, not {len(self.fork_layers)}")
        _require(
            self.fork_reach is not None, name, on, "forks see forks of fork_reach tokens before: set it, 0 or more"
        )
        _require(self.merge != "original", name, on, "merge='original' does not read forks: choose another merge")

    def _check_no_scores(self) -> None:
        remedy = "scores = False has no use for it: leave it {}, set scores=True, or take a size with -causal or -paper"
        for name, unused in (
            ("selection", "causal"),
            ("own_scores", False),
            ("relative_scores", False),
            ("score_noise", 0),
            ("score_bias", None),
        ):
            value = getattr(self, name)
            _require(value == unused, name, value, remedy.format(repr(unused)))
        self.check_budget(Budget.of(self.budget), name="ModelConfig.budget")

    def _check_authors_compat(self) -> None:
        """The authors' code supports one setting of each of these."""
        remedy = (
            "authors_compat = True computes as the authors' code, which does not support this: set {} or leave it False"
        )
        theirs = ("residual", "original")
        _require(self.merge in theirs, "merge", self.merge, remedy.format("merge='residual' or 'original'"))
        for name, value in (
            ("block", "gpt2"),
            ("copies", 1),
            ("fork_reach", None),
            ("feedback", False),
            ("scores", True),
            ("gate_qk", True),
            ("gate_v", True),
            ("gate_residual", True),
            ("score_scale", "head"),
            ("score_bias", None),
            ("score_noise", 0),
            ("own_scores", False),
            ("relative_scores", False),
            ("head_gate", False),
        ):
            found = getattr(self, name)
            _require(found == value, name, found, remedy.format(f"{name}={value!r}"))
        remedy = "with authors_compat = True scores are ranked too finely for more than 50 fork layers: give fewer"
        _require(len(self.fork_layers) <= 50, "fork_layers", self.fork_layers, remedy)

    @property
    def is_causal(self) -> bool:
        """Whether a token's streams depend on tokens up to it only, so that nothing is ever revised."""
        return not self.fork_layers or self.selection == "causal"

    @property
    def chooses_forks(self) -> bool:
        """Whether forks survive by a selection under a budget; without scores all do."""
        return bool(self.fork_layers) and self.scores

    @property
    def form(self) -> Form:
        """Without fork layers there are no scores, so no channel is replaced."""
        return AUTHORS._replace(score_channel=bool(self.fork_layers)) if self.authors_compat else OURS

    @property
    def head_size(self) -> int:
        return self.width // self.n_head

    @property
    def hidden(self) -> int:
        """Channels between the two products of an MLP."""
        return 4 * self.width if self.block == "gpt2" else 8 * round(self.width / 3)

    @property
    def max_bubble(self) -> int:
        """The most streams a token can have: each fork layer at most doubles a bubble."""
        return self.copies * 2 ** len(self.fork_layers)

    def is_unlimited(self, budget: BudgetLike | Budget) -> bool:
        """Whether this budget (each, if there are several) never limits the streams: every fork is kept."""
        return self._keeps_all(Budget.of(budget))

    def _keeps_all(self, budget: Budget) -> bool:
        return not self.fork_layers or all(n >= self.max_bubble * d for n, d in zip(*budget, strict=True))

    def check_budget(self, budget: Budget, *, name: str = "budget") -> None:
        """Raises an error for a budget that this model cannot follow."""
        budget.check_range(self.block_size, name=name)
        if not self.scores and not self._keeps_all(budget):
            raise ValueError(
                f"{name} = {budget.shown}: without scores this model keeps all forks; give {self.max_bubble} or more"
            )

    def without_forks(self) -> "ModelConfig":
        """The plain model with the same blocks; all that is about forks has its default."""
        default = {name: getattr(ModelConfig, name) for name in ABOUT_FORKS}
        return replace(self, **default, fork_layers=(), merge="original")

    @classmethod
    def named(cls, name: str) -> "ModelConfig":
        """A size of `SIZES` in one of its forms; `dataclasses.replace` changes any field of it.

        `150m` is what our experiments found best at equal parameters and text (docs/results): every token forks once, a
        quarter of the way up; forks get feedback, see forks of near tokens, and predict; each head has a gate.
        `150m-causal` forks as the paper's, by learned scores, with causal selection, and `150m-paper` is the paper's
        own, with block selection; `-r4` after either is a budget of 4 streams per token in place of 2.
        Baselines: `150m-plain` without forks, `150m-gate` the same with a gate per head, and `150m-copy-3` with three
        copies of every token.
        """
        size, _, form = name.partition("-")
        copies = form.removeprefix("copy-") if form.startswith("copy-") else ""
        if size not in SIZES or not (form in ("", *FORMS) or (copies.isdecimal() and len(copies) <= 9)):
            raise ValueError(
                f"no model is named {name!r}: take a size ({', '.join(SIZES)}), "
                f"alone or with -{', -'.join(FORMS)} or -copy-N after it, such as 150m-copy-3"
            )
        learned = SIZES[size]
        if form.removesuffix(FOUR) in CHOOSING:
            selection: Selection = "block" if form.startswith("paper") else "causal"
            return replace(learned, selection=selection, budget=4 if form.endswith(FOUR) else learned.budget)
        plain = replace(learned, fork_layers=(), merge="original")
        if form != "":
            return replace(plain, head_gate=form == "gate", copies=int(copies or 1))
        return replace(
            plain,
            fork_layers=(plain.n_layer // 4,),
            merge="forks",
            fork_reach=plain.block_size // 8,
            feedback=True,
            scores=False,
            head_gate=True,
        )


def is_whole(value: object) -> bool:
    """An int but not a bool, which is a subclass of int."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> bool:
    """An int or float, including inf and NaN, but not an integer that overflows a float."""
    return isinstance(value, float) or (is_whole(value) and abs(value) < 1 << 1000)  # type: ignore[arg-type]


def every_fourth_layer(n_layer: int) -> tuple[int, ...]:
    """The paper's extended forking ("overforking"): all layers 4n − 1."""
    return tuple(range(3, n_layer, 4))


def without_removed(described: dict[str, Any]) -> dict[str, Any]:
    """A saved config without the fields that there are no more; an error if it uses one."""
    for name, unused in REMOVED.items():
        if described.get(name, unused) != unused:
            raise ValueError(f"{name} = {brief(described[name])}: this version does not have it; use an earlier one")
    return {name: value for name, value in described.items() if name not in REMOVED}


def _require(condition: bool, field: str, value: object, remedy: str) -> None:
    if not condition:
        raise ValueError(f"ModelConfig.{field} = {brief(value)}: {remedy}")


# Of a size, after its name; without one it is the form that we recommend.
CHOOSING, FOUR = ("causal", "paper"), "-r4"
FORMS = (*CHOOSING, *(form + FOUR for form in CHOOSING), "plain", "gate")
# The paper's four sizes (its topology table: forks before blocks 3, 7 and 11 at every depth; 1.9b averages residuals,
# since the mixture is too expensive), and two small ones: `nano` for tests, `tiny` for a laptop.
SIZES = {
    "nano": ModelConfig(n_layer=4, n_head=2, width=16, vocab_size=64, block_size=32, fork_layers=(1, 2, 3)),
    "tiny": ModelConfig(n_layer=6, n_head=4, width=128, vocab_size=512, block_size=128, fork_layers=(1, 3)),
    "150m": ModelConfig(n_layer=16, n_head=12, width=768, fork_layers=(3, 7, 11)),
    "319m": ModelConfig(n_layer=24, n_head=16, width=1024, fork_layers=(3, 7, 11)),
    "772m": ModelConfig(n_layer=36, n_head=20, width=1280, fork_layers=(3, 7, 11)),
    "1.9b": ModelConfig(n_layer=36, n_head=16, width=2048, fork_layers=(3, 7, 11), merge="residual"),
}
