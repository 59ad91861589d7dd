"""What measurements depend on, as JSON data, and in what two of them differ: told by the names that one can change."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from minisgl_core.registry import Plan

__all__ = ["differences", "plan_facts"]

_DIGEST: Final = "digest"
_JOINT: Final = ("page_size", "kv_layout", "dtype", "kv_dtype")
_OWN_NAMES: Final = ("default", "plan")
"""What is below these goes by its own name, as in the config file or in ``minisgl explain``."""
_ABSENT: Final = object()
_TOLD: Final = 6
"""Differences that are named; two plans of other plugins differ everywhere."""


def plan_facts(plan: Plan) -> dict[str, Any]:
    """The plan's digest, and what it is a digest of: joint values, the backend of each slot, options and versions."""
    content = plan.to_json()
    facts: dict[str, Any] = {_DIGEST: plan.digest(), **{name: content[name] for name in _JOINT}, "graphs": plan.graph}
    choices = [bucket.choice for bucket in plan.buckets]
    facts |= plan.summary()
    facts |= {f'options."{one.role}:{one.name}"': dict(one.options) for one in choices if one.options}
    return facts | {f"{one.distribution} version": one.version for one in choices}


def differences(there: Mapping[str, Any], here: Mapping[str, Any]) -> str:
    """``device is cpu there and NVIDIA H200 here; versions: torch is ...``; empty if all that ``here`` has is the same.

    Of two plans the choices are named, and their digests only where these are the same.
    """
    found = list(_differing(there, here))
    more = len(found) - _TOLD
    if more > 0:
        found[_TOLD:] = [f"and {more} more"]
    return "; ".join(found)


def _differing(there: Mapping[str, Any], here: Mapping[str, Any], within: str = "") -> Iterator[str]:
    for name, mine in here.items():
        kept = there.get(name, _ABSENT)
        if kept == mine:
            continue
        if isinstance(kept, Mapping) and isinstance(mine, Mapping):
            yield from _within(name, kept, mine, within)
        else:
            yield _line(name, kept, mine, within)


def _within(name: str, there: Mapping[str, Any], here: Mapping[str, Any], within: str) -> Iterator[str]:
    inner = within if name in _OWN_NAMES else f"{within}{name}: "
    both = {key: here.get(key, _ABSENT) for key in (*here, *there) if key != _DIGEST}
    found = list(_differing(there, both, inner))
    digests = there.get(_DIGEST), here.get(_DIGEST)
    if digests == (None, None) or (found and digests[0] != digests[1]):
        yield from found
    elif digests[0] != digests[1]:
        yield f"{_line(name, *digests, within)} (what else is kept of it is the same)"


def _line(name: str, there: object, here: object, within: str) -> str:
    return f"{within}{name} is {_told(there)} there and {_told(here)} here"


def _told(value: object) -> str:
    """As people write it."""
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_told(item)}" for key, item in value.items())
    if isinstance(value, bool):
        return "on" if value else "off"
    return "absent" if value is _ABSENT else "unset" if value is None else str(value)
