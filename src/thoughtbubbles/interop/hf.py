"""Hugging Face: `import thoughtbubbles.interop.hf`, and AutoConfig and AutoModelForCausalLM open our folders.

The folder of a checkpoint is the folder that they want; tokenizers open with AutoTokenizer as it is.
"""

from transformers import AutoConfig, AutoModelForCausalLM

from thoughtbubbles.interop.hf_cache import ThoughtbubblesCache
from thoughtbubbles.interop.hf_config import ThoughtbubblesConfig
from thoughtbubbles.interop.hf_model import ThoughtbubblesForCausalLM

__all__ = ["ThoughtbubblesCache", "ThoughtbubblesConfig", "ThoughtbubblesForCausalLM"]

AutoConfig.register(ThoughtbubblesConfig.model_type, ThoughtbubblesConfig, exist_ok=True)
AutoModelForCausalLM.register(ThoughtbubblesConfig, ThoughtbubblesForCausalLM, exist_ok=True)
