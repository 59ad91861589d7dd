"""What capsules (step recordings) of all roles share. Shapes: T tokens of the step, B rows, padded ones included."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

import torch

from minisgl_core.plugin_api import Phase, Role
from minisgl_core.testing.device_fixture import dtype_named

from .difference import Difference, Place, row_of, worst
from .file import write_file

__all__ = ["Capsule", "Geometry", "RecordedLayer"]

C = TypeVar("C", bound="Capsule")


@dataclass(frozen=True, slots=True)
class Geometry:
    """The facts of the role's Setup, as plain data."""

    dtype: str


@dataclass(frozen=True, slots=True)
class RecordedLayer(ABC):
    """One layer's call. All tensors are on the host."""

    layer_id: int
    out: torch.Tensor
    """(T, ...): the result of the backend that served; NaN if it raised"""

    TENSORS: ClassVar[tuple[str, ...]]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(getattr(self, name).nbytes for name in self.TENSORS)

    @abstractmethod
    def metadata(self) -> dict[str, Any]:
        """Everything that is no tensor, as JSON data."""

    @classmethod
    @abstractmethod
    def of(cls, metadata: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> Self:
        """The inverse of :meth:`metadata`, with the tensors by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capsule(ABC):
    """One step of one role: enough to run it again without the model."""

    step: int
    phase: Phase
    geometry: Geometry
    q_lens: tuple[int, ...]
    """(B,) new tokens of each row"""
    uids: tuple[int, ...]
    """Request ids, one for each real row; the rows after them are padding"""
    layers: tuple[RecordedLayer, ...]
    origin: Mapping[str, Any] = field(default_factory=dict)
    """Where it comes from: backend, versions, device, plan, and why it was written."""

    ROLE: ClassVar[Role]
    GEOMETRY: ClassVar[type[Geometry]]
    LAYER: ClassVar[type[RecordedLayer]]
    FACTS: ClassVar[tuple[str, ...]] = ("step", "phase", "q_lens", "uids")
    """Fields that are JSON data by themselves"""
    TENSORS: ClassVar[tuple[str, ...]] = ()
    """Fields that are tensors"""

    # Results.

    @abstractmethod
    def expected(self, place: int) -> torch.Tensor:
        """float64 result of one layer, by place, for its real tokens, which come before padding."""

    @abstractmethod
    def slack(self, place: int, tolerance: float) -> torch.Tensor:
        """Absolute errors that a stated ``tolerance`` (as in ``Caps``) explains, by element of :meth:`expected`."""

    @abstractmethod
    def locate(self, place: int, found: Difference) -> Place:
        """Where a difference in the result of one layer is."""

    @classmethod
    @abstractmethod
    def tolerance(cls, dtype: torch.dtype) -> float:
        """The conformance kit's tolerance of this role for results of this dtype."""

    @classmethod
    def usual_size(cls, result: torch.Tensor, dtype: torch.dtype) -> float | torch.Tensor:
        """What errors of a result (in this dtype or in float64) are relative to, in addition to the value."""
        del result, dtype
        return 1.0

    def scale(self, place: int, want: torch.Tensor) -> float | torch.Tensor:
        """:meth:`usual_size` for a layer, by place; ``want``: the reference's result."""
        del place
        return self.usual_size(want, dtype_named(self.geometry.dtype))

    def before_cuts(self: C) -> C:
        """The capsule with everything fixed that decides how results are judged and that a cut must not change."""
        return self

    def errors(self, place: int, results: Sequence[torch.Tensor]) -> tuple[float, ...]:
        """Worst error of each host tensor (T, ...) as a result of one layer, against the float64 reference."""
        want = self.expected(place)
        scale = self.scale(place, want)
        return tuple(worst(result[: len(want)], want, scale).error for result in results)

    def row_of(self, token: int) -> tuple[int, int]:
        """(row, place among its new tokens) of a token of the step"""
        return row_of(token, self.q_lens)

    # Size.

    @property
    def real_tokens(self) -> int:
        """Number of tokens in real rows; they come before padding."""
        return sum(self.q_lens[: len(self.uids)])

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors().values())

    @abstractmethod
    def content(self) -> str:
        """A short description of the contents, without the layers."""

    def summary(self) -> str:
        """Such as ``step 12, prefill, 2 rows of 5, 17 tokens (22 new), 4 layers, 1.2 MB``."""
        layers = len(self.layers)
        plural = "s" * (layers != 1)
        return f"step {self.step}, {self.phase}, {self.content()}, {layers} layer{plural}, {self.nbytes / 1e6:.3g} MB"

    # Variants.

    def with_origin(self: C, **facts: Any) -> C:
        """The capsule with more facts in its origin."""
        return replace(self, origin={**self.origin, **facts})

    def with_layers(self: C, places: Sequence[int]) -> C:
        """Only these of its layers, by place."""
        return replace(self, layers=tuple(self.layers[place] for place in places))

    # The file.

    def tensors(self) -> dict[str, torch.Tensor]:
        """All tensors by their names in the file."""
        found = {name: getattr(self, name) for name in self.TENSORS}
        for place, layer in enumerate(self.layers):
            found |= {f"{name}.{place}": getattr(layer, name) for name in layer.TENSORS}
        return found

    def save(self, path: Path) -> None:
        """Write the file completely or not at all. Raises :class:`UsageError` if the folder cannot be written."""
        header = {
            "role": self.ROLE,
            **{name: getattr(self, name) for name in self.FACTS},
            "geometry": asdict(self.geometry),
            "layers": [layer.metadata() for layer in self.layers],
            "origin": dict(self.origin),
        }
        write_file(path, header, self.tensors())

    @classmethod
    def of(cls, header: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> Self:
        """Make a capsule from the parts of a file. Raises ``KeyError`` or ``TypeError`` if something is missing."""
        facts = {name: header[name] for name in cls.FACTS}
        fields: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in facts.items()
        }
        fields |= {name: tensors[name] for name in cls.TENSORS}
        layers = [
            cls.LAYER.of(metadata, {name: tensors[f"{name}.{place}"] for name in cls.LAYER.TENSORS})
            for place, metadata in enumerate(header["layers"])
        ]
        return cls(
            geometry=cls.GEOMETRY(**header["geometry"]),
            layers=tuple(layers),
            origin=header["origin"],
            **fields,
        )
