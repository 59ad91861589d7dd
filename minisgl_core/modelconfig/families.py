"""The default of each key that a model family's config.json may omit, as in transformers 5."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

__all__ = ["ANY_FAMILY", "FAMILIES", "Family", "WindowRule"]

WindowRule = Literal["none", "all", "switched_all", "switched_upper", "switched_alternate"]
"""Which layers have a sliding window if ``layer_types`` does not say: none; all; or, if ``use_sliding_window`` is set,
all, those from ``max_window_layers`` up, or every other one below ``max_window_layers``.
"""


@dataclass(frozen=True, slots=True)
class Family:
    """Defaults of one ``model_type``."""

    architecture: str
    windows: WindowRule
    max_position: int
    head_dim: int | None = None
    """None = hidden_size / heads."""
    kv_heads: int | None = None
    """None = equal to the number of query heads."""
    window: int | None = None
    window_layers: int = 0
    eos: int | None = None
    bos: int | None = None
    qkv_bias: bool | str = "attention_bias"
    """A constant, or the key that switches it."""
    o_bias: bool | str = "attention_bias"
    mlp_bias: bool | str = False
    on_by_default: tuple[str, ...] = ()
    """Which of these keys mean True where they are left out."""
    qk_norm: bool = False
    partial_rotary: bool = False
    """True if the family supports ``partial_rotary_factor``. The transformers families below do not: they ignore the
    factor for a plain rope, and fail for a scaled one.
    """
    moe: bool = False
    shared_expert: bool = False


FAMILIES: Final[dict[str, Family]] = {
    "llama": Family("LlamaForCausalLM", "none", 2048, eos=2, bos=1, mlp_bias="mlp_bias"),
    "mistral": Family(
        "MistralForCausalLM",
        "all",
        131072,
        kv_heads=8,
        window=4096,
        eos=2,
        bos=1,
        qkv_bias=False,
        o_bias=False,
    ),
    "qwen2": Family(
        "Qwen2ForCausalLM",
        "switched_upper",
        32768,
        kv_heads=32,
        window=4096,
        window_layers=28,
        qkv_bias=True,
        o_bias=False,
    ),
    "qwen2_moe": Family(
        "Qwen2MoeForCausalLM",
        "switched_alternate",
        32768,
        kv_heads=16,
        window=4096,
        window_layers=28,
        qkv_bias="qkv_bias",
        on_by_default=("qkv_bias",),
        o_bias=False,
        moe=True,
        shared_expert=True,
    ),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        "switched_upper",
        32768,
        head_dim=128,
        kv_heads=32,
        window=4096,
        window_layers=28,
        qk_norm=True,
    ),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        "switched_all",
        32768,
        kv_heads=4,
        window=4096,
        qk_norm=True,
        moe=True,
    ),
}
"""By ``model_type``."""

ANY_FAMILY: Final = Family("", "all", 2048, mlp_bias="mlp_bias", partial_rotary=True)
"""How the family of a model plugin is read, if its config.json uses the usual keys."""
