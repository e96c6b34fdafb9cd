"""The protocol `screen`: ideas for better forks, on a third of the tokens of `long`."""

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

SCORED: dict[str, Any] = {"fork_reach": 64, "merge": "forks", "feedback": True}


def screen() -> Protocol:
    """Where forks are visible, and who predicts; forks that every token has; gates; when forks begin.

    The gates of plain models are `head-gate`, `r1` and `r1-gate`: what has one of them too is compared with it.
    """
    seen = {"": "seen by all", "-reach64": "seen by 64 tokens", "-private": "private"}
    reach: dict[str, int | None] = {"": None, "-reach64": 64, "-private": 0}
    merges = {"": "residual", "-mixture": "mixture", "-forks": "forks"}
    modern: dict[str, Any] = {"block": "modern"}
    muon: dict[str, Any] = {"kind": "muon"}  # its updates have the size of AdamW's, so learning rates are the same
    plain, forked = TUNED["plain"], TUNED["r2"]
    rows = {
        PLAIN: Row(what="plain GPT", optim=plain),
        "head-gate": Row(what="plain GPT, a sigmoid gate per head", model={"head_gate": True}, optim=plain),
        "r1": Row(what=R1, model=forks(1), optim=forked),
        **{
            f"r2{far}{how}": Row(
                what=f"r = 2, forks {seen[far]}, merge `{merges[how]}`",
                model=forks(2, fork_reach=reach[far], merge=merges[how]),
                optim=forked,
            )
            for far in seen
            for how in merges
        },
        **{
            f"state-{layer}": Row(
                what=EVERY.format(layer=layer),
                model=forks(2, layers=(layer,), **STATE),
                optim=forked,
            )
            for layer in (0, 3, 6)
        },
        **{
            f"feedback-{layer}": Row(
                what=FEEDBACK.format(layer=layer),
                model=forks(2, layers=(layer,), **STATE, feedback=True),
                optim=forked,
            )
            for layer in (0, 3, 6)
        },
        "feedback-3-scores": Row(
            what="`feedback-3` with learned scores, which attenuate",
            model=forks(2, layers=(3,), fork_reach=0, merge="forks", feedback=True),
            optim=forked,
        ),
        "feedback-3-residual": Row(
            what="`feedback-3`, originals predict too",
            model=forks(2, layers=(3,), **{**STATE, "merge": "residual"}, feedback=True),
            optim=forked,
        ),
        **gated_forks(),
        "feedback-3-reach512-gate": Row(
            what="`feedback-3-gate`, forks see forks of all tokens before",
            model=forks(2, layers=(3,), **{**STATE, "fork_reach": 512}, feedback=True, head_gate=True),
            optim=forked,
        ),
        "feedback-0-reach64-gate": Row(
            what="`feedback-0`, forks see forks of the 64 tokens before; a sigmoid gate per head",
            model=forks(2, layers=(0,), **{**STATE, "fork_reach": 64}, feedback=True, head_gate=True),
            optim=forked,
        ),
        "feedback-3-reach64-scores-gate": Row(
            what="`feedback-3-reach64-gate` with learned scores, which attenuate",
            model=forks(2, layers=(3,), **SCORED, head_gate=True),
            optim=forked,
        ),
        "feedback-3-reach64-elastic-gate": Row(
            what="the same, r drawn from 1, 1.25, 1.5, 1.75 and 2, measured at 2",
            model=forks(2, layers=(3,), **SCORED, head_gate=True),
            optim=forked,
            run={"budgets": (1.0, 1.25, 1.5, 1.75, 2.0)},
        ),
        "r2-private-gate": Row(
            what="r = 2, private forks, a sigmoid gate per head",
            model=forks(2, fork_reach=0, head_gate=True),
            optim=forked,
        ),
        "r2-own": Row(
            what="r = 2, scores of the last fork layer alone, no product", model=forks(2, own_scores=True), optim=forked
        ),
        "r2-bias": Row(what="r = 2, all scores near 0.95 at first", model=forks(2, score_bias=3), optim=forked),
        "r2-relative": Row(
            what="r = 2, scores relative to the best of the bubble", model=forks(2, relative_scores=True), optim=forked
        ),
        "r2-relative-gate": Row(
            what="r = 2, relative scores, a sigmoid gate per head",
            model=forks(2, relative_scores=True, head_gate=True),
            optim=forked,
        ),
        "r2-private-relative-gate": Row(
            what="r = 2, private forks, relative scores, a sigmoid gate per head",
            model=forks(2, fork_reach=0, relative_scores=True, head_gate=True),
            optim=forked,
        ),
        "r2-once": Row(what="r = 2, a single fork layer, before block 3", model=forks(2, layers=(3,)), optim=forked),
        "r2-noise": Row(what="r = 2, forks chosen by scores with noise", model=forks(2, score_noise=0.5), optim=forked),
        "r2-full-writes": Row(
            what="r = 2, residual updates not attenuated", model=forks(2, gate_residual=False), optim=forked
        ),
        "modern": Row(what="plain, with RMSNorm, SwiGLU, query-key norm", model=modern, optim=plain),
        "modern-gate": Row(what="`modern`, a sigmoid gate per head", model={**modern, "head_gate": True}, optim=plain),
        "modern-r2": Row(what="`r2` with the blocks of `modern`", model=forks(2, **modern), optim=forked),
        "modern-state-3": Row(
            what="`state-3` with the blocks of `modern`", model=forks(2, layers=(3,), **STATE, **modern), optim=forked
        ),
        "modern-feedback-3-reach64-gate": Row(
            what="`feedback-3-reach64-gate` with the blocks of `modern`",
            model=forks(2, layers=(3,), **{**STATE, "fork_reach": 64}, feedback=True, head_gate=True, **modern),
            optim=forked,
        ),
        "modern-muon": Row(what="`modern`, trained with Muon", model=modern, optim={**plain, **muon}),
        "modern-muon-gate": Row(
            what="`modern-gate`, trained with Muon", model={**modern, "head_gate": True}, optim={**plain, **muon}
        ),
        "modern-muon-r2": Row(
            what="`modern-r2`, trained with Muon", model=forks(2, **modern), optim={**forked, **muon}
        ),
        "r2-late": late_forks(2),
        "r2-elastic": Row(
            what="r drawn from 1, 1.5, 2, 3 and 4, measured at 2",
            model=forks(2),
            optim=forked,
            run={"budgets": (1.0, 1.5, 2.0, 3.0, 4.0)},
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
