"""Which of several fitting backends comes first: config order, incumbents, calibration, tier, name."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from packaging.utils import canonicalize_name

from minisgl_core.errors import ConfigError, nearest
from minisgl_core.plugin_api import OP_NAMES, ROLES

from .query import ANY_KEY, PlanEntry, PlanQuery, weight_shape
from .records import Candidate

__all__ = [
    "AUTO",
    "Rank",
    "Selection",
    "check_backends",
    "measured_cost",
    "rank_of",
    "selection_of",
    "selects",
    "why_preferred",
]

AUTO: Final = "auto"


@dataclass(frozen=True, slots=True)
class Selection:
    """What the config says about one entry: backend names in order of preference; empty means ``auto``."""

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
    if not distribution:
        return not candidate.qualified
    return canonicalize_name(distribution) == canonicalize_name(candidate.distribution)


def selection_of(entry: PlanEntry, query: PlanQuery) -> Selection:
    """The config's word on a plan entry; :func:`check_backends` has accepted the config."""
    value = query.backends.get(entry.role, AUTO)
    if isinstance(value, Mapping):
        part = entry.label.partition(".")[2] or ANY_KEY
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
    names = (candidate.label, *(() if candidate.qualified else (f"{spec.name}/{spec.variant}", spec.name)))
    return next((costs[name] for name in names if name in costs), math.inf)


class Rank(NamedTuple):
    """Sorts the candidates of a plan entry, best first; a field decides where those before it are equal."""

    place: int
    """In the config's list of names"""
    newcomer: bool
    """``auto`` would choose it, but its distribution is not listed, config does not name it, and it was not measured"""
    unseeded: bool
    """It samples, and does not keep a seed for each row"""
    cost: float
    """As ``minisgl calibrate`` measured it; infinity if it did not"""
    tier: int
    name: str
    distribution: str
    order: int
    """In what the plugin returned"""


def rank_of(
    entry: PlanEntry, candidate: Candidate, selection: Selection, query: PlanQuery, trusted: Collection[str] = ()
) -> Rank:
    """The rank of a candidate that the selection admits. Variants of a name that config gives keep their plugin's order
    and nothing else counts. ``trusted``: distributions that count as incumbents in this entry.
    """
    spec, place = candidate.spec, selection.place(candidate) or 0
    if selection.names_it(candidate):
        return Rank(place, False, False, math.inf, 0, "", "", candidate.index)
    cost = measured_cost((query.calibration or {}).get(entry.label, {}), candidate)
    named = candidate.distribution in trusted or canonicalize_name(candidate.distribution) in map(
        canonicalize_name, query.allow or ()
    )
    unseeded = entry.op == "sample" and not any(box.per_row_seed for box in spec.caps)
    newcomer = not (candidate.incumbent or named or cost < math.inf)
    return Rank(place, newcomer, unseeded, cost, spec.tier, spec.name, candidate.distribution, candidate.index)


def why_preferred(winner: Candidate, best: Rank, loser: Candidate, rank: Rank) -> str:
    """Why a candidate that fits lost to the one that was chosen: ``X is preferred because ...``."""
    other = loser.label
    why = {
        "place": "config lists it first",
        "newcomer": f"auto takes a backend of {loser.distribution} only where nothing else fits, "
        "unless config names it or `minisgl calibrate` measures it",
        "unseeded": f"it keeps a seed for each row, and {other} does not",
        "cost": f"it was measured here, and {other} was not"
        if rank.cost == math.inf
        else f"it was measured to be faster here ({best.cost:.3g} against {rank.cost:.3g}, 1 = the fastest)",
        "tier": f"its tier is {best.tier}, that of {other} is {rank.tier}, and the lowest comes first",
        "name": "its tier is the same and its name comes first",
        "distribution": "its tier is the same and its distribution comes first",
        "order": "its plugin lists it first",
    }
    deciding = next((field for field, a, b in zip(Rank._fields, best, rank, strict=True) if a != b), "order")
    return f"{winner.label} is preferred because {why[deciding]}"
