"""Reads model configurations: config.json (transformers 4.x and 5.x spellings) and GGUF metadata."""

from .facts import ModelConfig, MoEConfig, RopeConfig
from .hf import config_from_dict
from .read import read_model_config
from .rope import rope_inv_freq
from .size import dequantised, num_parameters

__all__ = [
    "MoEConfig",
    "ModelConfig",
    "RopeConfig",
    "config_from_dict",
    "dequantised",
    "num_parameters",
    "read_model_config",
    "rope_inv_freq",
]
