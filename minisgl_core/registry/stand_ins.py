"""A stand-in serves wherever the real backend cannot be used, only more slowly: nobody should have to guess why."""

from __future__ import annotations

from collections.abc import Iterator

from minisgl_core.plugin_api import Reason

from .query import PlanQuery
from .records import Candidate
from .solve import Field, Solution

__all__ = ["told_stand_ins"]


def told_stand_ins(query: PlanQuery, solution: Solution) -> Iterator[str]:
    """One line for each stand-in that ``auto`` took because something is missing here: it, its roles, what is missing.

    Stand-ins that a name or an ordered list brought are told elsewhere.
    """
    roles: dict[tuple[str, str, str], list[str]] = {}
    for field in solution.fields:
        taken = solution.chosen.get(field.slot)
        if taken is None or not taken.candidate.spec.stand_in or field.selection.names_it(taken.candidate):
            continue
        for better, reasons in _kept_out(field, taken.candidate, query, solution):
            key = (taken.candidate.label, better.label, "; ".join(map(str, reasons)))
            roles.setdefault(key, []).append(field.slot.role)
    for (taken_label, better_label, why), names in roles.items():
        yield (
            f"{', '.join(dict.fromkeys(names))}: {taken_label} is slow, and only used because "
            f"{better_label} cannot run here ({why})"
        )


def _kept_out(
    field: Field, taken: Candidate, query: PlanQuery, solution: Solution
) -> Iterator[tuple[Candidate, tuple[Reason, ...]]]:
    """What ranks before the one that was taken, is no stand-in itself, and could do this but for what is missing."""
    for (candidate, missing), verdict in zip(field.ranked, field.verdicts(query, solution.joint), strict=True):
        if candidate == taken:
            return
        if missing and verdict.reasons == missing and not candidate.spec.stand_in:
            yield candidate, missing
