"""What a user can type so that a rejected backend fits. Each piece of advice is tried before it is given."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Final, NamedTuple

from minisgl_core.installation import Environment
from minisgl_core.plan import STORING_OP, PlanEntry
from minisgl_core.plugin_api import MultipleOf, OneOf

from .matching import fits
from .query import ANY_KEY, Joint, PlanQuery, requirement_of, short_windows
from .records import Candidate, Registry
from .selection import AUTO
from .solve import Solution, Verdict, joint_domain, solve

__all__ = ["Adviser"]

_DTYPES: Final = ("bfloat16", "float16", "float32")
_REQUIRES: Final = "requires"
_NAMED: Final = frozenset(("clash", "stand_in", "lossy", "template"))
"""Codes of reasons that naming the backend removes."""


class _Change(NamedTuple):
    """Settings changed. ``aspect`` keeps two values of one setting from being combined."""

    aspect: str
    text: str
    query: Mapping[str, Any]


@dataclass(frozen=True)
class Adviser:
    """Answers for one query that has been solved."""

    solution: Solution
    registry: Registry
    environment: Environment | None
    _solutions: dict[tuple[str, ...], Solution] = field(default_factory=dict, repr=False)

    @property
    def query(self) -> PlanQuery:
        """The query that the solution is about."""
        return self.solution.query

    def would_allow(self, entry: PlanEntry, verdict: Verdict, *, admitted: bool = True) -> tuple[str, ...]:
        """The smallest changes (one setting, else two) under which a rejected candidate fits, each with what must be
        installed or named in any case. ``admitted``: may it be chosen without being named?
        """
        codes = {reason.code for reason in verdict.reasons}
        refused = self.solution.struck.get(verdict.candidate.key)
        unmet = [reason for reason in verdict.reasons if reason.code == _REQUIRES or reason == refused]
        if not codes or not all(reason.fix for reason in unmet):
            return ()
        first = [_Change("install", reason.fix, {}) for reason in unmet]
        if codes & _NAMED or not admitted:
            first.append(self._naming(entry, verdict.candidate))
        if "writer" in codes:
            first.append(self._naming(PlanEntry("ops", op=STORING_OP), verdict.candidate))
        changes = list(self._changes(verdict.candidate, entry))
        for size in range(0 if first else 1, 3):
            groups = (group for group in itertools.combinations(changes, size) if _of_different_settings(group))
            found = [some for group in groups if self._works(entry, verdict.candidate, some := [*first, *group])]
            if found:
                return tuple(" and ".join(change.text for change in some) for some in found)
        return ()

    def _naming(self, entry: PlanEntry, candidate: Candidate) -> _Change:
        value: Any
        name = candidate.typed_name
        if not candidate.qualified and any(
            other.distribution != candidate.distribution and other.spec.name == candidate.spec.name
            for other in self.registry.candidates(entry.role)
            if not other.qualified
        ):
            name = f"{name}@{candidate.distribution}"
        whole = self.query.backends.get(entry.role, AUTO)
        if entry.op != STORING_OP and not isinstance(whole, Mapping):
            text, value = f"backends.{entry.role}={name}", name
        else:
            part = entry.part or ANY_KEY
            table = {**(whole if isinstance(whole, Mapping) else {ANY_KEY: whole}), part: name}
            text, value = f"backends.{entry.label}={name}", table
        return _Change("name", text, {"backends": {**self.query.backends, entry.role: value}})

    def _changes(self, candidate: Candidate, entry: PlanEntry) -> Iterator[_Change]:
        """Every single change of a setting that a user can make and that this entry could notice."""
        query, joint = self.query, self.solution.joint
        for size in dict.fromkeys(size for caps in candidate.spec.caps for size in _some_pages(caps.page_sizes)):
            if size != joint.page_size:
                yield _Change("page", f"page_size={size}", {"page_size": size})
        for dtype in _DTYPES:
            if dtype != query.dtype:
                yield _Change("dtype", f"dtype={dtype}", {"dtype": dtype, "kv_dtype": AUTO})
        if query.graph:
            yield _Change("graph", "cuda_graph_max_bs=0", {"graph": False})
        windows = short_windows(query)
        if windows and entry.role == "attention":
            yield _Change("length", f"max_seq_len_override={min(windows)}", {"max_seq_len": min(windows)})

    def _works(self, entry: PlanEntry, candidate: Candidate, changes: list[_Change]) -> bool:
        """Solve again with these changes: does it fit, and is nothing else in the way that was not before?"""
        query = self.query
        for change in changes:
            query = replace(query, **change.query)
        if not self._could_fit(candidate, entry, query):
            return False
        solution = self._solve(query, candidate, changes)
        if solution.conflict and (entry in solution.conflict or set(solution.conflict) - self._unservable):
            return False
        own = next(one for one in solution.fields if one.entry == entry)
        fitting = solution.verdicts(own)
        return any(verdict.candidate.key == candidate.key and not verdict.reasons for verdict in fitting)

    def _solve(self, query: PlanQuery, candidate: Candidate, changes: list[_Change]) -> Solution:
        """Several candidates share a change that installs nothing, so its solution is kept."""
        struck = dict(self.solution.struck)
        if any(change.aspect == "install" for change in changes):
            struck.pop(candidate.key, None)
            return solve(query, self.registry.without_requirements(candidate), self.environment, struck)
        key = tuple(change.text for change in changes)
        if key not in self._solutions:
            self._solutions[key] = solve(query, self.registry, self.environment, struck)
        return self._solutions[key]

    def _could_fit(self, candidate: Candidate, entry: PlanEntry, query: PlanQuery) -> bool:
        """A quick look before the whole solve."""
        page = 0 if query.page_size == AUTO else int(query.page_size)
        joint = Joint(page, self.solution.joint.kv_layout, query.graph and self.solution.joint.graph)
        required = requirement_of(entry, query, joint)
        return fits(candidate.spec, required if page else replace(required, page_size=None))

    @cached_property
    def _unservable(self) -> frozenset[PlanEntry]:
        """The entries that have no backend at any joint values: advice about another entry cannot change that."""
        fields = self.solution.fields
        domain = joint_domain(self.query, fields) if self.solution.conflict else []
        return frozenset(one.entry for one in fields if domain and all(one.first_fit(j) is None for j in domain))


def _of_different_settings(group: tuple[_Change, ...]) -> bool:
    return len({change.aspect for change in group}) == len(group)


def _some_pages(supported: object) -> tuple[int, ...]:
    if isinstance(supported, MultipleOf):
        return (supported.base,)
    return supported.values if isinstance(supported, OneOf) else ()
