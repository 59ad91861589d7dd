"""One rank's engine."""

from .config import EngineConfig
from .engine import Engine
from .logprobs import TokenLogprobs
from .step import ForwardOutput

__all__ = ["Engine", "EngineConfig", "ForwardOutput", "TokenLogprobs"]
