"""A name in the config is strict: what this model would never call may not be named."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from minisgl_core.errors import ConfigError
from minisgl_core.plugin_api import ROLES, Role

from .query import ANY_KEY, PlanEntry, PlanQuery, entries_of
from .ranking import AUTO, selects
from .records import Registry

__all__ = ["Named", "check_used", "named_by"]


class Named(NamedTuple):
    """What the config says of a role, or of a part of one. ``auto`` may be among the names."""

    role: Role
    part: str
    """Phase, operation or shape; :data:`ANY_KEY` = all that has no word of its own"""
    names: tuple[str, ...]

    def __str__(self) -> str:
        """As ``--backend`` takes it."""
        part = "" if self.part == ANY_KEY else f".{self.part}"
        return f"{self.role}{part}={','.join(self.names)}"


def named_by(backends: Mapping[str, Any]) -> Iterator[Named]:
    """Everything that the config names, in the order of the roles; ``auto`` alone is no name."""
    for role in ROLES:
        value = backends.get(role, AUTO)
        parts = value if isinstance(value, Mapping) else {ANY_KEY: value}
        for part, names in parts.items():
            found = (names,) if isinstance(names, str) else tuple(names)
            if found != (AUTO,):
                yield Named(role, part, found)


def check_used(query: PlanQuery, registry: Registry) -> None:
    """Raise :class:`ConfigError` for a name that nothing in this model would use.

    With ``auto`` behind it, a name is a preference: it may go unused, so a config that serves several models can have
    one. A name on a whole role that words on all its parts override is no mistake either.
    """
    entries = entries_of(query)
    for named in named_by(query.backends):
        if AUTO not in named.names and not any(_means(named, entry, registry) for entry in entries):
            wish = ", ".join(f'"{name}"' for name in (*named.names, AUTO))
            preference = f"{str(named).partition('=')[0]} = [{wish}]"
            raise ConfigError(
                f"this model has no experts, so {named} would not be used",
                field=f"backends.{named.role}",
                value=named.names[0],
                remedy="leave it out, or give a model with experts; "
                f"a config file that serves both kinds of models says {preference}",
            )


def _means(named: Named, entry: PlanEntry, registry: Registry) -> bool:
    """Could the named backends serve this entry, as far as the kind of the entry goes?"""
    if entry.role != named.role:
        return False
    if named.part != ANY_KEY:
        return named.part == entry.label.partition(".")[2]
    if entry.op is None:
        return True
    return any(
        entry.op in box.ops
        for candidate in registry.candidates(named.role)
        if any(selects(name, candidate) for name in named.names)
        for box in candidate.spec.caps
    )
