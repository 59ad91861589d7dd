"""What a model is: our own reading of config.json (transformers 4.x and 5.x spellings) and of GGUF metadata."""

from .facts import ModelConfig, MoEConfig, RopeConfig

__all__ = ["ModelConfig", "MoEConfig", "RopeConfig"]
