"""The joint solve: one backend per plan entry, all of them agreeing on page size, KV layout and graph level.

A pure function of query, candidates and environment. Once the joint values are fixed the entries do not depend on each
other, so each assignment of the joint values has one best solution; the best of those, compared role by role, wins.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from minisgl_core.installation import Environment, check_requires
from minisgl_core.plan import STORING_OP, PlanEntry
from minisgl_core.plugin_api import BackendSpec, Caps, MultipleOf, OneOf, Reason

from .matching import fits, match
from .query import Joint, PlanQuery, Requirement, entries_of, requirement_of
from .ranking import Rank, measured_cost, rank_of
from .records import CORE, Candidate, Registry
from .selection import AUTO, Selection, selection_of

__all__ = ["Field", "Solution", "Struck", "Verdict", "fields_of", "joint_domain", "solve"]

Struck = Mapping[str, Reason]
"""Candidates refused by their own probe, by :attr:`Candidate.key`."""

_PREFERRED_PAGES: Final = (1, 16, 32, 64, 128, 256)
"""Page size 1 shares prefixes to the token, so it comes first wherever the kernels leave the choice."""
_LARGEST_PAGE: Final = 4096


@dataclass(frozen=True, slots=True)
class Verdict:
    """One candidate for one plan entry; once joint values are given, the capability set that fits or why none does."""

    candidate: Candidate
    rank: Rank
    named: bool
    """Does the config name it, rather than leave it to ``auto``?"""
    static: tuple[Reason, ...]
    """The reasons that no joint value can remove"""
    caps: Caps | None = None
    reasons: tuple[Reason, ...] = ()


@dataclass(frozen=True)
class Field:
    """The candidates for one plan entry, best first."""

    query: PlanQuery
    entry: PlanEntry
    selection: Selection
    ranked: tuple[Verdict, ...]
    outside: tuple[Verdict, ...] = ()
    """Candidates that the config's explicit names exclude."""

    def verdicts(self, joint: Joint) -> list[Verdict]:
        """Every admitted candidate judged, best first."""
        return [self._judge(item, joint) for item in self.ranked]

    def outsiders(self, joint: Joint) -> list[Verdict]:
        """The candidates that the config's names exclude, judged as if they were named."""
        return [self._judge(item, joint) for item in self.outside]

    def first_fit(self, joint: Joint) -> int | None:
        """The place of the best candidate that fits, among :meth:`verdicts`."""
        required = requirement_of(self.entry, self.query, joint)
        unnamed = self._unnamed(required)
        for place, item in enumerate(self.ranked):
            if item.static or self._bypasses(item.candidate, joint) or self._is_not_writer(item, joint):
                continue
            if fits(item.candidate.spec, required if item.named else unnamed):
                return place
        return None

    def _judge(self, item: Verdict, joint: Joint) -> Verdict:
        required = requirement_of(self.entry, self.query, joint)
        required = required if item.named else self._unnamed(required)
        (caps, reasons), static = match(item.candidate.spec, required), item.static
        if self._bypasses(item.candidate, joint):
            wanted, found = f"one that stores through {joint.writer}'s kv backend", "it writes the pool itself"
            static = (*static, Reason("writer", "kv", wanted, found))
        return replace(item, static=static, caps=None if static else caps, reasons=(*static, *reasons))

    def _unnamed(self, required: Requirement) -> Requirement:
        """What ``auto`` requires in addition."""
        template = self.query.chat_template if self.entry.role == "parser" else None
        return replace(required, exact=True, template=template)

    def _bypasses(self, candidate: Candidate, joint: Joint) -> bool:
        """Would it write the pool although config names a kv backend of another distribution for that?"""
        return bool(self.entry.op == STORING_OP and joint.writer and candidate.distribution not in (joint.writer, CORE))

    def _is_not_writer(self, item: Verdict, joint: Joint) -> bool:
        """Is it a kv backend other than the one that these joint values are about?"""
        if self.entry.role != "kv" or joint.writer is None:
            return False
        return joint.writer != (item.candidate.distribution if item.named else "")


