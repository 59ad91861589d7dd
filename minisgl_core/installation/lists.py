"""The lists ``allow`` and ``deny`` of ``[plugins]``: which distributions are loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from packaging.utils import canonicalize_name

from minisgl_core.errors import ConfigError, nearest
from minisgl_core.plugin_api.hooks import CORE

__all__ = ["check_lists", "exclusion", "exclusion_lines"]


def exclusion_lines(excluded: Mapping[str, str]) -> tuple[str, ...]:
    """The excluded distributions for people, a text for each list. ``excluded``: the list by distribution."""
    lists: dict[str, list[str]] = {}
    for distribution, name in excluded.items():
        lists.setdefault(name, []).append(distribution)
    return tuple(f"plugins.{name} keeps out {', '.join(found)}" for name, found in sorted(lists.items()))


def exclusion(distribution: str, allow: Sequence[str] | None, deny: Sequence[str]) -> str:
    """Which list keeps a distribution out; empty if none does. The core itself is always in."""
    name = canonicalize_name(distribution)
    if name == CORE:
        return ""
    if name in map(canonicalize_name, deny):
        return "deny"
    return "" if allow is None or name in map(canonicalize_name, allow) else "allow"


def check_lists(installed: Sequence[str], allow: Sequence[str] | None, deny: Sequence[str]) -> None:
    """Raise :class:`ConfigError` for a listed name that no installed plugin has, and for denying the core."""
    known = {canonicalize_name(name) for name in installed}
    for setting, names in (("plugins.allow", allow or ()), ("plugins.deny", deny)):
        for name in names:
            if canonicalize_name(name) not in known:
                # the nearest name is no guess for deny: it would switch off another plugin
                hint = nearest(name, known) if setting == "plugins.allow" else ""
                raise ConfigError(
                    f"{setting} names {name!r}, which is no installed plugin",
                    field=setting,
                    value=name,
                    remedy=hint or f"installed: {', '.join(sorted(known)) or 'none'}",
                )
    if CORE in [str(canonicalize_name(name)) for name in deny]:
        raise ConfigError(
            f"plugins.deny names {CORE}, which nothing runs without",
            field="plugins.deny",
            value=CORE,
            remedy="remove it; choose other backends by name in [backends]",
        )
