"""LLM: a model in a script or notebook."""

from .llm import LLM
from .output import Chunk
from .prompts import Prompt, prepare_prompts
from .runner import Runner

__all__ = ["LLM", "Chunk", "Prompt", "Runner", "prepare_prompts"]
