"""Shrinks a failing capsule to the smallest one that still fails in the same way."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from minisgl_core.errors import UsageError

from .base import Capsule
from .replay import ReplayReport, replay
from .roles import ROLES
from .search import Fails, subset

if TYPE_CHECKING:
    from minisgl_core.testing import BackendUnderTest, DeviceFixture

__all__ = ["shrink", "shrink_while"]

C = TypeVar("C", bound=Capsule)
_ROUNDS = 3


def shrink(
    capsule: C,
    under_test: BackendUnderTest,
    fixture: DeviceFixture,
    tried: Callable[[Capsule, bool], None] | None = None,
) -> C:
    """The smallest capsule found that fails as this one does: by a wrong result, or by the same exception.

    ``tried`` is called with every attempt and whether it still failed.

    Raises :class:`UsageError` if this one does not fail.
    """
    capsule = capsule.before_cuts()
    kind = _kind(replay(capsule, under_test, fixture, repeats=0))
    if kind is None:
        raise UsageError(
            f"{under_test.label} computes this capsule right, so there is nothing to shrink ({capsule.summary()})",
            field="--shrink",
            remedy="leave out --shrink, or name the backend that fails",
        )

    def fails(smaller: Capsule) -> bool:
        found = _kind(replay(smaller, under_test, fixture, repeats=0)) == kind
        if tried is not None:
            tried(smaller, found)
        return found

    small = shrink_while(capsule, fails)
    return small.with_origin(shrunk_from=capsule.summary(), failed_on=under_test.label)


def _kind(report: ReplayReport) -> str | None:
    if report.passed:
        return None
    return report.raised.partition(":")[0] or "wrong"


def shrink_while(capsule: C, fails: Fails[Any]) -> C:
    """Reduce layers and then the parts particular to the role, repeatedly, while the result still ``fails``."""
    reduce = ROLES[capsule.ROLE].reduce
    for _ in range(_ROUNDS):
        before = capsule.nbytes
        capsule = subset(capsule, len(capsule.layers), Capsule.with_layers, fails)
        capsule = reduce(capsule, fails)
        if capsule.nbytes >= before:
            break
    return capsule
