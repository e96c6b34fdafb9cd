"""Hugging Face: after `import thoughtbubbles.interop.hf`, AutoConfig and AutoModelForCausalLM load our folders.

A checkpoint folder already has the layout that they expect; AutoTokenizer loads its tokenizer without this import.
"""

from transformers import AutoConfig, AutoModelForCausalLM

from thoughtbubbles.interop.hf_cache import ThoughtbubblesCache
from thoughtbubbles.interop.hf_config import ThoughtbubblesConfig
from thoughtbubbles.interop.hf_model import ThoughtbubblesForCausalLM

__all__ = ["ThoughtbubblesCache", "ThoughtbubblesConfig", "ThoughtbubblesForCausalLM"]

AutoConfig.register(ThoughtbubblesConfig.model_type, ThoughtbubblesConfig, exist_ok=True)
AutoModelForCausalLM.register(ThoughtbubblesConfig, ThoughtbubblesForCausalLM, exist_ok=True)
