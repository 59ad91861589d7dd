"""The joint solve: one backend per entry, all of them agreeing on page size, KV layout and graph level.

A pure function of query, candidates and environment. Once the joint values are fixed the entries do not depend on each
other, so each assignment of the joint values has one best solution; the best of those, compared role by role, wins.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

from minisgl_core.plugin_api import BackendSpec, Caps, MultipleOf, OneOf, Reason

from .matching import fits, match
from .query import STORING_OP, Joint, PlanEntry, PlanQuery, entries_of, need_of
from .ranking import AUTO, Rank, Selection, measured_cost, rank_of, selection_of
from .records import CORE, Candidate, Registry
from .requirements import Environment, check_requirements

__all__ = ["Field", "Ranked", "Solution", "Struck", "Verdict", "fields_of", "joint_domain", "solve", "verdicts_of"]

Struck = Mapping[str, Reason]
"""Candidates refused by their own probe, by :attr:`Candidate.key`."""

_PREFERRED_PAGES: Final = (1, 16, 32, 64, 128, 256)
"""Page size 1 shares prefixes to the token, so it comes first wherever the kernels leave the choice."""
_LARGEST_PAGE: Final = 4096


@dataclass(frozen=True, slots=True)
class Verdict:
    """One candidate in one entry at given joint values: the box that fits, or why none does."""

    candidate: Candidate
    box: Caps | None
    reasons: tuple[Reason, ...]


class Ranked(NamedTuple):
    """A candidate of one entry, its rank, and the reasons that no joint value can remove."""

    candidate: Candidate
    rank: Rank
    static: tuple[Reason, ...]


@dataclass(frozen=True)
class Field:
    """The candidates of one entry, best first."""

    entry: PlanEntry
    selection: Selection
    ranked: tuple[Ranked, ...]
    outside: tuple[Ranked, ...] = ()
    """Candidates that the config's explicit names exclude."""

    def verdicts(self, query: PlanQuery, joint: Joint) -> list[Verdict]:
        """Every admitted candidate judged, best first."""
        return [self._judge(item, self.selection, query, joint) for item in self.ranked]

    def outsiders(self, query: PlanQuery, joint: Joint) -> list[Verdict]:
        """The candidates that the config's names exclude, judged as if they were named."""
        return [self._judge(item, _named(item.candidate), query, joint) for item in self.outside]

    def first_fit(self, query: PlanQuery, joint: Joint) -> int | None:
        """The place of the best candidate that fits, among :meth:`verdicts`."""
        need = need_of(self.entry, query, joint)
        exact = replace(need, exact=True)
        for place, (candidate, _, static) in enumerate(self.ranked):
            named = self.selection.names_it(candidate)
            if static or self._bypasses(candidate, joint) or self._is_not_writer(candidate, joint):
                continue
            if fits(candidate.spec, need if named else exact):
                return place
        return None

    def _judge(self, item: Ranked, selection: Selection, query: PlanQuery, joint: Joint) -> Verdict:
        candidate, _, static = item
        need = need_of(self.entry, query, joint)
        box, reasons = match(candidate.spec, replace(need, exact=not selection.names_it(candidate)))
        if self._bypasses(candidate, joint):
            wanted, found = f"one that stores through {joint.writer}'s kv backend", "it writes the pool itself"
            static = (*static, Reason("writer", "kv", wanted, found))
        return Verdict(candidate, None if static else box, (*static, *reasons))

    def _bypasses(self, candidate: Candidate, joint: Joint) -> bool:
        """Would it write the pool although config names a kv backend of another distribution for that?"""
        return bool(self.entry.op == STORING_OP and joint.writer and candidate.distribution not in (joint.writer, CORE))

    def _is_not_writer(self, candidate: Candidate, joint: Joint) -> bool:
        """Is it a kv backend other than the one that these joint values are about?"""
        if self.entry.role != "kv" or joint.writer is None:
            return False
        return joint.writer != (candidate.distribution if self.selection.names_it(candidate) else "")


def _named(candidate: Candidate) -> Selection:
    return Selection((f"{candidate.spec.name}@{candidate.distribution}",))


