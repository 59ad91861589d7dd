"""Which of several fitting backends comes first: config order, calibration, the core's table, tier, name."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from packaging.utils import canonicalize_name

from minisgl_core.errors import ConfigError, nearest
from minisgl_core.plugin_api import OP_NAMES, ROLES

from .query import ANY_KEY, PlanQuery, Slot, weight_shape
from .records import Candidate

__all__ = ["AUTO", "Selection", "check_backends", "measured_cost", "rank_key", "selection_of", "selects"]

AUTO: Final = "auto"

_TABLE: Final[Mapping[tuple[str, str], tuple[str, ...]]] = {
    ("attention", "cuda"): ("cuda_decode", "fa", "flashinfer"),
    ("attention", "cpu"): ("cpu", "torch"),
    ("graph", "cuda"): ("eager", "cuda"),
    ("graph", "cpu"): ("eager", "emulated"),
}
"""The core's own order by (role, device). A runner that never captures comes first: it fits only without graphs."""


@dataclass(frozen=True, slots=True)
class Selection:
    """What the config says about one slot: backend names in order of preference; empty means ``auto``."""

    names: tuple[str, ...] = ()

    @property
    def auto(self) -> bool:
        """May a backend be chosen that the config does not name?"""
        return not self.names or AUTO in self.names

    def place(self, candidate: Candidate) -> int | None:
        """Index of the name that means this candidate; None if it may not be chosen."""
        for place, name in enumerate(self.names):
            if name != AUTO and selects(name, candidate):
                return place
        if not self.names:
            return 0
        return self.names.index(AUTO) if AUTO in self.names else None

    def names_it(self, candidate: Candidate) -> bool:
        """Is it named, rather than left to ``auto``?"""
        return any(name != AUTO and selects(name, candidate) for name in self.names)

    def pins_distribution(self, candidate: Candidate) -> bool:
        """Is it named together with its distribution?"""
        return any("@" in name and selects(name, candidate) for name in self.names)


def selects(text: str, candidate: Candidate) -> bool:
    """Does ``name[/variant][@distribution]`` mean this candidate?"""
    rest, _, distribution = text.partition("@")
    name, _, variant = rest.partition("/")
    spec = candidate.spec
    if name != spec.name or (variant and variant != spec.variant):
        return False
    return not distribution or canonicalize_name(distribution) == canonicalize_name(candidate.distribution)


def selection_of(slot: Slot, query: PlanQuery) -> Selection:
    """The config's word on a slot; :func:`check_backends` has accepted the config."""
    value = query.backends.get(slot.role, AUTO)
    if isinstance(value, Mapping):
        part = slot.label.partition(".")[2] or ANY_KEY
        value = value.get(part, value.get(ANY_KEY, AUTO))
    names = (value,) if isinstance(value, str) else tuple(value)
    return Selection(() if names == (AUTO,) else names)


def check_backends(backends: Mapping[str, object]) -> None:
    """Raise :class:`ConfigError` for an unknown role, an unknown key of a role's table, or a value that is no name."""
    for role, value in backends.items():
        _check_key("backends", role, ROLES)
        if isinstance(value, Mapping):
            for key, names in value.items():
                if role == "linear":
                    weight_shape(key)
                else:
                    _check_key(f"backends.{role}", key, _KEYS.get(role, ()))
                _check_names(f"backends.{role}.{key}", names)
        else:
            _check_names(f"backends.{role}", value)


_KEYS: Final[Mapping[str, tuple[str, ...]]] = {
    "attention": ("prefill", "decode", ANY_KEY),
    "ops": (*OP_NAMES, ANY_KEY),
}


def _check_key(table: str, key: str, known: Sequence[str]) -> None:
    if key in known:
        return
    hint = nearest(key, known) or (f"known are {', '.join(known)}" if known else "this role is chosen as a whole")
    raise ConfigError(f"unknown key {key!r} in {table}", field=f"{table}.{key}", value=key, remedy=hint)


def _check_names(setting: str, value: object) -> None:
    names = [value] if isinstance(value, str) else value
    if isinstance(names, Sequence) and names and all(isinstance(name, str) and name for name in names):
        return
    raise ConfigError(
        f"{setting} is {value!r}", field=setting, value=value, remedy="give a backend name, a list of names, or auto"
    )


def measured_cost(costs: Mapping[str, float], candidate: Candidate) -> float:
    """A candidate's cost by its label, ``name/variant`` or name; infinity if it was not measured."""
    spec = candidate.spec
    for name in (candidate.label, f"{spec.name}/{spec.variant}", spec.name):
        if name in costs:
            return costs[name]
    return math.inf


def rank_key(slot: Slot, candidate: Candidate, selection: Selection, query: PlanQuery) -> tuple[object, ...]:
    """Sorts the candidates of a slot, best first. Only for candidates that the selection admits."""
    spec = candidate.spec
    place = selection.place(candidate)
    cost = measured_cost((query.calibration or {}).get(slot.label, {}), candidate)
    if selection.names_it(candidate):
        return place, candidate.index
    table = _TABLE.get((slot.role, query.device.kind), ())
    listed = table.index(spec.name) if spec.name in table else len(table)
    unseeded = slot.op == "sample" and not any(box.per_row_seed for box in spec.caps)
    return place, unseeded, cost, listed, spec.tier, spec.name, candidate.distribution, candidate.index
