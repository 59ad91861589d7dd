"""What backends' own code says in this process: whether they can run here, as far as a quick look tells."""

from __future__ import annotations

from collections.abc import Iterable

from minisgl_core.errors import MinisglError
from minisgl_core.plugin_api import CannotRun, Reason

from .guest import ProcessEndsError, as_guest
from .imports import import_object
from .records import Candidate

__all__ = ["run_checks"]


def run_checks(candidates: Iterable[Candidate]) -> dict[str, Reason]:
    """The refusals by :attr:`Candidate.key`. Backends that share a check share its answer.

    A :class:`MinisglError` passes: it is about a setting, whichever backend is chosen.
    """
    answers: dict[str, Reason | None] = {}
    refused: dict[str, Reason] = {}
    for candidate in candidates:
        check = candidate.spec.check
        if check is None:
            continue
        if check not in answers:
            answers[check] = _ask(check)
        reason = answers[check]
        if reason is not None:
            refused[candidate.key] = reason
    return refused


def _ask(check: str) -> Reason | None:
    try:
        with as_guest():
            import_object(check)()
    except CannotRun as refusal:
        return refusal.reason
    except MinisglError:
        raise
    except (Exception, SystemExit, ProcessEndsError) as error:
        return Reason("check", "check", "a working backend", f"the check raised {type(error).__name__}: {error}")
    return None
