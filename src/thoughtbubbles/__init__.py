"""Thoughtbubbles: a transformer that learns to fork and delete residual streams.

The public names are imported on first use, so that `thoughtbubbles --help` does not import torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from thoughtbubbles.checkpoint import load as load
    from thoughtbubbles.checkpoint import load_tokenizer as load_tokenizer
    from thoughtbubbles.model.budget import Budget as Budget
    from thoughtbubbles.model.config import ModelConfig as ModelConfig
    from thoughtbubbles.model.streams import Streams as Streams
    from thoughtbubbles.model.transformer import Output as Output
    from thoughtbubbles.model.transformer import Thoughtbubbles as Thoughtbubbles

_HOME = {
    "Budget": "thoughtbubbles.model.budget",
    "ModelConfig": "thoughtbubbles.model.config",
    "Output": "thoughtbubbles.model.transformer",
    "Streams": "thoughtbubbles.model.streams",
    "Thoughtbubbles": "thoughtbubbles.model.transformer",
    "load": "thoughtbubbles.checkpoint",
    "load_tokenizer": "thoughtbubbles.checkpoint",
}
__all__ = ["Budget", "ModelConfig", "Output", "Streams", "Thoughtbubbles", "__version__", "load", "load_tokenizer"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return __all__
