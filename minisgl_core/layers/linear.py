"""The four ways to cut a linear layer over tensor-parallel ranks. Weights are (out, in)."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Any, cast

import torch

from minisgl_core.checkpoint import WeightTarget
from minisgl_core.errors import BackendError, ConfigError
from minisgl_core.plugin_api.linear import AddNorm, fused_ops

from .base import Layer

if TYPE_CHECKING:
    from minisgl_core.core import Context
    from minisgl_core.plugin_api import FusingLinear

    from .norm import RMSNorm

__all__ = [
    "ColumnMergedLinear",
    "GatedLinear",
    "Linear",
    "QKVLinear",
    "ReplicatedLinear",
    "RowLinear",
    "checked_rows",
    "split_evenly",
]

ALL = slice(None)


def split_evenly(what: str, total: int, tp_size: int) -> int:
    """``total / tp_size``; raises :class:`ConfigError` naming the numbers if it is not whole."""
    if total % tp_size:
        raise ConfigError(
            f"{what} {total} cannot be divided over {tp_size} tensor-parallel ranks",
            field="tp_size",
            value=tp_size,
            remedy=f"use a tp_size that divides {total}",
        )
    return total // tp_size


def checked_rows(linear: object, rows: object) -> int:
    """``rows``, which a backend returned from ``fused_rows``. Raises :class:`BackendError` if it is no such number."""
    if isinstance(rows, int) and rows >= 0:
        return rows
    raise BackendError(
        f"fused_rows of {_class_of(linear)} returned {rows!r}",
        field="linear",
        value=rows,
        remedy="return a number of rows; 0 = never",
    )


def _class_of(backend: object) -> str:
    return f"{type(backend).__module__}.{type(backend).__qualname__}"


class Linear(Layer):
    """This rank's part of a linear layer: storage, and the product through the chosen linear backend."""

    _act = False
    """Does silu-and-mul follow?"""

    def __init__(self, ctx: Context, out_features: int, in_features: int, bias: bool = False) -> None:
        self._ctx = ctx
        self._weight: torch.Tensor | None = torch.empty(out_features, in_features, dtype=ctx.dtype, device=ctx.device)
        self.bias = torch.zeros(out_features, dtype=ctx.dtype, device=ctx.device) if bias else None
        self._product = ctx.linear.forward
        self._fused_product: Any = getattr(ctx.linear, "forward_fused", None)
        self._prepared: Any = None
        self._norm: RMSNorm | None = None
        self._prologue_rows = 0

    @property
    def weight(self) -> torch.Tensor:
        """(out, in) of this rank. Raises :class:`BackendError` where the linear backend stores it in another format."""
        if self._weight is None:
            raise BackendError(
                f"{_class_of(self._ctx.linear)} stores this weight in a format of its own, and no plain copy is kept",
                field="weight",
                value=None,
                remedy="call the backend's `dequantized(weights)`, where it has that method: it returns a new tensor",
            )
        return self._weight

    def finish(self) -> None:
        self._prepared = self._ctx.linear.prepare_weights(self.weight)
        self._weight = self._ctx.linear.weight_of(self._prepared)

    def fuse_norm(self, norm: RMSNorm) -> None:
        """Make ``norm``, whose output is this product's input, a fused prologue for as many rows as the linear backend
        prefers. Called once, after :meth:`finish`.
        """
        self._norm, self._prologue_rows = norm, self._fused_rows(norm=True)
        norm.defer(self._prologue_rows)

    def _fused_rows(self, norm: bool) -> int:
        """Up to how many rows the linear backend prefers one kernel; 0 where the plan does not allow that."""
        wanted = fused_ops(norm, self._act)
        if not wanted or not wanted <= self._ctx.fused:
            return 0
        linear = cast("FusingLinear", self._ctx.linear)
        return checked_rows(linear, linear.fused_rows(self._prepared, norm, self._act))

    def _fused(self, x: torch.Tensor, norm: AddNorm | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        fused: tuple[torch.Tensor, torch.Tensor | None] = self._fused_product(
            x, self._prepared, self.bias, norm, self._act
        )
        return fused

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x (T, in) -> new (T, out)."""
        return self._product(x, self._prepared, self.bias)

    def forward_normed(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What ``RMSNorm.forward_add`` returned, (T, in) each -> (new (T, out), residual).

        Where the norm is a fused prologue it was deferred, and is computed here.
        """
        if 0 < x.shape[0] <= self._prologue_rows:
            return self._forward_prologue(x, residual)
        return self.forward(x), residual

    def _forward_prologue(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        assert self._norm is not None
        out, total = self._fused(x, AddNorm(residual, self._norm.weight, self._norm.eps))
        if total is None:
            raise BackendError(
                f"forward_fused of {_class_of(self._ctx.linear)} returned no sum with its product",
                field="linear",
                value=None,
                remedy="return (y, x + residual) where `norm` is given",
            )
        return out, total

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield "weight", self.weight
        if self.bias is not None:
            yield "bias", self.bias


class ReplicatedLinear(Linear):
    """The whole layer on every rank."""

    def weight_targets(self, prefix: str, names: Collection[str]) -> Iterator[WeightTarget]:
        for kind, tensor in self._tensors():
            yield WeightTarget(f"{prefix}{kind}", tuple(tensor.shape), (ALL,) * tensor.dim(), tensor)


class ColumnMergedLinear(Linear):
    """Several layers on the same input, merged into one product; each is cut by output rows.

    ``parts``: the sibling names in the checkpoint, with their full output widths.
    """

    def __init__(self, ctx: Context, in_features: int, parts: dict[str, int], bias: bool = False) -> None:
        self._parts = parts
        self._local = {name: split_evenly(f"`{name}` width", width, ctx.tp.size) for name, width in parts.items()}
        super().__init__(ctx, sum(self._local.values()), in_features, bias)

    def weight_targets(self, prefix: str, names: Collection[str]) -> Iterator[WeightTarget]:
        parent, rank = _parent(prefix), self._ctx.tp.rank
        for kind, tensor in self._tensors():
            start = 0
            for name, width in self._parts.items():
                local = self._local[name]
                index = (slice(rank * local, (rank + 1) * local), *(ALL,) * (tensor.dim() - 1))
                shape = (width, *tensor.shape[1:])
                yield WeightTarget(f"{parent}{name}.{kind}", shape, index, tensor[start : start + local])
                start += local


class GatedLinear(ColumnMergedLinear):
    """gate and up merged, cut by output rows, and silu(gate) * up."""

    _act = True

    def __init__(self, ctx: Context, in_features: int, width: int, bias: bool = False) -> None:
        super().__init__(ctx, in_features, {"gate_proj": width, "up_proj": width}, bias)
        self._act_and_mul = ctx.ops.act_and_mul
        self._epilogue_rows = 0

    def finish(self) -> None:
        super().finish()
        self._epilogue_rows = self._fused_rows(norm=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x (T, in) -> new (T, width of this rank)."""
        if 0 < x.shape[0] <= self._epilogue_rows:
            return self._fused(x, None)[0]
        return self._act_and_mul(self._product(x, self._prepared, self.bias))


class QKVLinear(Linear):
    """q, k and v projections merged, cut by heads; kv heads are replicated where there are fewer than ranks."""

    def __init__(
        self, ctx: Context, hidden_size: int, q_heads: int, kv_heads: int, head_dim: int, bias: bool = False
    ) -> None:
        size = ctx.tp.size
        if q_heads % size or (kv_heads % size and size % kv_heads):
            raise ConfigError(
                f"{q_heads} query heads and {kv_heads} kv heads cannot be divided over {size} tensor-parallel ranks",
                field="tp_size",
                value=size,
                remedy="use a tp_size that divides the query heads, and divides or is a multiple of the kv heads",
            )
        self._full = (q_heads * head_dim, kv_heads * head_dim)
        self.q_heads, self.kv_heads, self.head_dim = q_heads // size, max(1, kv_heads // size), head_dim
        self._kv_rank = ctx.tp.rank * kv_heads // size if kv_heads < size else ctx.tp.rank
        super().__init__(ctx, (self.q_heads + 2 * self.kv_heads) * head_dim, hidden_size, bias)

    def weight_targets(self, prefix: str, names: Collection[str]) -> Iterator[WeightTarget]:
        parent, rank = _parent(prefix), self._ctx.tp.rank
        q, kv = self.q_heads * self.head_dim, self.kv_heads * self.head_dim
        layout = (
            ("q_proj", self._full[0], rank * q, q, 0),
            ("k_proj", self._full[1], self._kv_rank * kv, kv, q),
            ("v_proj", self._full[1], self._kv_rank * kv, kv, q + kv),
        )
        for kind, tensor in self._tensors():
            for name, width, source, rows, target in layout:
                index = (slice(source, source + rows), *(ALL,) * (tensor.dim() - 1))
                shape = (width, *tensor.shape[1:])
                yield WeightTarget(f"{parent}{name}.{kind}", shape, index, tensor[target : target + rows])


class RowLinear(Linear):
    """Cut by input columns. :meth:`partial` leaves the sum over ranks to a later, fused all-reduce."""

    def __init__(self, ctx: Context, out_features: int, in_features: int, bias: bool = False) -> None:
        self._in = in_features
        super().__init__(ctx, out_features, split_evenly("row-parallel input width", in_features, ctx.tp.size), bias)
        # Counted once: the sum over ranks follows.
        self._own_bias = self.bias if ctx.tp.is_primary else None

    def weight_targets(self, prefix: str, names: Collection[str]) -> Iterator[WeightTarget]:
        rank, (rows, local) = self._ctx.tp.rank, self.weight.shape
        index = (ALL, slice(rank * local, (rank + 1) * local))
        yield WeightTarget(f"{prefix}weight", (rows, self._in), index, self.weight)
        if self.bias is not None:
            yield WeightTarget(f"{prefix}bias", (rows,), (ALL,), self.bias)

    def partial(self, x: torch.Tensor) -> torch.Tensor:
        """x (T, in of this rank) -> new (T, out), still to be summed over ranks."""
        return self._product(x, self._prepared, self._own_bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._ctx.comm.all_reduce(self.partial(x))


def _parent(prefix: str) -> str:
    """``a.b.qkv_proj.`` -> ``a.b.``: a merged layer replaces its parts."""
    return prefix[: prefix.rstrip(".").rfind(".") + 1]
