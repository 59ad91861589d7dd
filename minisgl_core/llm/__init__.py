"""LLM and AsyncLLM: a model in a script, a notebook or a server."""

from .answers import Choice, Chunk, Completion, TokenLogprob
from .async_engine import AsyncEngine
from .async_llm import AsyncLLM
from .llm import LLM
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
