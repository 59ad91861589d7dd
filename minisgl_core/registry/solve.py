"""The joint solve: one backend per slot, all of them agreeing on page size, KV layout and graph level.

A pure function of query, candidates and environment. Once the joint values are fixed the slots do not depend on each
other, so each assignment of the joint values has one best solution; the best of those, compared role by role, wins.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from minisgl_core.plugin_api import BackendSpec, Caps, MultipleOf, OneOf, Reason

from .matching import fits, match
from .query import Joint, PlanQuery, Slot, need_of, slots_of
from .ranking import Selection, measured_cost, rank_key, selection_of
from .records import Candidate, Registry
from .requirements import Environment, check_requirements

__all__ = ["Field", "Solution", "Struck", "Verdict", "fields_of", "joint_domain", "solve", "verdicts_of"]

Struck = Mapping[str, Reason]
"""Candidates refused by their own probe, by :attr:`Candidate.key`."""

_PREFERRED_PAGES: Final = (1, 16, 32, 64, 128, 256)
"""Page size 1 shares prefixes to the token, so it comes first wherever the kernels leave the choice."""
_LARGEST_PAGE: Final = 4096


@dataclass(frozen=True, slots=True)
class Verdict:
    """One candidate in one slot at given joint values: the box that fits, or why none does."""

    candidate: Candidate
    box: Caps | None
    reasons: tuple[Reason, ...]


@dataclass(frozen=True)
class Field:
    """The candidates of one slot, best first, with the reasons that hold whatever the joint values are."""

    slot: Slot
    selection: Selection
    ranked: tuple[tuple[Candidate, tuple[Reason, ...]], ...]
    outside: tuple[tuple[Candidate, tuple[Reason, ...]], ...] = ()
    """Candidates that the config's explicit names exclude."""

    def verdicts(self, query: PlanQuery, joint: Joint) -> list[Verdict]:
        """Every admitted candidate judged, best first."""
        return self._judge(self.ranked, query, joint)

    def first_fit(self, query: PlanQuery, joint: Joint) -> int | None:
        """The place of the best candidate that fits, among :meth:`verdicts`."""
        need = need_of(self.slot, query, joint)
        fitting = (
            place for place, (item, standing) in enumerate(self.ranked) if not standing and fits(item.spec, need)
        )
        return next(fitting, None)

    def outsiders(self, query: PlanQuery, joint: Joint) -> list[Verdict]:
        """The candidates that the config's names exclude, judged as if they were admitted."""
        return self._judge(self.outside, query, joint)

    def _judge(
        self, candidates: Iterable[tuple[Candidate, tuple[Reason, ...]]], query: PlanQuery, joint: Joint
    ) -> list[Verdict]:
        need = need_of(self.slot, query, joint)
        judged = []
        for candidate, standing in candidates:
            box, reasons = match(candidate.spec, need)
            judged.append(Verdict(candidate, None if standing else box, (*standing, *reasons)))
        return judged


@dataclass(frozen=True)
class Solution:
    """What the solve found: a verdict per slot, or the slots that cannot be served together."""

    joint: Joint
    chosen: Mapping[Slot, Verdict]
    fields: tuple[Field, ...]
    conflict: tuple[Slot, ...] = ()

    def by_batch(self, query: PlanQuery) -> dict[Slot, list[tuple[int | None, Verdict]]]:
        """The chosen backend of every slot as (largest number of rows, verdict), the last without one.

        Several only where the config leaves the choice open and another backend that fits was measured to be cheaper.
        """
        fields = {field.slot: field for field in self.fields}
        return {slot: self._by_batch(fields[slot], taken, query) for slot, taken in self.chosen.items()}

    def _by_batch(self, field: Field, taken: Verdict, query: PlanQuery) -> list[tuple[int | None, Verdict]]:
        measured = query.calibration_by_batch.get(field.slot.label, ())
        if not measured or field.selection.names_it(taken.candidate):
            return [(None, taken)]
        place = field.selection.place(taken.candidate)
        fitting = [
            verdict
            for verdict in field.verdicts(query, self.joint)
            if verdict.box is not None
            and field.selection.place(verdict.candidate) == place
            and not field.selection.names_it(verdict.candidate)
        ]
        found: list[tuple[int | None, Verdict]] = []
        for largest, costs in measured:
            cheapest = min(fitting, key=lambda verdict: measured_cost(costs, verdict.candidate))
            best = cheapest if measured_cost(costs, cheapest.candidate) < math.inf else taken
            if found and found[-1][1].candidate.key == best.candidate.key:
                found.pop()
            found.append((largest, best))
        return [*found[:-1], (None, found[-1][1])]