@dataclass(frozen=True)
class Solution:
    """What the solve found: a verdict per plan entry, or the entries that cannot be served together."""

    query: PlanQuery
    joint: Joint
    chosen: Mapping[PlanEntry, Verdict]
    fields: tuple[Field, ...]
    conflict: tuple[PlanEntry, ...] = ()
    struck: Struck = field(default_factory=dict)

    def verdicts(self, field: Field) -> list[Verdict]:
        """Every admitted candidate of a field, judged at the joint values of this solution."""
        return field.verdicts(self.joint)

    def by_batch(self) -> dict[PlanEntry, list[tuple[int | None, Verdict]]]:
        """The chosen backend of every plan entry as (largest number of rows, verdict), the last without a limit.

        Several only where the config leaves the choice open and another backend that fits was measured to be cheaper.
        """
        fields = {field.entry: field for field in self.fields}
        return {entry: self._by_batch(fields[entry], choice) for entry, choice in self.chosen.items()}

    def _by_batch(self, field: Field, choice: Verdict) -> list[tuple[int | None, Verdict]]:
        measured = self.query.calibration_by_batch.get(field.entry.label, ())
        if not measured or choice.named:
            return [(None, choice)]
        left_open = [one for one in self.verdicts(field) if one.rank.place == choice.rank.place and not one.named]
        fitting = [one for one in left_open if one.caps is not None]
        found: list[tuple[int | None, Verdict]] = []
        for largest, costs in measured:
            cheapest = min(fitting, key=lambda verdict: measured_cost(costs, verdict.candidate))
            best = cheapest if measured_cost(costs, cheapest.candidate) < math.inf else choice
            if found and found[-1][1].candidate.key == best.candidate.key:
                found.pop()
            found.append((largest, best))
        return [*found[:-1], (None, found[-1][1])]


def solve(
    query: PlanQuery, registry: Registry, environment: Environment | None, struck: Struck | None = None
) -> Solution:
    """Find the best solution; ``conflict`` of the result names the smallest set of plan entries that has none.

    The best one needs the fewest newcomers: installing another distribution changes nothing where none is needed.
    """
    struck = struck or {}
    fields = fields_of(query, registry, environment, struck)
    table = {joint: [field.first_fit(joint) for field in fields] for joint in joint_domain(query, fields)}
    solved = {joint: _places(places) for joint, places in table.items() if None not in places}
    if not solved:
        conflict = _smallest_conflict(list(table.values()))
        joint = _nearest_joint(table, conflict)
        return Solution(query, joint, {}, fields, tuple(fields[index].entry for index in conflict), struck)

    def newcomers(joint: Joint) -> int:
        return sum(field.ranked[place].rank.newcomer for field, place in zip(fields, solved[joint], strict=True))

    # joint_domain lists the preferred values first and min() keeps the first of equals
    best = min(solved, key=lambda joint: (query.graph and not joint.graph, newcomers(joint), solved[joint]))
    places = zip(fields, solved[best], strict=True)
    chosen = {field.entry: field.verdicts(best)[place] for field, place in places}
    return Solution(query, best, chosen, fields, (), struck)


def _places(found: Iterable[int | None]) -> list[int]:
    return [place for place in found if place is not None]


def fields_of(
    query: PlanQuery, registry: Registry, environment: Environment | None, struck: Struck
) -> tuple[Field, ...]:
    """The candidates for every plan entry, ranked, with their static reasons."""
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
    """The candidates that the config admits to one plan entry, and the others."""
    selection = _narrow(entry, query, candidates)
    owners: dict[str, set[str]] = {}
    for item in candidates:
        if not item.qualified:
            owners.setdefault(item.spec.name, set()).add(item.distribution)

    def ranked(item: Candidate, by: Selection) -> Verdict:
        reasons = static.of(item, by, owners.get(item.spec.name, ()))
        return Verdict(item, rank_of(entry, item, by, query, trusted), by.names_it(item), reasons)

    admitted = [ranked(item, selection) for item in candidates if selection.place(item) is not None]
    others = [item for item in candidates if selection.place(item) is None]
    outside = [ranked(item, Selection((f"{item.spec.name}@{item.distribution}",))) for item in others]
    return Field(query, entry, selection, tuple(sorted(admitted, key=lambda item: item.rank)), tuple(outside))


