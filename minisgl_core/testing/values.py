"""Values inside and just outside a declared capability."""

from __future__ import annotations

from collections.abc import Sequence

from minisgl_core.plugin_api import AnyValue, MultipleOf, OneOf

__all__ = ["claims", "inside", "outside", "usual"]

Ints = OneOf | MultipleOf | AnyValue | None


def claims(declared: Ints, value: int) -> bool:
    """True if the declaration claims this value."""
    if isinstance(declared, MultipleOf):
        return value % declared.base == 0
    return isinstance(declared, AnyValue) or (declared is not None and value in declared.values)


def inside(declared: Ints, probes: Sequence[int], quick: bool) -> tuple[int, ...]:
    """Values that a declaration claims.

    ``probes``: values to try if it claims everything; for multiples also the first multiple that is not smaller than
    the largest probe. Quick: only the limits.
    """
    if isinstance(declared, AnyValue):
        return tuple(probes)
    if isinstance(declared, MultipleOf):
        base = declared.base
        large = -(-max(probes, default=0) // base) * base
        multiples = (base, 2 * base, large) if quick else (base, 2 * base, 3 * base, large)
        return tuple(sorted({n for n in multiples if n}))
    values = tuple(sorted(set(declared.values))) if declared is not None else ()
    return tuple(sorted({values[0], values[-1]})) if quick and values else values


def usual(declared: Ints, preferred: int, probes: Sequence[int]) -> int | None:
    """The value for checks that vary something else: ``preferred`` if it is claimed, else the smallest claimed."""
    claimed = inside(declared, probes, quick=False)
    if isinstance(declared, MultipleOf) and preferred % declared.base == 0:
        return preferred
    return preferred if preferred in claimed else min(claimed, default=None)


def outside(declared: Ints, adjacent: Sequence[int], quick: bool) -> tuple[int, ...]:
    """The nearest values that a declaration does not claim, on both sides and in its gaps; at most two when quick."""
    if declared is None or isinstance(declared, AnyValue):
        return ()
    if isinstance(declared, MultipleOf):
        return tuple(n for n in (declared.base // 2, declared.base + declared.base // 2) if n % declared.base)
    values = declared.values
    missing = [n for n in adjacent if n not in values]
    near = sorted(missing, key=lambda n: (min(abs(n - value) for value in values), n))
    return tuple(sorted(near[: 2 if quick else 4]))