@dataclass(frozen=True)
class Solution:
    """What the solve found: a verdict per entry, or the entries that cannot be served together."""

    joint: Joint
    chosen: Mapping[PlanEntry, Verdict]
    fields: tuple[Field, ...]
    conflict: tuple[PlanEntry, ...] = ()
    struck: Struck = field(default_factory=dict)

    def by_batch(self, query: PlanQuery) -> dict[PlanEntry, list[tuple[int | None, Verdict]]]:
        """The chosen backend of every entry as (largest number of rows, verdict), the last without one.

        Several only where the config leaves the choice open and another backend that fits was measured to be cheaper.
        """
        fields = {field.entry: field for field in self.fields}
        return {entry: self._by_batch(fields[entry], taken, query) for entry, taken in self.chosen.items()}

    def _by_batch(self, field: Field, taken: Verdict, query: PlanQuery) -> list[tuple[int | None, Verdict]]:
        measured = query.calibration_by_batch.get(field.entry.label, ())
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
    """Find the best solution; ``conflict`` of the result names the smallest set of entries that has none.

    The best one needs the fewest newcomers: installing another distribution changes nothing where none is needed.
    """
    struck = struck or {}
    fields = fields_of(query, registry, environment, struck)
    table = {joint: [field.first_fit(query, joint) for field in fields] for joint in joint_domain(query, fields)}
    solved = {joint: _places(places) for joint, places in table.items() if None not in places}
    if not solved:
        conflict = _smallest_conflict(list(table.values()))
        joint = _nearest_joint(table, conflict)
        return Solution(joint, {}, fields, tuple(fields[index].entry for index in conflict), struck)

    def newcomers(joint: Joint) -> int:
        return sum(field.ranked[place].rank.newcomer for field, place in zip(fields, solved[joint], strict=True))

    # joint_domain lists the preferred values first and min() keeps the first of equals
    best = min(solved, key=lambda joint: (query.graph and not joint.graph, newcomers(joint), solved[joint]))
    places = zip(fields, solved[best], strict=True)
    chosen = {field.entry: field.verdicts(query, best)[place] for field, place in places}
    return Solution(best, chosen, fields, (), struck)


def _places(found: Iterable[int | None]) -> list[int]:
    return [place for place in found if place is not None]


def fields_of(
    query: PlanQuery, registry: Registry, environment: Environment | None, struck: Struck
) -> tuple[Field, ...]:
    """The candidates of every entry, ranked, with their static reasons."""
    static, kv = _StaticReasons(query, environment, struck), selection_of(PlanEntry("kv"), query)
    writers = {item.distribution for item in registry.candidates("kv") if kv.names_it(item)}
    return tuple(
        _field(entry, query, registry.candidates(entry.role), static, writers if entry.op == STORING_OP else ())
        for entry in entries_of(query)
    )


def _field(
    entry: PlanEntry,
    query: PlanQuery,
    candidates: Sequence[Candidate],
    static: _StaticReasons,
    trusted: Collection[str],
) -> Field:
    """One entry's candidates: those that the config admits, and the others."""
    selection = _narrow(entry, query, candidates)
    owners: dict[str, set[str]] = {}
    for item in candidates:
        if not item.qualified:
            owners.setdefault(item.spec.name, set()).add(item.distribution)

    def ranked(item: Candidate, by: Selection) -> Ranked:
        return Ranked(
            item, rank_of(entry, item, by, query, trusted), static.of(item, by, owners.get(item.spec.name, ()))
        )

    admitted = [ranked(item, selection) for item in candidates if selection.place(item) is not None]
    outside = [ranked(item, _named(item)) for item in candidates if selection.place(item) is None]
    return Field(entry, selection, tuple(sorted(admitted, key=lambda item: item.rank)), tuple(outside))


def _narrow(entry: PlanEntry, query: PlanQuery, candidates: Sequence[Candidate]) -> Selection:
    """A backend named for all operations serves those that it offers; the others stay ``auto``. Where config names the
    kv backend too, that one writes the pool, unless the storing operation itself is named.
    """
    selection, value = selection_of(entry, query), query.backends.get("ops")
    if entry.op is None or selection.auto or (isinstance(value, Mapping) and entry.op in value):
        return selection
    offers = any(selection.names_it(item) and any(entry.op in box.ops for box in item.spec.caps) for item in candidates)
    if entry.op == STORING_OP and offers and not selection_of(PlanEntry("kv"), query).auto:
        return Selection((*selection.names, AUTO))
    return selection if offers else Selection()


