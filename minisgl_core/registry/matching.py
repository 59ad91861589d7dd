"""A backend's caps against one need: the box that fits, or every reason why the nearest one does not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from minisgl_core.plugin_api import ANY, AnyValue, BackendSpec, Caps, MultipleOf, OneOf, Reason

from .query import Need

__all__ = ["fits", "kernel_page_size", "match"]

_Names = tuple[str, ...] | AnyValue
_Ints = OneOf | MultipleOf | AnyValue | None
_ADJUSTABLE: Final = frozenset(("dtype", "kv_dtype", "page_size", "graph", "feature"))
"""Codes of reasons that a setting may remove; :mod:`.advice` finds out which setting does."""


def match(spec: BackendSpec, need: Need) -> tuple[Caps | None, list[Reason]]:
    """The first box that holds the need, or (None, the reasons of the nearest box)."""
    nearest: list[Reason] | None = None
    for box in spec.caps:
        reasons = [reason for check in _CHECKS for reason in check(box, need)]
        if not reasons:
            return box, []
        if nearest is None or _distance(reasons) < _distance(nearest):
            nearest = reasons
    return None, nearest or [Reason("caps", "caps", "a box of capabilities", "none declared")]


def fits(spec: BackendSpec, need: Need) -> bool:
    """Does a box hold the need? Answered without the reasons why others do not."""
    return any(not any(_some(check(box, need)) for check in _CHECKS) for box in spec.caps)


def _some(reasons: Iterator[Reason]) -> bool:
    return next(reasons, None) is not None


def kernel_page_size(supported: _Ints, pool: int) -> int | None:
    """The page size that kernels run with on a pool of this page size: the largest supported divisor, None if none."""
    if isinstance(supported, AnyValue):
        return pool
    if isinstance(supported, MultipleOf):
        return pool if pool % supported.base == 0 else None
    if isinstance(supported, OneOf):
        return max((value for value in supported.values if value > 0 and pool % value == 0), default=None)
    return None


def _distance(reasons: list[Reason]) -> tuple[int, int]:
    """How far away a box is: what a user cannot change (device, shapes) weighs before the number of reasons."""
    return sum(reason.code not in _ADJUSTABLE for reason in reasons), len(reasons)


def _named(names: _Names) -> str:
    if isinstance(names, AnyValue):
        return "any"
    return ", ".join(names) or "none declared"


def _numbers(values: _Ints) -> str:
    if isinstance(values, MultipleOf):
        return f"multiples of {values.base}"
    if isinstance(values, OneOf):
        return ", ".join(str(value) for value in values.values) or "none"
    return "none declared" if values is None else "any"


def _holds(names: _Names, wanted: str) -> bool:
    return isinstance(names, AnyValue) or wanted in names


def _has_number(values: _Ints, wanted: int) -> bool:
    if isinstance(values, OneOf):
        return wanted in values.values
    if isinstance(values, MultipleOf):
        return wanted % values.base == 0
    return values is ANY


def _device(box: Caps, need: Need) -> Iterator[Reason]:
    if need.device is None:
        return
    if not _holds(box.devices, need.device.kind):
        yield Reason("device", "devices", need.device.kind, _named(box.devices))
    elif need.device.kind == "cuda" and not isinstance(box.sm, AnyValue):
        low, high = box.sm
        capability = need.device.sm
        if capability is None or not low <= capability <= high:
            supported = f"sm{low}" if low == high else f"sm{low} to sm{high}" if low < high else "none declared"
            yield Reason("sm", "sm", "an unknown capability" if capability is None else f"sm{capability}", supported)


def _dtypes(box: Caps, need: Need) -> Iterator[Reason]:
    if need.dtype is not None and not _holds(box.dtypes, need.dtype):
        yield Reason("dtype", "dtypes", need.dtype, _named(box.dtypes))
    if need.kv_dtype is not None and not _holds(box.kv_dtypes, need.kv_dtype):
        yield Reason("kv_dtype", "kv_dtypes", need.kv_dtype, _named(box.kv_dtypes))


def _heads(box: Caps, need: Need) -> Iterator[Reason]:
    if need.head_dim is not None and not _has_number(box.head_dims, need.head_dim):
        yield Reason("head_dim", "head_dims", str(need.head_dim), _numbers(box.head_dims))
    if need.gqa_ratio is not None and not _has_number(box.gqa_ratios, need.gqa_ratio):
        yield Reason("gqa_ratio", "gqa_ratios", str(need.gqa_ratio), _numbers(box.gqa_ratios))


def _pages(box: Caps, need: Need) -> Iterator[Reason]:
    if need.page_size is not None and kernel_page_size(box.page_sizes, need.page_size) is None:
        wanted = f"one that divides {need.page_size}"
        yield Reason("page_size", "page_sizes", wanted, _numbers(box.page_sizes))
    if need.kv_layout is not None and need.kv_layout not in box.kv_layouts:
        yield Reason("kv_layout", "kv_layouts", need.kv_layout, _named(box.kv_layouts))


def _phase(box: Caps, need: Need) -> Iterator[Reason]:
    if need.phase is not None and need.phase not in box.phases:
        yield Reason("phase", "phases", need.phase, _named(box.phases))


def _graph(box: Caps, need: Need) -> Iterator[Reason]:
    if need.capture and box.graph == "never":
        yield Reason("graph", "graph", "capture of decode steps", box.graph)
    if need.no_capture and box.graph != "never":
        yield Reason("graph", "graph", "a runner that never captures", box.graph)


def _features(box: Caps, need: Need) -> Iterator[Reason]:
    if isinstance(box.features, AnyValue):
        return
    for feature in sorted(need.features - box.features):
        yield Reason("feature", "features", feature, _named(tuple(sorted(box.features))))


def _lists(box: Caps, need: Need) -> Iterator[Reason]:
    for code, field, wanted, listed in (
        ("op", "ops", need.op, box.ops),
        ("format", "formats", need.format, box.formats),
        ("architecture", "architectures", need.architecture, box.architectures),
    ):
        if wanted is not None and wanted not in listed:
            yield Reason(code, field, wanted, _named(listed))


def _tolerance(box: Caps, need: Need) -> Iterator[Reason]:
    if need.exact and box.tolerance:
        yield Reason("lossy", "tolerance", "nothing lost unless it is named", f"{box.tolerance:g}")


_CHECKS: Final[tuple[Callable[[Caps, Need], Iterator[Reason]], ...]] = (
    _device,
    _dtypes,
    _heads,
    _pages,
    _phase,
    _graph,
    _features,
    _lists,
    _tolerance,
)
