"""Why this plan: every candidate of every entry with all its reasons, and what would have to change for it to fit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from minisgl_core.errors import BackendError
from minisgl_core.installation import Environment, Installed, check_requires
from minisgl_core.plan import Plan, PlanEntry
from minisgl_core.plugin_api import Reason

from .advice import Adviser
from .query import PlanQuery
from .ranking import why_preferred
from .records import Note, PluginRecord, Registry
from .refusal import SEE_EXPLAIN, refusal
from .remarks import remarks
from .resolve import check_query, plan_of, resolve_loop
from .solve import Verdict

__all__ = ["CandidateReport", "EntryReport", "Explanation", "explain"]

Status = Literal["chosen", "fits", "rejected", "not named"]


@dataclass(frozen=True, slots=True)
class CandidateReport:
    """One candidate of one entry. ``not named`` means that the config's explicit names exclude it."""

    backend: str
    version: str
    status: Status
    reasons: tuple[Reason, ...]
    preferred: str
    """Why another was chosen although this one fits: ``X is preferred because ...``; empty if it does not fit."""
    would_allow: tuple[str, ...]
    """Each entry alone would make it fit, such as ``page_size=16``; each has been tried."""
    to_install: tuple[str, ...]
    """On a device that is not here: what would have to be installed there, as far as this installation knows."""

    def to_json(self) -> dict[str, Any]:
        """As plain JSON data."""
        return {**asdict(self), "preferred": self.preferred or None}


@dataclass(frozen=True, slots=True)
class EntryReport:
    """All candidates of one entry, best first."""

    entry: PlanEntry
    candidates: tuple[CandidateReport, ...]

    def usable(self) -> list[CandidateReport]:
        """Those that the plan has chosen, or could have."""
        return [item for item in self.candidates if item.status in ("chosen", "fits")]

    def to_json(self) -> dict[str, Any]:
        """As plain JSON data."""
        return {"entry": self.entry.label, "candidates": [item.to_json() for item in self.candidates]}


@dataclass(frozen=True, slots=True)
class Explanation:
    """The answer of ``minisgl explain``: a plan or an error, and how it came about."""

    plan: Plan | None
    error: str
    page_size: int
    """The page size that the candidates were judged at."""
    entries: tuple[EntryReport, ...]
    failures: tuple[PluginRecord, ...]
    excluded: Mapping[str, str]
    """Distributions that the config keeps out, each with the list: their backends are no candidates."""
    notes: tuple[Note, ...]
    remarks: tuple[str, ...]
    """What readers of the plan may not expect; :func:`~minisgl_core.registry.resolve_plan` warns of it."""

    def to_json(self) -> dict[str, Any]:
        """As plain JSON data."""
        return {
            "plan": None if self.plan is None else self.plan.to_json(),
            "error": self.error or None,
            "page_size": self.page_size,
            "entries": [item.to_json() for item in self.entries],
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
    installed = environment or Installed()
    there = None if elsewhere else installed
    solution = resolve_loop(query, registry, there, prober=None)
    error: BackendError | None = refusal(solution, registry, there) if solution.conflict else None
    reporter = _Reporter(Adviser(solution, registry, there), installed if elsewhere else None)
    return Explanation(
        plan=None if error else plan_of(solution),
        error="" if error is None else _without_itself(error),
        page_size=solution.joint.page_size,
        entries=tuple(reporter.entries()),
        failures=registry.failures(),
        excluded=registry.excluded(),
        notes=registry.notes,
        remarks=remarks(solution),
    )


def _without_itself(error: BackendError) -> str:
    """The text of an error, which does not send the reader of ``minisgl explain`` to it."""
    return str(error).replace(f"; {SEE_EXPLAIN}", "", 1)


@dataclass(frozen=True)
class _Reporter:
    adviser: Adviser
    here: Environment | None
    """This machine, if the question is about another."""

    def entries(self) -> Iterator[EntryReport]:
        solution = self.adviser.solution
        by_batch = solution.by_batch()
        for field in solution.fields:
            chosen = {verdict.candidate.key for _, verdict in by_batch.get(field.entry, ())}
            verdicts = solution.verdicts(field)
            best = next((verdict for verdict in verdicts if verdict.candidate.key in chosen), None)
            reports = []
            for verdict in verdicts:
                key = verdict.candidate.key
                status: Status = "chosen" if key in chosen else "rejected" if verdict.reasons else "fits"
                why = why_preferred(best.candidate, best.rank, verdict.candidate, verdict.rank) if best else ""
                reports.append(self._report(field.entry, verdict, status, why if status == "fits" else ""))
            outside = field.outsiders(solution.joint)
            reports.extend(self._report(field.entry, verdict, "not named", "") for verdict in outside)
            yield EntryReport(field.entry, tuple(reports))

    def _report(self, entry: PlanEntry, verdict: Verdict, status: Status, preferred: str) -> CandidateReport:
        spec = verdict.candidate.spec
        missing = check_requires(spec, self.here) if self.here is not None else []
        return CandidateReport(
            backend=verdict.candidate.label,
            version=verdict.candidate.version,
            status=status,
            reasons=verdict.reasons,
            preferred=preferred,
            would_allow=self.adviser.would_allow(entry, verdict, admitted=status != "not named"),
            to_install=tuple(reason.fix or reason.wanted for reason in missing),
        )
