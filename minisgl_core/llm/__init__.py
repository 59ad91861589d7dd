"""LLM: a model in a script or notebook."""

from .llm import LLM, Prompt
from .output import Chunk
from .runner import Runner

__all__ = ["LLM", "Chunk", "Prompt", "Runner"]