class _StaticReasons:
    """The reasons that no joint value can remove."""

    def __init__(self, query: PlanQuery, environment: Environment | None, struck: Struck) -> None:
        self._on_cuda = query.device.kind == "cuda"
        self._environment, self._struck = environment, struck
        self._unmet: dict[str, list[Reason]] = {}

    def of(self, candidate: Candidate, selection: Selection, owners: Collection[str]) -> tuple[Reason, ...]:
        """Unmet requirements, a name that two distributions use, a stand-in that is not named, a failed probe."""
        spec, key = candidate.spec, candidate.key
        if key not in self._unmet:
            self._unmet[key] = check_requirements(spec, self._environment)
        reasons = list(self._unmet[key])
        if len(owners) > 1 and not candidate.qualified and not selection.pins_distribution(candidate):
            reasons.append(Reason("clash", "name", "one distribution with this name", ", ".join(sorted(owners))))
        if spec.stand_in and self._on_cuda and not selection.names_it(candidate):
            reasons.append(Reason("stand_in", "stand_in", "a kernel for CUDA", "a stand-in, only if named"))
        if key in self._struck:
            reasons.append(self._struck[key])
        return tuple(reasons)


def verdicts_of(
    entry: PlanEntry, selection: Selection, query: PlanQuery, joint: Joint, registry: Registry, environment: Environment
) -> list[Verdict]:
    """The backends that a selection admits to a plan entry, judged at these joint values; its own names aside."""
    static = _StaticReasons(query, environment, {})
    admitted = [item for item in registry.candidates(entry.role) if selection.place(item) is not None]
    owners = {item.distribution for item in admitted}
    ranked = [
        Ranked(item, rank_of(entry, item, selection, query), static.of(item, selection, owners)) for item in admitted
    ]
    return Field(entry, selection, tuple(ranked)).verdicts(query, joint)


def joint_domain(query: PlanQuery, fields: Sequence[Field]) -> list[Joint]:
    """Every assignment of the joint values, the preferred ones first."""
    specs = [item.candidate.spec for field in fields for item in field.ranked]
    pages = [query.page_size] if query.page_size != "auto" else _page_sizes(specs)
    layouts = _layouts(query, fields)
    runners = next((field for field in fields if field.entry.role == "graph"), None)
    named_runner = runners is not None and bool(runners.selection.names)
    graphs = [True, False] if query.graph and named_runner else [query.graph]
    some = itertools.product(_writers(query, fields), graphs, layouts, pages)
    return [Joint(page, layout, graph, writer) for writer, graph, layout, page in some]


def _writers(query: PlanQuery, fields: Sequence[Field]) -> list[str | None]:
    """The distributions of the kv backends that config names, each of which would have to write the pool. None has to
    where the config also names the operation that stores.
    """
    by_op = query.backends.get("ops")
    if isinstance(by_op, Mapping) and by_op.get(STORING_OP, AUTO) != AUTO:
        return [None]
    found = [
        item.candidate.distribution if field.selection.names_it(item.candidate) else ""
        for field in fields
        if field.entry.role == "kv"
        for item in field.ranked
    ]
    return list(dict.fromkeys(found)) or [None]


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
    first = next((field.ranked[0] for field in fields if field.entry.role == "attention" and field.ranked), None)
    preferred = [layout for box in first.candidate.spec.caps for layout in box.kv_layouts] if first is not None else []
    return list(dict.fromkeys([*(layout for layout in preferred if layout in query.kv_layouts), *query.kv_layouts]))


def _smallest_conflict(tables: Sequence[Sequence[int | None]]) -> tuple[int, ...]:
    """Indices of the fewest entries that no joint value serves together."""
    indices = range(len(tables[0]))
    for size in range(1, len(indices) + 1):
        for group in itertools.combinations(indices, size):
            if not any(all(row[index] is not None for index in group) for row in tables):
                return group
    raise AssertionError("called although a solution exists")


def _nearest_joint(tables: Mapping[Joint, Sequence[int | None]], conflict: Sequence[int]) -> Joint:
    """The joint values at which most of the conflicting entries can be served, for the error message."""
    return max(tables, key=lambda joint: sum(tables[joint][index] is not None for index in conflict))
