"""The protocol `screen`: ideas for better forks, on a third of the tokens of `long`.

The gates of plain models are `head-gate`, `r1` and `r1-gate`: what has one of them too is compared with it.
"""

from typing import Any

from thoughtbubbles.recipes.reproduce.parts import (
    EVERY,
    FEEDBACK,
    LONG,
    LONG_OPTIM,
    PLAIN,
    R1,
    STATE,
    TUNED,
    Protocol,
    Row,
    forks,
    gated_forks,
    late_forks,
)

PLAIN_OPTIM, FORKED_OPTIM = TUNED["plain"], TUNED["r2"]


def screen() -> Protocol:
    rows = {
        PLAIN: Row(what="plain GPT", optim=PLAIN_OPTIM),
        "head-gate": Row(what="plain GPT, a sigmoid gate per head", model={"head_gate": True}, optim=PLAIN_OPTIM),
        "r1": forked(R1, forks(1)),
        **reach_and_merge(),
        **for_every_token(),
        **gated_forks(),
        **near_the_candidate(),
        "r2-private-gate": forked(
            "r = 2, private forks, a sigmoid gate per head", forks(2, fork_reach=0, head_gate=True)
        ),
        **scores(),
        **modern_blocks(),
        "r2-late": late_forks(2),
        "r2-elastic": forked(
            "r drawn from 1, 1.5, 2, 3 and 4, measured at 2", forks(2), budgets=(1.0, 1.5, 2.0, 3.0, 4.0)
        ),
    }
    return Protocol(
        what="ideas for better forks: the model of `long` on a third of its tokens",
        model=LONG,
        optim=LONG_OPTIM,
        rows=rows,
        epochs=4 / 3,
        ar_windows=0,
    )


def forked(what: str, model: dict[str, Any], **run: Any) -> Row:
    return Row(what=what, model=model, optim=FORKED_OPTIM, run=run)


def reach_and_merge() -> dict[str, Row]:
    """Where forks are visible, and who predicts."""
    seen = {"": ("seen by all", None), "-reach64": ("seen by 64 tokens", 64), "-private": ("private", 0)}
    merges = {"": "residual", "-mixture": "mixture", "-forks": "forks"}
    return {
        f"r2{far}{how}": forked(f"r = 2, forks {where}, merge `{merge}`", forks(2, fork_reach=reach, merge=merge))
        for far, (where, reach) in seen.items()
        for how, merge in merges.items()
    }


def for_every_token() -> dict[str, Row]:
    """Forks that every token has, from its own state or from feedback too."""
    return {
        **{
            f"state-{layer}": forked(EVERY.format(layer=layer), forks(2, layers=(layer,), **STATE))
            for layer in (0, 3, 6)
        },
        **{
            f"feedback-{layer}": forked(FEEDBACK.format(layer=layer), forks(2, layers=(layer,), **STATE, feedback=True))
            for layer in (0, 3, 6)
        },
        "feedback-3-scores": forked(
            "`feedback-3` with learned scores, which attenuate",
            forks(2, layers=(3,), fork_reach=0, merge="forks", feedback=True),
        ),
        "feedback-3-residual": forked(
            "`feedback-3`, originals predict too",
            forks(2, layers=(3,), **{**STATE, "merge": "residual"}, feedback=True),
        ),
    }


