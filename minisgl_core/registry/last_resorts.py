"""A backend that calls itself the last choice serves where nothing else fits: whoever did not ask for it is told so."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from .query import PlanQuery
from .solve import Solution, Verdict

__all__ = ["LAST_TIER", "told_last_resorts"]

LAST_TIER: Final = 99
"""From this tier on, a backend is meant for those who name it; the plugins of ``minisgl new-plugin`` begin there."""
_OTHER_PURPOSE: Final = frozenset(("device", "phase", "op", "format", "architecture"))
"""Codes of reasons that say: this backend is for something else, wherever it runs."""


def told_last_resorts(query: PlanQuery, solution: Solution) -> Iterator[str]:
    """One line for each last resort that ``auto`` took: where it serves, and why nothing else does.

    One that was measured to be the fastest is no last resort, and stand-ins are told elsewhere.
    """
    slots: dict[tuple[str, str], list[str]] = {}
    for field in solution.fields:
        taken = solution.chosen.get(field.slot)
        if taken is None or not _is_last(taken) or field.selection.names_it(taken.candidate):
            continue
        others = [verdict for verdict in field.verdicts(query, solution.joint) if _is_rival(verdict)]
        if all(verdict.reasons for verdict in others):
            slots.setdefault((taken.candidate.label, _why(others)), []).append(field.slot.label)
    for (label, why), labels in slots.items():
        yield f"{', '.join(labels)}: {label} serves as a last resort, because {why}"


def _is_last(verdict: Verdict) -> bool:
    return verdict.candidate.spec.tier >= LAST_TIER and not verdict.candidate.spec.stand_in


def _is_rival(verdict: Verdict) -> bool:
    """Would it be preferred if it fitted?"""
    spec = verdict.candidate.spec
    if spec.tier >= LAST_TIER or spec.stand_in:
        return False
    return not any(reason.code in _OTHER_PURPOSE for reason in verdict.reasons)


def _why(others: list[Verdict]) -> str:
    if not others:
        return "nothing else is loaded for it"
    told = (f"{other.candidate.label} ({'; '.join(map(str, other.reasons))})" for other in others)
    return f"nothing else fits: {', '.join(told)}"
