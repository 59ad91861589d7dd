"""Why this plan: every candidate of every slot with all its reasons, and what would have to change for it to fit."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal

from minisgl_core.errors import BackendError
from minisgl_core.plugin_api import BackendSpec, MultipleOf, OneOf, Reason

from .matching import match
from .named import remarks
from .plan import Plan
from .query import Joint, PlanQuery, Slot, need_of
from .records import Note, PluginRecord, Registry
from .refusal import SEE_EXPLAIN, refusal
from .requirements import Environment, Installed, check_requirements
from .resolve import check_query, plan_of, settle
from .solve import Solution, Verdict

__all__ = ["CandidateReport", "Explanation", "SlotReport", "explain"]

_DTYPES: Final = ("bfloat16", "float16", "float32")

Status = Literal["chosen", "fits", "rejected", "not named"]


@dataclass(frozen=True, slots=True)
class CandidateReport:
    """One candidate of one slot. ``not named`` means that the config's explicit names exclude it."""

    backend: str
    version: str
    status: Status
    reasons: tuple[Reason, ...]
    would_allow: tuple[str, ...]
    """Each entry alone would make it fit, such as ``page_size=16``."""
    to_install: tuple[str, ...]
    """On a device that is not here: what would have to be installed there, as far as this installation can tell."""

    def to_json(self) -> dict[str, Any]:
        """As plain JSON data."""
        return {
            "backend": self.backend,
            "version": self.version,
            "status": self.status,
            "reasons": [
                {
                    "code": reason.code,
                    "field": reason.field,
                    "wanted": reason.wanted,
                    "supported": reason.supported,
                    "fix": reason.fix,
                }
                for reason in self.reasons
            ],
            "would_allow": list(self.would_allow),
            "to_install": list(self.to_install),
        }


@dataclass(frozen=True, slots=True)
class SlotReport:
    """All candidates of one slot, best first."""

    slot: Slot
    candidates: tuple[CandidateReport, ...]

    def usable(self) -> list[CandidateReport]:
        """Those that the plan has chosen, or could have."""
        return [item for item in self.candidates if item.status in ("chosen", "fits")]

    def to_json(self) -> dict[str, Any]:
        """As plain JSON data."""
        return {"slot": self.slot.label, "candidates": [item.to_json() for item in self.candidates]}


@dataclass(frozen=True, slots=True)
class Explanation:
    """The answer of ``minisgl explain``: a plan or an error, and how it came about."""

    plan: Plan | None
    error: str
    page_size: int
    """The page size that the candidates were judged at."""
    slots: tuple[SlotReport, ...]
    failures: tuple[PluginRecord, ...]
    excluded: Mapping[str, str]
    """Distributions that the config keeps out, each with the list: their backends are no candidates."""
    notes: tuple[Note, ...]
    remarks: tuple[str, ...]
    """What is to be told beside the plan; :func:`~minisgl_core.registry.resolve_plan` warns of it."""

    def to_json(self) -> dict[str, Any]:
        """As plain JSON data."""
        return {
            "plan": None if self.plan is None else self.plan.to_json(),
            "error": self.error or None,
            "page_size": self.page_size,
            "slots": [item.to_json() for item in self.slots],
            "failed_plugins": {item.distribution: item.failure for item in self.failures},
            "excluded_plugins": dict(self.excluded),
            "notes": {item.distribution: item.text for item in self.notes},
            "remarks": list(self.remarks),
        }


def explain(
    query: PlanQuery, registry: Registry, *, environment: Environment | None = None, elsewhere: bool = False
) -> Explanation:
    """Resolve without probing, and account for every candidate.

    ``elsewhere``: the device is not this machine's, so what is not installed here does not count against a backend.
    A query without a solution is an answer, not an error. Raises :class:`~minisgl_core.errors.ConfigError` for a config
    that makes no sense, or that names what this model has no use for, and :class:`~minisgl_core.errors.BackendError`
    for an unknown name.
    """
    registry = registry.restricted(query.allow, query.deny)
    check_query(query, registry)
    here = environment or Installed()
    solution = settle(query, registry, None if elsewhere else here, prober=None)
    error: BackendError | None = refusal(query, solution, registry) if solution.conflict else None
    reporter = _Reporter(query, solution, here if elsewhere else None)
    return Explanation(
        plan=None if error else plan_of(query, solution),
        error="" if error is None else error.message if error.remedy == SEE_EXPLAIN else str(error),
        page_size=solution.joint.page_size,
        slots=tuple(reporter.slots()),
        failures=registry.failures(),
        excluded=registry.excluded(),
        notes=registry.notes,
        remarks=remarks(query, solution),
    )