def near_the_candidate() -> dict[str, Row]:
    """Around `feedback-3-reach64-gate`: forks that see farther or begin earlier, learned scores, drawn budgets."""
    fed: dict[str, Any] = {**STATE, "feedback": True, "head_gate": True}
    scored = forks(2, layers=(3,), fork_reach=64, merge="forks", feedback=True, head_gate=True)
    return {
        "feedback-3-reach512-gate": forked(
            "`feedback-3-gate`, forks see forks of all tokens before",
            forks(2, layers=(3,), **{**fed, "fork_reach": 512}),
        ),
        "feedback-0-reach64-gate": forked(
            "`feedback-0`, forks see forks of the 64 tokens before; a sigmoid gate per head",
            forks(2, layers=(0,), **{**fed, "fork_reach": 64}),
        ),
        "feedback-6-reach64-gate": forked(
            "`feedback-6`, forks see forks of the 64 tokens before; a sigmoid gate per head",
            forks(2, layers=(6,), **{**fed, "fork_reach": 64}),
        ),
        "feedback-3-reach64-drawn-gate": forked(
            "`feedback-3-reach64-gate` in every second step, drawn at random, `head-gate` in the others",
            forks(2, layers=(3,), **{**fed, "fork_reach": 64}),
            budgets=(1.0, 2.0),
        ),
        "feedback-3-reach64-scores-gate": forked(
            "`feedback-3-reach64-gate` with learned scores, which attenuate", scored
        ),
        "feedback-3-reach64-elastic-gate": forked(
            "the same, r drawn from 1, 1.25, 1.5, 1.75 and 2, measured at 2",
            scored,
            budgets=(1.0, 1.25, 1.5, 1.75, 2.0),
        ),
    }


def scores() -> dict[str, Row]:
    """Scores that do not starve."""
    return {
        "r2-own": forked("r = 2, scores of the last fork layer alone, no product", forks(2, own_scores=True)),
        "r2-bias": forked("r = 2, all scores near 0.95 at first", forks(2, score_bias=3)),
        "r2-relative": forked("r = 2, scores relative to the best of the bubble", forks(2, relative_scores=True)),
        "r2-relative-gate": forked(
            "r = 2, relative scores, a sigmoid gate per head", forks(2, relative_scores=True, head_gate=True)
        ),
        "r2-private-relative-gate": forked(
            "r = 2, private forks, relative scores, a sigmoid gate per head",
            forks(2, fork_reach=0, relative_scores=True, head_gate=True),
        ),
        "r2-once": forked("r = 2, a single fork layer, before block 3", forks(2, layers=(3,))),
        "r2-noise": forked("r = 2, forks chosen by scores with noise", forks(2, score_noise=0.5)),
        "r2-full-writes": forked("r = 2, residual updates not attenuated", forks(2, gate_residual=False)),
    }


def modern_blocks() -> dict[str, Row]:
    """A strong baseline: does what was found survive?"""
    modern: dict[str, Any] = {"block": "modern"}
    muon = {"kind": "muon"}  # its updates have the size of AdamW's, so learning rates are the same
    gate = {**modern, "head_gate": True}
    fed = forks(2, layers=(3,), **{**STATE, "fork_reach": 64}, feedback=True, **gate)
    return {
        "modern": Row(what="plain, with RMSNorm, SwiGLU, query-key norm", model=modern, optim=PLAIN_OPTIM),
        "modern-gate": Row(what="`modern`, a sigmoid gate per head", model=gate, optim=PLAIN_OPTIM),
        "modern-r2": forked("`r2` with the blocks of `modern`", forks(2, **modern)),
        "modern-state-3": forked("`state-3` with the blocks of `modern`", forks(2, layers=(3,), **STATE, **modern)),
        "modern-feedback-3-reach64-gate": forked("`feedback-3-reach64-gate` with the blocks of `modern`", fed),
        "modern-muon": Row(what="`modern`, trained with Muon", model=modern, optim={**PLAIN_OPTIM, **muon}),
        "modern-muon-gate": Row(what="`modern-gate`, trained with Muon", model=gate, optim={**PLAIN_OPTIM, **muon}),
        "modern-muon-r2": Row(
            what="`modern-r2`, trained with Muon", model=forks(2, **modern), optim={**FORKED_OPTIM, **muon}
        ),
        "modern-muon-feedback-3-reach64-gate": Row(
            what="`modern-feedback-3-reach64-gate`, trained with Muon", model=fed, optim={**FORKED_OPTIM, **muon}
        ),
    }
