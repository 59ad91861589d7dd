"""What a plan does that its reader may not expect: shown by ``minisgl explain``, and a warning at the start."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from .selection import AUTO, named_by
from .solve import Field, Solution, Verdict

__all__ = ["remarks"]

_OTHER_PURPOSE: Final = frozenset(("device", "phase", "op", "format", "architecture"))
"""Codes of reasons that say: this backend is for something else, wherever it runs."""


def remarks(solution: Solution) -> tuple[str, ...]:
    """A named graph runner that records nothing, slow stand-ins, and backends that only serve as a last resort."""
    return (
        *_idle_graph_runner(solution),
        *_grouped(_stand_ins(solution)),
        *_grouped(_last_resorts(solution)),
        *_shared_seeds(solution),
    )


def _grouped(remarks: Iterator[tuple[str, str]]) -> Iterator[str]:
    """(where, what) as one line for each what."""
    places: dict[str, dict[str, None]] = {}
    for where, what in remarks:
        places.setdefault(what, {})[where] = None
    return (f"{', '.join(where)}: {what}" for what, where in places.items())


def _idle_graph_runner(solution: Solution) -> Iterator[str]:
    """A named graph runner records nothing where no graphs are requested."""
    named = any(one.role == "graph" and AUTO not in one.names for one in named_by(solution.query.backends))
    runner = next((verdict for entry, verdict in solution.chosen.items() if entry.role == "graph"), None)
    if solution.query.graph or not named or runner is None or runner.caps is None or runner.caps.graph == "never":
        return
    name = runner.candidate.typed_name
    yield (
        f"graphs are off, so graph={name} records nothing and runs every step eagerly; "
        "cuda_graph_max_bs=N turns them on (a CPU has none unless it is set)"
    )


def _shared_seeds(solution: Solution) -> Iterator[str]:
    """A named sampler that does not keep a seed for each row; ``auto`` prefers one that does."""
    for entry, verdict in solution.chosen.items():
        if entry.op == "sample" and verdict.caps is not None and not verdict.caps.per_row_seed:
            what = "keeps no seed for each row, so what a seeded request draws depends on its batch"
            yield f"{entry.label}: {verdict.candidate.label} {what}"


def _left_to_auto(solution: Solution) -> Iterator[tuple[Field, Verdict]]:
    chosen = ((field, solution.chosen.get(field.entry)) for field in solution.fields)
    return ((field, verdict) for field, verdict in chosen if verdict is not None and not verdict.named)


def _stand_ins(solution: Solution) -> Iterator[tuple[str, str]]:
    """Stand-ins that ``auto`` chose because something is missing here that better backends require."""
    for field, chosen in _left_to_auto(solution):
        if not chosen.candidate.spec.stand_in:
            continue
        for verdict in solution.verdicts(field):
            if verdict.candidate == chosen.candidate:
                break
            if verdict.static and verdict.reasons == verdict.static and not verdict.candidate.spec.stand_in:
                why = f"{verdict.candidate.label} cannot run here ({'; '.join(map(str, verdict.static))})"
                yield field.entry.role, f"{chosen.candidate.label} is slow, and only used because {why}"


def _last_resorts(solution: Solution) -> Iterator[tuple[str, str]]:
    """Newcomers that ``auto`` chose because none of the incumbents for this purpose fits."""
    for field, chosen in _left_to_auto(solution):
        if not chosen.rank.newcomer:
            continue
        rivals = [one for one in solution.verdicts(field) if not one.rank.newcomer and _is_rival(one)]
        if rivals:
            why = (f"{rival.candidate.label} ({'; '.join(map(str, rival.reasons))})" for rival in rivals)
            what = f"{chosen.candidate.label} serves as a last resort, because nothing else fits: {', '.join(why)}"
            yield field.entry.label, what


def _is_rival(verdict: Verdict) -> bool:
    """Would it be preferred if it fitted?"""
    return not verdict.candidate.spec.stand_in and not any(item.code in _OTHER_PURPOSE for item in verdict.reasons)