def solve(
    query: PlanQuery, registry: Registry, environment: Environment | None, struck: Struck | None = None
) -> Solution:
    """Find the best solution; ``conflict`` of the result names the smallest set of slots that has none."""
    fields = fields_of(query, registry, environment, struck or {})
    table = {joint: [field.first_fit(query, joint) for field in fields] for joint in joint_domain(query, fields)}
    solved = {joint: places for joint, places in table.items() if None not in places}
    if not solved:
        conflict = _smallest_conflict(list(table.values()))
        joint = _nearest_joint(table, conflict)
        return Solution(joint, {}, fields, tuple(fields[index].slot for index in conflict))
    # joint_domain lists the preferred values first and min() keeps the first of equals
    best = min(solved, key=lambda joint: (query.graph and not joint.graph, solved[joint]))
    chosen = {
        field.slot: field.verdicts(query, best)[place]
        for field, place in zip(fields, solved[best], strict=True)
        if place is not None
    }
    return Solution(best, chosen, fields)


def fields_of(
    query: PlanQuery, registry: Registry, environment: Environment | None, struck: Struck
) -> tuple[Field, ...]:
    """The candidates of every slot, ranked, with their standing reasons."""
    facts = _Standing(query, environment, struck)
    return tuple(_field(slot, registry.candidates(slot.role), facts) for slot in slots_of(query))


def _field(slot: Slot, candidates: Sequence[Candidate], facts: _Standing) -> Field:
    selection = _narrow(slot, facts.query, candidates)
    admitted = [item for item in candidates if selection.place(item) is not None]
    admitted.sort(key=lambda item: rank_key(slot, item, selection, facts.query))
    outside = [item for item in candidates if selection.place(item) is None]
    owners: dict[str, set[str]] = {}
    for item in candidates:
        owners.setdefault(item.spec.name, set()).add(item.distribution)

    def judged(items: Iterable[Candidate], by: Selection) -> tuple[tuple[Candidate, tuple[Reason, ...]], ...]:
        return tuple((item, facts.reasons(item, by, owners[item.spec.name])) for item in items)

    return Field(slot, selection, judged(admitted, selection), judged(outside, Selection()))


def _narrow(slot: Slot, query: PlanQuery, candidates: Sequence[Candidate]) -> Selection:
    """A backend named for all operations serves those that it offers; the others stay ``auto``."""
    selection, value = selection_of(slot, query), query.backends.get("ops")
    if slot.op is None or selection.auto or (isinstance(value, Mapping) and slot.op in value):
        return selection
    offers = any(selection.names_it(item) and any(slot.op in box.ops for box in item.spec.caps) for item in candidates)
    return selection if offers else Selection()


