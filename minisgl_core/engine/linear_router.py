"""Routes each product of a linear layer to the backend for its weight and its number of rows."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch

from minisgl_core.layers.linear import checked_rows
from minisgl_core.plugin_api.linear import fused_ops

from .dispatch import NO_LIMIT

if TYPE_CHECKING:
    from minisgl_core.plugin_api import AddNorm, FusingLinear, LinearBackend

__all__ = ["LinearRoute", "LinearRouter"]


@dataclass(frozen=True, slots=True)
class LinearRoute:
    """A linear backend, for inputs of at most ``limit`` rows."""

    backend: LinearBackend
    limit: int = NO_LIMIT
    fused: frozenset[str] = frozenset()
    """Operations that its products fuse"""


class _PreparedLinear(NamedTuple):
    """One weight, prepared for each backend of its routes."""

    limits: tuple[int, ...]
    """Limits of all routes but the last"""
    forwards: tuple[Callable[..., torch.Tensor], ...]
    weights: tuple[Any, ...]
    weight_of: Callable[[Any], torch.Tensor | None]
    fewest: LinearRoute
    """The first route: operations are fused where rows are few"""


class LinearRouter:
    """Linear layers whose backend depends on the (N, K) of their weight and on the rows of their input.

    Backends that keep a weight as it is share it. One that repacks has a copy of its own, so a weight whose routes name
    such a backend and another one takes memory twice.
    """

    def __init__(
        self, default: Sequence[LinearRoute], by_shape: Mapping[tuple[int, int], Sequence[LinearRoute]]
    ) -> None:
        self._default, self._by_shape = tuple(default), {shape: tuple(routes) for shape, routes in by_shape.items()}

    def prepare_weights(self, weight: torch.Tensor) -> _PreparedLinear:
        """(N, K) -> what :meth:`forward` takes."""
        routes = self._by_shape.get((weight.shape[0], weight.shape[1]), self._default)
        prepared = {id(route.backend): route.backend.prepare_weights(weight) for route in routes}
        return _PreparedLinear(
            tuple(route.limit for route in routes[:-1]),
            tuple(route.backend.forward for route in routes),
            tuple(prepared[id(route.backend)] for route in routes),
            routes[-1].backend.weight_of,
            routes[0],
        )

    def weight_of(self, weights: _PreparedLinear) -> torch.Tensor | None:
        """(N, K), as the backend of the largest inputs has it"""
        return weights.weight_of(weights.weights[-1])

    def forward(self, x: torch.Tensor, weights: _PreparedLinear, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x (M, K) -> new (M, N)"""
        at = bisect_left(weights.limits, x.shape[0])
        return weights.forwards[at](x, weights.weights[at], bias)

    def fused_rows(self, weights: _PreparedLinear, norm: bool, act: bool) -> int:
        """Up to how many rows the backend that serves the fewest fuses these operations into its product."""
        if not fused_ops(norm, act) <= weights.fewest.fused:
            return 0
        backend = cast("FusingLinear", weights.fewest.backend)
        return min(checked_rows(backend, backend.fused_rows(weights.weights[0], norm, act)), weights.fewest.limit)

    def forward_fused(
        self, x: torch.Tensor, weights: _PreparedLinear, bias: torch.Tensor | None, norm: AddNorm | None, act: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run that backend: x (M, K) -> (y (M, N) or (M, N/2), total (M, K) or None)."""
        backend = cast("FusingLinear", weights.fewest.backend)
        return backend.forward_fused(x, weights.weights[0], bias, norm, act)

    def close(self) -> None:
        """Free all backends."""
        routes = [route for some in (self._default, *self._by_shape.values()) for route in some]
        for backend in {id(route.backend): route.backend for route in routes}.values():
            backend.close()