@dataclass(frozen=True)
class _Reporter:
    query: PlanQuery
    solution: Solution
    here: Environment | None
    """This machine, if the question is about another."""

    def slots(self) -> Iterator[SlotReport]:
        chosen = self.solution.by_batch(self.query)
        for item in self.solution.fields:
            taken = {verdict.candidate.key for _, verdict in chosen.get(item.slot, ())}
            reports = [
                self._report(item.slot, verdict, "chosen" if verdict.candidate.key in taken else None)
                for verdict in item.verdicts(self.query, self.solution.joint)
            ]
            outside = item.outsiders(self.query, self.solution.joint)
            reports.extend(self._report(item.slot, verdict, "not named") for verdict in outside)
            yield SlotReport(item.slot, tuple(reports))

    def _report(self, slot: Slot, verdict: Verdict, status: Status | None) -> CandidateReport:
        spec = verdict.candidate.spec
        missing = check_requirements(spec, self.here) if self.here is not None else []
        return CandidateReport(
            backend=verdict.candidate.label,
            version=verdict.candidate.version,
            status=status or ("rejected" if verdict.reasons else "fits"),
            reasons=verdict.reasons,
            would_allow=tuple(_counterfactuals(slot, verdict, self.query, self.solution.joint)),
            to_install=tuple(reason.fix or reason.wanted for reason in missing),
        )


@dataclass(frozen=True, slots=True)
class _Change:
    """One setting changed. ``aspect`` keeps two values of one setting from being combined."""

    aspect: str
    text: str
    query: Mapping[str, Any] = field(default_factory=dict)
    joint: Mapping[str, Any] = field(default_factory=dict)


def _counterfactuals(slot: Slot, verdict: Verdict, query: PlanQuery, joint: Joint) -> Iterator[str]:
    """The smallest changes (one setting, else two) under which a rejected candidate fits."""
    spec = verdict.candidate.spec
    _, mismatches = match(spec, need_of(slot, query, joint))
    standing = [reason for reason in verdict.reasons if reason not in mismatches]
    if not verdict.reasons or not all(reason.fix for reason in standing):
        return
    first = [reason.fix for reason in standing]
    if not mismatches:
        yield " and ".join(first)
        return
    changes = list(_changes(spec, slot, query, joint))
    for size in (1, 2):
        found = [
            " and ".join([*first, *(change.text for change in group)])
            for group in itertools.combinations(changes, size)
            if len({change.aspect for change in group}) == size and _fits(spec, slot, query, joint, group)
        ]
        if found:
            yield from found
            return


def _fits(spec: BackendSpec, slot: Slot, query: PlanQuery, joint: Joint, group: Iterable[_Change]) -> bool:
    for change in group:
        query = replace(query, **change.query)
        joint = joint._replace(**change.joint)
    return match(spec, need_of(slot, query, joint))[0] is not None


def _changes(spec: BackendSpec, slot: Slot, query: PlanQuery, joint: Joint) -> Iterator[_Change]:
    """Every single change of a setting that a user can make and that this slot could notice."""
    for size in dict.fromkeys(size for box in spec.caps for size in _some_pages(box.page_sizes)):
        if size != joint.page_size:
            yield _Change("page", f"page_size={size}", joint={"page_size": size})
    for dtype in _DTYPES:
        if dtype != query.dtype:
            yield _Change("dtype", f"dtype={dtype}", query={"dtype": dtype, "kv_dtype": "auto"})
    if query.pool_dtype != query.dtype:
        yield _Change("kv_dtype", "kv_dtype=auto", query={"kv_dtype": "auto"})
    if joint.graph:
        yield _Change("graph", "cuda_graph_max_bs=0", query={"graph": False}, joint={"graph": False})
    windows = [window for window in query.model.windows if window is not None and window < query.seq_limit]
    if windows and slot.role == "attention":
        yield _Change("length", f"max_seq_len_override={min(windows)}", query={"max_seq_len": min(windows)})


def _some_pages(supported: object) -> tuple[int, ...]:
    if isinstance(supported, MultipleOf):
        return (supported.base,)
    return supported.values if isinstance(supported, OneOf) else ()