def _narrow(entry: PlanEntry, query: PlanQuery, candidates: Sequence[Candidate]) -> Selection:
    """A backend named for all operations serves those that it offers; the others stay ``auto``. Where config names the
    kv backend too, that one writes the pool, unless the storing operation itself is named.
    """
    selection, value = selection_of(entry, query), query.backends.get(entry.role)
    if entry.op is None or selection.auto or (isinstance(value, Mapping) and entry.op in value):
        return selection
    offers = any(
        selection.names_it(item) and any(entry.op in caps.ops for caps in item.spec.caps) for item in candidates
    )
    if entry.op == STORING_OP and offers and not selection_of(PlanEntry("kv"), query).auto:
        return Selection((*selection.names, AUTO))
    return selection if offers else Selection()


class _StaticReasons:
    """The reasons that no joint value can remove."""

    def __init__(self, query: PlanQuery, environment: Environment | None, struck: Struck) -> None:
        self._accelerated = not query.device.about.on_host
        self._device = query.device.kind
        self._environment, self._struck = environment, struck
        self._unmet: dict[str, list[Reason]] = {}

    def of(self, candidate: Candidate, selection: Selection, owners: Collection[str]) -> tuple[Reason, ...]:
        """Unmet requirements, a name that two distributions use, a stand-in that is not named, a failed probe."""
        spec, key = candidate.spec, candidate.key
        if key not in self._unmet:
            self._unmet[key] = check_requires(spec, self._environment)
        reasons = list(self._unmet[key])
        if len(owners) > 1 and not candidate.qualified and not selection.pins_distribution(candidate):
            reasons.append(Reason("clash", "name", "one distribution with this name", ", ".join(sorted(owners))))
        if spec.stand_in and self._accelerated and not selection.names_it(candidate):
            wanted = f"a kernel for {self._device.upper()}"
            reasons.append(Reason("stand_in", "stand_in", wanted, "a stand-in, only if named"))
        if key in self._struck:
            reasons.append(self._struck[key])
        return tuple(reasons)


def joint_domain(query: PlanQuery, fields: Sequence[Field]) -> list[Joint]:
    """Every assignment of the joint values, the preferred ones first."""
    specs = [item.candidate.spec for field in fields for item in field.ranked]
    pages = [query.page_size] if query.page_size != AUTO else _page_sizes(specs)
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
    kv = next(field for field in fields if field.entry.role == "kv")
    named = (item.candidate.distribution if kv.selection.names_it(item.candidate) else "" for item in kv.ranked)
    return list(dict.fromkeys(named)) or [None]


def _page_sizes(specs: Sequence[BackendSpec]) -> list[int]:
    """The preferred sizes, then every common multiple of sizes that some capability set lists."""
    wanted: set[int] = set()
    for sizes in (caps.page_sizes for spec in specs for caps in spec.caps):
        if isinstance(sizes, MultipleOf):
            wanted.add(sizes.base)
        elif isinstance(sizes, OneOf):
            wanted.update(value for value in sizes.values if value > 0)
    shared = {1}
    for size in wanted:
        shared |= {multiple for other in shared if (multiple := math.lcm(size, other)) <= _LARGEST_PAGE}
    return list(dict.fromkeys((*_PREFERRED_PAGES, *sorted(shared))))


def _layouts(query: PlanQuery, fields: Sequence[Field]) -> list[str]:
    """The pool layouts that the engine can allocate, in the order of the best-ranked attention backend's preference."""
    first = next((field.ranked[0] for field in fields if field.entry.role == "attention" and field.ranked), None)
    preferred = [layout for caps in first.candidate.spec.caps for layout in caps.kv_layouts] if first else []
    return list(dict.fromkeys([*(layout for layout in preferred if layout in query.kv_layouts), *query.kv_layouts]))


def _smallest_conflict(tables: Sequence[Sequence[int | None]]) -> tuple[int, ...]:
    """Indices of the fewest plan entries that no joint value serves together."""
    indices = range(len(tables[0]))
    for size in range(1, len(indices) + 1):
        for group in itertools.combinations(indices, size):
            if not any(all(row[index] is not None for index in group) for row in tables):
                return group
    raise AssertionError("called although a solution exists")


def _nearest_joint(tables: Mapping[Joint, Sequence[int | None]], conflict: Sequence[int]) -> Joint:
    """The joint values at which most of the conflicting entries can be served, for the error message."""
    return max(tables, key=lambda joint: sum(tables[joint][index] is not None for index in conflict))
