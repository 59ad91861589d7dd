"""Role ``ops``: the operations between the matrix products. Resolved one by one: a backend may offer any subset.

Shapes: T tokens, H query heads, K kv heads, D head_dim, R rotary width, E experts, V vocabulary, B rows.
The core has a composed default in plain torch for each; ``Caps.ops`` names the ones that a backend offers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, Protocol

if TYPE_CHECKING:
    import torch

    from .comm import Communicator
    from .kv import KVKernels
    from .platform import Platform

__all__ = ["OP_NAMES", "LayerOps", "OpsSetup", "RopeStoreArgs", "SampleArgs", "SamplingMode"]

SamplingMode = Literal["greedy", "random", "filtered"]
"""greedy: every row is an argmax. random: some rows have a temperature. filtered: some have top-k, top-p or min-p."""

OP_NAMES: Final = (
    "rms_norm",
    "add_rms_norm",
    "allreduce_add_rms_norm",
    "qk_norm_rope_store",
    "act_and_mul",
    "route",
    "sample",
)


@dataclass(frozen=True, slots=True)
class OpsSetup:
    """What an ops backend is constructed with; ``kv`` and ``comm`` serve operations composed of theirs."""

    device: torch.device
    dtype: torch.dtype
    q_heads: int
    kv_heads: int
    head_dim: int
    hidden_size: int
    vocab_size: int
    max_tokens: int
    max_batch: int
    kv: KVKernels
    comm: Communicator
    platform: Platform | None = None
    """Kernels that are launched outside torch ask it for the stream; absent only where a backend is driven by hand."""


class SampleArgs(NamedTuple):
    """Per-row sampling parameters on the device, each (B,)."""

    temperature: torch.Tensor
    """float32; 0 = greedy"""
    top_k: torch.Tensor
    """int32; 0 = off"""
    top_p: torch.Tensor
    """float32; 1 = off"""
    min_p: torch.Tensor
    """float32; 0 = off"""
    seed_lo: torch.Tensor
    """int32, the low half of the 64-bit seed"""
    seed_hi: torch.Tensor
    """int32, the high half"""
    positions: torch.Tensor
    """int32, position of the token being sampled"""


class RopeStoreArgs(NamedTuple):
    """What all calls of ``qk_norm_rope_store`` for one layer share. The core makes it once, when it binds the pool."""

    q_weight: torch.Tensor | None
    """(D,); None where the model does not normalise q and k"""
    k_weight: torch.Tensor | None
    """(D,); None exactly where ``q_weight`` is"""
    eps: float
    cos_sin: torch.Tensor
    """(max_len, R) float32: R/2 cosines, then R/2 sines of each position"""
    k_cache: torch.Tensor
    """(P+1, S, K, D)"""
    v_cache: torch.Tensor
    """(P+1, S, K, D)"""


class LayerOps(Protocol):
    """Every operation; an implementation offers those that its spec names. Built as ``Class(setup, options)``."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """x (T, N) -> new (T, N) = x / sqrt(mean(x^2) + eps) * weight, the mean in float32."""
        ...

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``r = residual + x``; returns ``(rms_norm(r), r)``. ``residual`` and ``x`` may be overwritten."""
        ...

    def allreduce_add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """:meth:`add_rms_norm` of x summed over the ranks."""
        ...

    def qk_norm_rope_store(
        self, qkv: torch.Tensor, args: RopeStoreArgs, positions: torch.Tensor, out_loc: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """From qkv (T, (H+2K)*D): normalise q and k per head (if there are weights), rotate their first R dimensions by
        ``cos_sin[positions]`` (half-split pairing), store k and v to the slots ``out_loc``. ``positions`` and
        ``out_loc`` (T,) are int32.

        Returns q (T, H, D), k (T, K, D), v (T, K, D); qkv may be overwritten and they may be views of it.
        """
        ...

    def act_and_mul(self, x: torch.Tensor) -> torch.Tensor:
        """x (T, 2I) -> new (T, I) = silu(x[:, :I]) * x[:, I:]."""
        ...

    def route(self, logits: torch.Tensor, top_k: int, renormalize: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Router logits (T, E) -> ids (T, k) int32, weights (T, k) float32 of the float32 softmax, largest first."""
        ...

    def sample(self, logits: torch.Tensor, args: SampleArgs, mode: SamplingMode) -> torch.Tensor:
        """Logits (B, V) -> ids (B,) int32; -1 for a row whose maximum is NaN. Rows of temperature 0 are a true argmax,
        lowest id on a tie. Noise depends on (seed, position, token id) only, as the core's ``gumbel_noise`` defines it.
        """
        ...

    def close(self) -> None: ...
