"""The conditions of a measurement as JSON data, and the differences between two of them in terms that a user can
change.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from minisgl_core.registry import Plan

__all__ = ["differences", "plan_facts"]

_DIGEST: Final = "digest"
_JOINT: Final = ("page_size", "kv_layout", "dtype", "kv_dtype")
_OWN_NAMES: Final = ("default", "plan")
"""Below these keys, names are used without a prefix, as in the config file and in ``minisgl explain``."""
_ABSENT: Final = object()
_MOST_LISTED: Final = 6
"""Most differences that are listed; two plans of different plugins differ everywhere."""


def plan_facts(plan: Plan) -> dict[str, Any]:
    """The plan's digest, and its content: the joint values, the backend of each slot, options and versions."""
    content = plan.to_json()
    facts: dict[str, Any] = {_DIGEST: plan.digest(), **{name: content[name] for name in _JOINT}, "graphs": plan.graph}
    choices = [bucket.choice for bucket in plan.buckets]
    facts |= plan.summary()
    facts |= {f'options."{one.role}:{one.name}"': dict(one.options) for one in choices if one.options}
    return facts | {f"{one.distribution} version": one.version for one in choices}


def differences(there: Mapping[str, Any], here: Mapping[str, Any]) -> str:
    """Describe what differs, such as ``device is cpu there and NVIDIA H200 here``; empty if all of ``here`` is equal.

    For two plans the choices are listed; the digests are listed only if the choices are equal.
    """
    found = list(_differing(there, here))
    more = len(found) - _MOST_LISTED
    if more > 0:
        found[_MOST_LISTED:] = [f"and {more} more"]
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
    return f"{within}{name} is {_as_text(there)} there and {_as_text(here)} here"


def _as_text(value: object) -> str:
    """A value as readable text."""
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_as_text(item)}" for key, item in value.items())
    if isinstance(value, bool):
        return "on" if value else "off"
    return "absent" if value is _ABSENT else "unset" if value is None else str(value)
