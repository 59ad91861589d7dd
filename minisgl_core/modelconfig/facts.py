"""The facts of a model's architecture as frozen records; no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from minisgl_core.errors import ConfigError
from minisgl_core.plugin_api.devices import device_kind

__all__ = ["MoEConfig", "ModelConfig", "RopeConfig"]


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding. Fields beyond ``kind`` matter only to the kinds that use them."""

    theta: float
    rotary_dim: int
    """Number of leading dimensions of a head that are rotated."""
    kind: Literal["default", "linear", "dynamic", "llama3", "yarn"] = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    divisors: tuple[float, ...] = ()
    """Divisor of each base frequency, where a file lists them (GGUF, for llama3); empty = none."""


@dataclass(frozen=True, slots=True)
class MoEConfig:
    """A mixture of experts. ``layers`` are the sparse layers; the others have a dense MLP."""

    num_experts: int
    top_k: int
    intermediate_size: int
    norm_topk_prob: bool
    layers: tuple[int, ...]
    shared_intermediate_size: int = 0
    """Width of the always-on shared expert with its sigmoid gate; 0 = none (Qwen2-MoE has one)."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Everything that the engine knows about a model before its weights are read."""

    architecture: str
    """Such as ``Qwen3ForCausalLM``."""
    model_type: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    rope: RopeConfig
    max_position_embeddings: int
    tie_word_embeddings: bool
    dtype: str
    """``float32``, ``bfloat16`` or ``float16``: as the checkpoint states."""
    quantised: bool = False
    """The weights are quantised in blocks, which do not determine the dtype to compute in."""
    file_bytes: int = field(default=0, compare=False)
    """Size of the files of a GGUF model; 0 for a folder."""
    hidden_act: str = "silu"
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    windows: tuple[int | None, ...] = ()
    """Sliding window of each layer, None = full attention; one entry per layer."""
    moe: MoEConfig | None = None
    eos_token_ids: tuple[int, ...] = ()
    """Union of the ids in config.json and generation_config.json."""
    bos_token_id: int | None = None
    raw: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)
    """config.json unchanged, for model plugins that read keys of their own; empty for GGUF."""

    def rank_heads(self, tp_size: int) -> tuple[int, int]:
        """One rank's (query heads, kv heads), kv heads replicated where there are fewer than ranks.

        Raises :class:`ConfigError` for heads that cannot be cut.
        """
        q_heads, kv_heads = self.num_q_heads, self.num_kv_heads
        if tp_size < 1:
            raise ConfigError(
                f"tp_size {tp_size} is not positive", field="tp_size", value=tp_size, remedy="use 1 or more ranks"
            )
        whole = kv_heads % tp_size == 0 if kv_heads >= tp_size else tp_size % kv_heads == 0
        if q_heads % tp_size or not whole:
            raise ConfigError(
                f"{q_heads} query heads and {kv_heads} kv heads cannot be cut over tp_size {tp_size}",
                field="tp_size",
                value=tp_size,
                remedy=f"use a tp_size that divides {q_heads} and that divides {kv_heads} or is a multiple of it",
            )
        return q_heads // tp_size, max(kv_heads // tp_size, 1)

    def dtype_on(self, device: str) -> str:
        """The dtype to compute in on this kind of device if none is requested: the checkpoint's.

        A quantised checkpoint leaves the choice: bfloat16 on an accelerator, whose attention kernels do not support
        float32.
        """
        return "bfloat16" if self.quantised and not device_kind(device).on_host else self.dtype
