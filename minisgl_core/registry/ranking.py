"""Which of several fitting backends comes first: config order, incumbents, calibration, tier, name."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import NamedTuple

from packaging.utils import canonicalize_name

from minisgl_core.plan import PlanEntry

from .query import PlanQuery
from .records import Candidate
from .selection import Selection

__all__ = ["Rank", "measured_cost", "rank_of", "why_preferred"]


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
    and nothing else counts. ``trusted``: distributions that count as incumbents for this entry.
    """
    spec, place = candidate.spec, selection.place(candidate) or 0
    if selection.names_it(candidate):
        return Rank(place, False, False, math.inf, 0, "", "", candidate.index)
    cost = measured_cost((query.calibration or {}).get(entry.label, {}), candidate)
    named = candidate.distribution in trusted or canonicalize_name(candidate.distribution) in map(
        canonicalize_name, query.allow or ()
    )
    unseeded = entry.op == "sample" and not any(caps.per_row_seed for caps in spec.caps)
    newcomer = not (candidate.incumbent or named or cost < math.inf)
    return Rank(place, newcomer, unseeded, cost, spec.tier, spec.name, candidate.distribution, candidate.index)


def measured_cost(costs: Mapping[str, float], candidate: Candidate) -> float:
    """A candidate's cost by its label, ``name/variant`` or name; infinity if it was not measured."""
    spec = candidate.spec
    names = (candidate.label, *(() if candidate.qualified else (f"{spec.name}/{spec.variant}", spec.name)))
    return next((costs[name] for name in names if name in costs), math.inf)


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
