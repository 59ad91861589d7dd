"""LLM and AsyncLLM: a model in a script, a notebook or a server."""

from .async_engine import AsyncEngine
from .llm import LLM, AsyncLLM
from .output import Choice, Chunk, Completion, TokenLogprob
from .prompts import Prompt, prepare_prompts
from .runner import Runner

__all__ = [
    "LLM",
    "AsyncEngine",
    "AsyncLLM",
    "Choice",
    "Chunk",
    "Completion",
    "Prompt",
    "Runner",
    "TokenLogprob",
    "prepare_prompts",
]
