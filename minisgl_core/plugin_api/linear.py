"""Role ``linear``: matrix products with a model's weights, chosen per (N, K, M bucket)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

if TYPE_CHECKING:
    import torch

    from .platform import Platform

__all__ = ["FUSABLE_OPS", "AddNorm", "FusingLinear", "LinearBackend", "LinearSetup", "fused_ops"]

FUSABLE_OPS: Final = ("add_rms_norm", "act_and_mul")
"""Operations that a linear backend may fuse into its products, named in ``Caps.ops``: a prologue and an epilogue."""


def fused_ops(norm: bool, act: bool) -> frozenset[str]:
    """The :data:`FUSABLE_OPS` of a product with a fused norm (prologue) and a fused silu-and-mul (epilogue)."""
    return frozenset(op for op, fused in zip(FUSABLE_OPS, (norm, act), strict=True) if fused)


@dataclass(frozen=True, slots=True)
class LinearSetup:
    """What a linear backend is constructed with."""

    device: torch.device
    dtype: torch.dtype
    max_tokens: int
    platform: Platform | None = None
    """Since 1.1; the core always sets it. None: the caller that builds the backend has none."""


class LinearBackend(Protocol):
    """y = x @ weight.T + bias. Built as ``Class(setup, options)``."""

    def prepare_weights(self, weight: torch.Tensor) -> Any:
        """Take this rank's weight (N, K), once; may repack it; the core then drops its own tensor.

        The tensor itself is never changed: where the plan gives large and small inputs to different backends, those
        that keep it as it is share it.
        """
        ...

    def weight_of(self, weights: Any) -> torch.Tensor | None:
        """Prepared weights as an (N, K) view of their storage; None where they are stored in a format of their own.

        The core keeps what is returned, so a backend that quantises on load returns None. It may then offer
        ``dequantized(weights)``, a new (N, K) tensor.
        """
        ...

    def forward(self, x: torch.Tensor, weights: Any, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x (M, K), last dimension contiguous -> new (M, N) in x's dtype."""
        ...

    def close(self) -> None: ...


class AddNorm(NamedTuple):
    """The fused prologue of a product: its input is ``rms_norm(x + residual) * weight``."""

    residual: torch.Tensor
    """(M, K), last dimension contiguous; never changed"""
    weight: torch.Tensor
    """(K,)"""
    eps: float


class FusingLinear(LinearBackend, Protocol):
    """A linear backend that fuses a prologue or an epilogue into a product. Optional, since API 1.2.

    Such a backend lists in its caps, as ``ops``, the :data:`FUSABLE_OPS` that its products can fuse, alone and
    together. The core requests them only where the plan gives the operation to the same distribution, so that nothing
    runs that was not chosen, and never for a norm after an all-reduce.
    """

    def fused_rows(self, weights: Any, norm: bool, act: bool) -> int:
        """Up to how many rows (M) these prepared weights should be multiplied by :meth:`forward_fused`; 0 = never.

        ``norm``: with an add and norm as prologue; ``act``: with silu-and-mul as epilogue. The answer is about speed
        alone. The core calls it before the first step; for a weight that silu-and-mul follows, never with ``norm``
        alone.
        """
        ...

    def forward_fused(
        self, x: torch.Tensor, weights: Any, bias: torch.Tensor | None, norm: AddNorm | None, act: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """x (M, K), last dimension contiguous -> (y, total). At least one of ``norm`` and ``act`` is set.

        y: new, (M, N), or where ``act`` (M, N/2) = silu of its first half times its second. total: ``x + residual`` in
        x's dtype, new (M, K), None without ``norm``. x is never changed. Right for every weight and any M from 1 on;
        the core calls it for at most :meth:`fused_rows` rows.
        """
        ...
