"""From measurements to the costs that plan resolution uses, and to the sizes at which the fastest backend changes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby, pairwise
from typing import Any, Final

from minisgl_core.modelconfig import ModelConfig
from minisgl_core.registry import Plan, PlanQuery, Registry

from .store import Loaded, Point, load

__all__ = ["NOISE", "Rule", "apply", "costs_by_batch", "costs_by_entry", "rules_of"]

NOISE: Final = 0.03
"""A smaller gain is ignored even without noise: the backend that is best overall keeps the bucket."""
_BY_BATCH: Final = ("attention.decode", "attention.prefill")
"""Plan entries, in addition to those of weights, that may use another backend by the number of rows."""

Costs = Mapping[str, float]
"""By backend: its time divided by that of the fastest one"""


def apply(query: PlanQuery, model: ModelConfig, registry: Registry) -> tuple[PlanQuery, Loaded]:
    """The query with the costs that were measured for it, and the measurements."""
    loaded = load(query, model, registry)
    if loaded.calibration is None:
        return query, loaded
    points, noise = loaded.calibration.points, max(NOISE, loaded.calibration.noise)
    by_entry, by_batch = costs_by_entry(points, noise), costs_by_batch(points, noise)
    return replace(query, calibration=by_entry, calibration_by_batch=by_batch), loaded


def costs_by_entry(points: Iterable[Point], noise: float = NOISE) -> dict[str, dict[str, float]]:
    """By plan entry: each backend's mean cost over all sizes. ``linear`` means all weights. What is within
    ``noise`` of the best costs as much as the best, so that the tier decides.
    """
    entries = {
        entry: _mean([_relative(group) for group in _by_rows(some).values()]) for entry, some in _by_entry(points)
    }
    weights = [costs for entry, costs in entries.items() if entry.startswith("linear.")]
    if weights:
        entries["linear"] = _mean(weights)
    return {entry: _without_noise(costs, noise) for entry, costs in entries.items()}


def _without_noise(costs: Costs, noise: float) -> dict[str, float]:
    best = min(costs.values(), default=0.0)
    return {name: best if cost <= best * (1 + noise) else cost for name, cost in costs.items()}


def costs_by_batch(points: Iterable[Point], noise: float = NOISE) -> dict[str, list[tuple[int | None, Costs]]]:
    """By plan entry: (largest number of rows, costs), ascending, the last without one. Between two measured numbers
    of rows the border is their geometric mean.
    """
    found: dict[str, list[tuple[int | None, Costs]]] = {}
    for entry, some in _by_entry(points):
        if entry not in _BY_BATCH and not entry.startswith("linear."):
            continue
        measured = {rows: _relative(group) for rows, group in sorted(_by_rows(some).items())}
        overall = _mean(list(measured.values()))
        limits = [*_borders(list(measured)), None]
        found[entry] = [
            (limit, _steadied(costs, overall, noise)) for limit, costs in zip(limits, measured.values(), strict=True)
        ]
    return found


def _borders(rows: Sequence[int]) -> list[int]:
    return [max(low, math.isqrt(low * high)) for low, high in pairwise(rows)]


def _steadied(costs: Costs, overall: Costs, noise: float) -> dict[str, float]:
    """Prefer the backend that is best overall where the gain of another one is noise."""
    usual = min(overall, key=lambda name: (overall[name], name), default=None)
    if usual is None or costs.get(usual, math.inf) > 1 + noise:
        return dict(costs)
    return {**costs, usual: min(1.0, costs[usual]) * (1 - noise)}


def _relative(points: Sequence[Point]) -> dict[str, float]:
    """Costs at one number of rows: the mean over lengths. A backend without a point at some length has no cost."""
    ratios: dict[str, list[float]] = {}
    lengths = {point.length for point in points}
    for length in lengths:
        here = [point for point in points if point.length == length]
        fastest = min(point.microseconds for point in here)
        for point in here:
            ratios.setdefault(point.backend, []).append(point.microseconds / fastest)
    return {name: sum(own) / len(own) for name, own in ratios.items() if len(own) == len(lengths)}


def _mean(tables: Sequence[Costs]) -> dict[str, float]:
    """Each backend's mean cost over tables, without the backends that some table lacks."""
    names = [name for name in (tables[0] if tables else {}) if all(name in table for table in tables)]
    return {name: sum(table[name] for table in tables) / len(tables) for name in names}


def _by_entry(points: Iterable[Point]) -> list[tuple[str, list[Point]]]:
    return _grouped(points, lambda point: point.entry)


def _by_rows(points: Iterable[Point]) -> dict[int, list[Point]]:
    return dict(_grouped(points, lambda point: point.rows))


def _grouped(points: Iterable[Point], key: Callable[[Point], Any]) -> list[tuple[Any, list[Point]]]:
    return [(value, list(some)) for value, some in groupby(sorted(points, key=key), key)]


@dataclass(frozen=True, slots=True)
class Rule:
    """The backends that a plan uses in one measured entry, by number of rows."""

    entry: str
    backends: tuple[tuple[int | None, str], ...]
    """(largest number of rows, backend), ascending; the last without one"""

    def __str__(self) -> str:
        parts = [f"{name} up to {rows} rows" for rows, name in self.backends[:-1]]
        last = self.backends[-1][1]
        return f"{self.entry}: {', '.join([*parts, f'then {last}' if parts else last])}"

    def to_json(self) -> dict[str, Any]:
        """As plain JSON data."""
        return asdict(self)


def rules_of(plan: Plan, points: Iterable[Point]) -> list[Rule]:
    """The plan's choices in every measured entry that has a choice of its own."""
    found = []
    for entry in sorted({point.entry for point in points}):
        buckets = [bucket for bucket in plan.buckets if bucket.entry.label == entry]
        if buckets:
            own = ((bucket.batch[1] if bucket.batch else None, bucket.choice.label) for bucket in buckets)
            found.append(Rule(entry, tuple(own)))
    return found
