"""All studies, by name."""

from collections.abc import Callable
from functools import partial

from thoughtbubbles.files import did_you_mean
from thoughtbubbles.recipes.reproduce.finetune.clutrr import ClutrrStudy
from thoughtbubbles.recipes.reproduce.finetune.gsm8k import Gsm8kStudy
from thoughtbubbles.recipes.reproduce.protocols import PROTOCOLS, protocol
from thoughtbubbles.recipes.reproduce.study import Study
from thoughtbubbles.recipes.reproduce.tasks.study import TaskStudy
from thoughtbubbles.recipes.reproduce.text_study import TextStudy
from thoughtbubbles.recipes.reproduce.two_stage.study import TwoStageStudy


def text_study(name: str) -> Study:
    return TextStudy(name, protocol(name))


STUDIES: dict[str, Callable[[], Study]] = {
    **{name: partial(text_study, name) for name in PROTOCOLS},
    **{name: partial(TaskStudy, name) for name in ("tasks", "tasks-sweep")},
    "clutrr": ClutrrStudy,
    "gsm8k": Gsm8kStudy,
    "two-stage": TwoStageStudy,
}


def study(name: str) -> Study:
    if name not in STUDIES:
        hint = did_you_mean(name, STUDIES, otherwise=f"choose from {', '.join(STUDIES)}")
        raise ValueError(f"no study is named {name!r}: {hint}")
    return STUDIES[name]()
