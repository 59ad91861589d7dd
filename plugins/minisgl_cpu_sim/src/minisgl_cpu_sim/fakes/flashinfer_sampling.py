"""Fakes of FlashInfer's sampling: probabilities (B, V) in, tokens or renormalised probabilities out.

By hand: of [0.5, 0.3, 0.1, 0.1] top-k 2 keeps [0.625, 0.375, 0, 0]; top-k 3 keeps both of the tied, and so does top-p
0.85: [0.5, 0.3, 0.1, 0.1].
"""

from __future__ import annotations

from typing import Any

import torch

from minisgl_core.plugin_api import KernelLibrary

from .checks import refuse_unless_default, require

__all__ = ["sampling_from_probs", "top_k_renorm_probs", "top_p_renorm_probs"]

_library = KernelLibrary("minisgl_fakes")


def _draw(probs: torch.Tensor, seed: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
    # As in the real kernel, the seed and offset of the first row are used for all rows.
    random = torch.Generator().manual_seed((int(seed[0]) * 1_000_003 + int(offset[0])) % (1 << 63))
    at = torch.rand(probs.shape[0], 1, generator=random, dtype=torch.float64)
    sums = probs.double().cumsum(-1)
    reached = (sums > at) & (probs > 0)
    last = probs.shape[1] - 1 - (probs > 0).flip(-1).to(torch.int8).argmax(-1)  # the sum may be below 1 due to rounding
    return torch.where(reached.any(-1), reached.to(torch.int8).argmax(-1), last).to(torch.int32)


_draw_op = _library.register("flashinfer_draw(Tensor probs, Tensor seed, Tensor offset) -> Tensor", _draw)


def sampling_from_probs(
    probs: torch.Tensor,
    indices: torch.Tensor | None = None,
    deterministic: bool = True,
    generator: torch.Generator | None = None,
    check_nan: bool = False,
    seed: int | torch.Tensor | None = None,
    offset: int | torch.Tensor | None = None,
    return_valid: bool = False,
) -> Any:
    """One token per row, (B,) int32. ``seed`` and ``offset``: int64 tensors (1,) or (B,), of which the first counts."""
    unused = {"indices": None, "generator": None, "check_nan": False, "return_valid": False}
    refuse_unless_default("sampling_from_probs", unused, locals())
    for name, value in (("seed", seed), ("offset", offset)):
        require(isinstance(value, torch.Tensor), f"{name} must be a tensor: a captured step would freeze a number")
        assert isinstance(value, torch.Tensor)
        fits = value.dtype == torch.int64 and value.dim() == 1 and len(value) in (1, len(probs))
        require(fits, f"{name} must be int64 (1,) or ({len(probs)},), got {value.dtype} {tuple(value.shape)}")
    return _draw_op(probs.float(), seed, offset)


def _per_row(name: str, value: float | torch.Tensor, rows: int) -> torch.Tensor:
    if not isinstance(value, torch.Tensor):
        return torch.full((rows, 1), value)
    require(value.shape == (rows,) and value.is_contiguous(), f"{name} must be contiguous, one per row of {rows}")
    return value[:, None]


def top_k_renorm_probs(probs: torch.Tensor, top_k: torch.Tensor | int) -> torch.Tensor:
    """0 for all below the k-th largest, the rest scaled to a sum of 1."""
    k = _per_row("top_k", top_k, len(probs)).to(torch.int64)
    kth = probs.sort(-1, descending=True).values.gather(-1, k.clamp(1, probs.shape[1]) - 1)
    kept = probs.masked_fill(probs < kth, 0)
    return kept / kept.sum(-1, keepdim=True)


def top_p_renorm_probs(
    probs: torch.Tensor, top_p: torch.Tensor | float, is_deterministic: bool = False
) -> torch.Tensor:
    """0 for all below the largest threshold above which the sum reaches ``top_p``, the rest scaled to a sum of 1."""
    ordered = probs.sort(-1, descending=True).values
    needed = ((ordered.cumsum(-1) - ordered) < _per_row("top_p", top_p, len(probs))).sum(-1, keepdim=True)
    kept = probs.masked_fill(probs < ordered.gather(-1, needed.clamp(min=1) - 1), 0)
    return kept / kept.sum(-1, keepdim=True)