class _Standing:
    """The reasons that no joint value can remove."""

    def __init__(self, query: PlanQuery, environment: Environment | None, struck: Struck) -> None:
        self.query = query
        self._environment = environment
        self._struck = struck
        self._unmet: dict[str, list[Reason]] = {}

    def reasons(self, candidate: Candidate, selection: Selection, owners: Collection[str]) -> tuple[Reason, ...]:
        """Unmet requirements, a name that two distributions use, a stand-in nobody named, a failed probe."""
        spec, key = candidate.spec, candidate.key
        if key not in self._unmet:
            self._unmet[key] = check_requirements(spec, self._environment)
        reasons = list(self._unmet[key])
        if len(owners) > 1 and not selection.pins_distribution(candidate):
            fix = f"backends.{spec.role}={spec.name}@{candidate.distribution}"
            reasons.append(Reason("clash", "name", "one distribution with this name", ", ".join(sorted(owners)), fix))
        if spec.stand_in and self.query.device.kind == "cuda" and not selection.names_it(candidate):
            fix = f"backends.{spec.role}={spec.name}"
            reasons.append(Reason("stand_in", "stand_in", "a kernel for CUDA", "a stand-in, only if named", fix))
        if key in self._struck:
            reasons.append(self._struck[key])
        return tuple(reasons)


def verdicts_of(
    slot: Slot, selection: Selection, query: PlanQuery, joint: Joint, registry: Registry, environment: Environment
) -> list[Verdict]:
    """The backends that a selection admits to a slot, judged at these joint values; its own names aside."""
    admitted = [item for item in registry.candidates(slot.role) if selection.place(item) is not None]
    owners = {item.distribution for item in admitted}
    standing = _Standing(query, environment, {})
    ranked = tuple((item, standing.reasons(item, selection, owners)) for item in admitted)
    return Field(slot, selection, ranked).verdicts(query, joint)


def joint_domain(query: PlanQuery, fields: Sequence[Field]) -> list[Joint]:
    """Every assignment of the joint values, the preferred ones first."""
    specs = [candidate.spec for field in fields for candidate, _ in field.ranked]
    pages = [query.page_size] if query.page_size != "auto" else _page_sizes(specs)
    layouts = _layouts(query, fields)
    runners = next((field for field in fields if field.slot.role == "graph"), None)
    named_runner = runners is not None and bool(runners.selection.names)
    graphs = [True, False] if query.graph and named_runner else [query.graph]
    return [Joint(page, layout, graph) for graph in graphs for layout in layouts for page in pages]


def _page_sizes(specs: Sequence[BackendSpec]) -> list[int]:
    """The preferred sizes, then every common multiple of sizes that some box lists."""
    wanted: set[int] = set()
    for spec in specs:
        for box in spec.caps:
            if isinstance(box.page_sizes, MultipleOf):
                wanted.add(box.page_sizes.base)
            elif isinstance(box.page_sizes, OneOf):
                wanted.update(value for value in box.page_sizes.values if value > 0)
    shared = {1}
    for size in wanted:
        shared |= {multiple for other in shared if (multiple := math.lcm(size, other)) <= _LARGEST_PAGE}
    return list(dict.fromkeys((*_PREFERRED_PAGES, *sorted(shared))))


def _layouts(query: PlanQuery, fields: Sequence[Field]) -> list[str]:
    """The pool layouts that the engine can allocate, in the order of the best-ranked attention backend's preference."""
    first = next((field.ranked[0][0].spec for field in fields if field.slot.role == "attention" and field.ranked), None)
    preferred = [layout for box in first.caps for layout in box.kv_layouts] if first is not None else []
    return list(dict.fromkeys([*(layout for layout in preferred if layout in query.kv_layouts), *query.kv_layouts]))


def _smallest_conflict(tables: Sequence[Sequence[int | None]]) -> tuple[int, ...]:
    """Indices of the fewest slots that no joint value serves together."""
    indices = range(len(tables[0]))
    for size in range(1, len(indices) + 1):
        for group in itertools.combinations(indices, size):
            if not any(all(row[index] is not None for index in group) for row in tables):
                return group
    raise AssertionError("called although a solution exists")


def _nearest_joint(tables: Mapping[Joint, Sequence[int | None]], conflict: Sequence[int]) -> Joint:
    """The joint values at which most of the conflicting slots can be served, for the error message."""
    return max(tables, key=lambda joint: sum(tables[joint][index] is not None for index in conflict))
