"""Layers are plain objects whose attribute names are the checkpoint's names."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import Generic, TypeVar

from minisgl_core.checkpoint import WeightTarget

__all__ = ["Layer", "OpList", "children"]


class Layer:
    """Base of all layers. Sub-layers are found as attributes, in the order in which they were set."""

    def weight_targets(self, prefix: str, names: Collection[str]) -> Iterator[WeightTarget]:
        """Where this rank's weights go. ``prefix``: empty or ending with a dot; ``names``: what the checkpoint has."""
        for name, child in children(self):
            yield from child.weight_targets(f"{prefix}{name}.", names)

    def finish(self) -> None:
        """All weights are in place: hand them to the backends that may repack them."""
        for _, child in children(self):
            child.finish()


L = TypeVar("L", bound=Layer)


class OpList(Layer, Generic[L]):
    """Layers that a checkpoint numbers from 0."""

    def __init__(self, layers: Iterable[L]) -> None:
        self.op_list = list(layers)

    def weight_targets(self, prefix: str, names: Collection[str]) -> Iterator[WeightTarget]:
        for number, layer in enumerate(self.op_list):
            yield from layer.weight_targets(f"{prefix}{number}.", names)

    def finish(self) -> None:
        for layer in self.op_list:
            layer.finish()


def children(layer: Layer) -> Iterator[tuple[str, Layer]]:
    """A layer's direct sub-layers with their attribute names."""
    for name, value in vars(layer).items():
        if isinstance(value, Layer):
            yield name, value
