"""A backend's caps against one requirement: the capability set that fits, or why the nearest one does not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from minisgl_core.plugin_api import AnyValue, BackendSpec, Caps, MultipleOf, OneOf, Reason
from minisgl_core.plugin_api.spec_validation import CAPS_FIELDS

from .query import Requirement

__all__ = ["fits", "kernel_page_size", "match"]

_ADJUSTABLE: Final = frozenset(("dtype", "kv_dtype", "page_size", "graph", "feature"))
"""Codes of reasons that a setting may remove; :mod:`.advice` finds out which setting does."""


def match(spec: BackendSpec, required: Requirement) -> tuple[Caps | None, list[Reason]]:
    """The first capability set that fits, or (None, the reasons of the nearest one)."""
    nearest: list[Reason] = [Reason("caps", "caps", "a capability set", "none declared")]
    for place, caps in enumerate(spec.caps):
        reasons = list(_reasons(caps, required))
        if not reasons:
            return caps, []
        if not place or _distance(reasons) < _distance(nearest):
            nearest = reasons
    return None, nearest


def fits(spec: BackendSpec, required: Requirement) -> bool:
    """Does a capability set fit? Answered without the other reasons why one does not."""
    return any(next(_reasons(caps, required), None) is None for caps in spec.caps)


def kernel_page_size(supported: OneOf | MultipleOf | AnyValue | None, pool: int) -> int | None:
    """The page size that kernels run with on a pool of this page size: the largest supported divisor, None if none."""
    if isinstance(supported, AnyValue):
        return pool
    if isinstance(supported, MultipleOf):
        return pool if pool % supported.base == 0 else None
    if isinstance(supported, OneOf):
        return max((value for value in supported.values if value > 0 and pool % value == 0), default=None)
    return None


def _distance(reasons: list[Reason]) -> tuple[int, int]:
    """How far away it is: what a user cannot change (device, shapes) weighs before the number of reasons."""
    return sum(reason.code not in _ADJUSTABLE for reason in reasons), len(reasons)


def _reasons(caps: Caps, required: Requirement) -> Iterator[Reason]:
    yield from _device_reasons(caps, required)
    for code, field in CAPS_FIELDS.items():
        wanted, supported = getattr(required, code), getattr(caps, field)
        if wanted is None:
            continue
        if code == "page_size":
            if kernel_page_size(supported, wanted) is None:
                yield Reason(code, field, f"one that divides {wanted}", _shown(supported))
        elif not _holds(supported, wanted):
            yield Reason(code, field, str(wanted), _shown(supported))
    if required.capture and caps.graph == "never":
        yield Reason("graph", "graph", "capture of decode steps", caps.graph)
    if required.no_capture and caps.graph != "never":
        yield Reason("graph", "graph", "a runner that never captures", caps.graph)
    for feature in sorted(required.features):
        if not _holds(caps.features, feature):
            yield Reason("feature", "features", feature, _shown(caps.features))
    if required.template is not None and not _is_template_of(caps, required.template):
        wanted = "those of the model's chat template, unless it is named"
        yield Reason("template", "templates", wanted, _shown(caps.templates))
    if required.exact and caps.tolerance:
        yield Reason("lossy", "tolerance", "nothing lost unless it is named", f"{caps.tolerance:g}")


def _device_reasons(caps: Caps, required: Requirement) -> Iterator[Reason]:
    device = required.device
    if device is None:
        return
    if not _holds(caps.devices, device.kind):
        yield Reason("device", "devices", device.kind, _shown(caps.devices))
    elif device.about.has_capability and not isinstance(caps.sm, AnyValue):
        low, high = caps.sm
        if device.sm is None or not low <= device.sm <= high:
            supported = f"sm{low}" if low == high else f"sm{low} to sm{high}" if low < high else "none declared"
            yield Reason("sm", "sm", "an unknown capability" if device.sm is None else f"sm{device.sm}", supported)


def _is_template_of(caps: Caps, template: str) -> bool:
    """Do all texts that the capability set names occur in it?"""
    markers = caps.templates
    return isinstance(markers, AnyValue) or (bool(markers) and all(marker in template for marker in markers))


def _holds(supported: Any, wanted: str | int) -> bool:
    """Is it one of the declared names or numbers? None and an empty tuple declare nothing."""
    if isinstance(supported, MultipleOf):
        return isinstance(wanted, int) and wanted % supported.base == 0
    values = supported.values if isinstance(supported, OneOf) else supported
    return isinstance(values, AnyValue) or wanted in (values or ())


def _shown(supported: Any) -> str:
    if isinstance(supported, AnyValue):
        return "any"
    if isinstance(supported, MultipleOf):
        return f"multiples of {supported.base}"
    values = supported.values if isinstance(supported, OneOf) else supported
    names = sorted(values) if isinstance(values, frozenset) else values or ()
    return ", ".join(map(str, names)) or ("none" if isinstance(supported, OneOf) else "none declared")
