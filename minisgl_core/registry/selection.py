"""Which backends the config names, and for which plan entries. A name is strict: it must exist and be of use."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from packaging.utils import canonicalize_name

from minisgl_core.errors import ConfigError, UsageError, nearest
from minisgl_core.plan import PlanEntry
from minisgl_core.plugin_api import OP_NAMES, PARSER_PARTS, ROLES, Role

from .query import ANY_KEY, PlanQuery, entries_of, weight_shape
from .records import Candidate, Registry

__all__ = ["AUTO", "Named", "Selection", "check_used", "named_by", "offers_of", "selection_of", "selects"]

AUTO: Final = "auto"
_KEYS: Final[Mapping[str, tuple[str, ...]]] = {
    "attention": ("prefill", "decode", ANY_KEY),
    "ops": (*OP_NAMES, ANY_KEY),
    "parser": (*PARSER_PARTS, ANY_KEY),
}
"""The keys of a role's table; those of ``linear`` are shapes."""


@dataclass(frozen=True, slots=True)
class Selection:
    """What the config says about one plan entry: backend names in order of preference; empty means ``auto``."""

    names: tuple[str, ...] = ()

    @property
    def auto(self) -> bool:
        """May a backend be chosen that the config does not name?"""
        return not self.names or AUTO in self.names

    def place(self, candidate: Candidate) -> int | None:
        """Index of the name that means this candidate; None if it may not be chosen."""
        named = self._named_place(candidate)
        if named is not None or not self.auto:
            return named
        return self.names.index(AUTO) if self.names else 0

    def names_it(self, candidate: Candidate) -> bool:
        """Is it named, rather than left to ``auto``?"""
        return self._named_place(candidate) is not None

    def pins_distribution(self, candidate: Candidate) -> bool:
        """Is it named together with its distribution?"""
        return any("@" in name and selects(name, candidate) for name in self.names)

    def _named_place(self, candidate: Candidate) -> int | None:
        found = (place for place, name in enumerate(self.names) if name != AUTO and selects(name, candidate))
        return next(found, None)


def selects(text: str, candidate: Candidate) -> bool:
    """Does ``name[/variant][@distribution]`` mean this candidate?"""
    rest, _, distribution = text.partition("@")
    name, _, variant = rest.partition("/")
    spec = candidate.spec
    if name != spec.name or (variant and variant != spec.variant):
        return False
    if not distribution:
        return not candidate.qualified
    return canonicalize_name(distribution) == canonicalize_name(candidate.distribution)


def offers_of(what: str, registry: Registry, role: str | None = None) -> list[Candidate]:
    """What ``ROLE:NAME[/variant][@distribution]`` means, in the plugin's order. ``role``: where it names none.

    Raises :class:`UsageError` for a name that no installed plugin offers.
    """
    before, colon, name = what.rpartition(":")
    found_role = before if colon else role
    if found_role not in ROLES:
        raise UsageError(f"{what!r} names no role", field="backend", value=what, remedy="write it as ROLE:NAME")
    candidates = registry.candidates(found_role)
    offers = sorted((item for item in candidates if selects(name, item)), key=lambda item: item.index)
    if not offers:
        known = ", ".join(sorted({item.spec.name for item in candidates}))
        failed = ", ".join(f"{plugin.distribution} ({plugin.failure})" for plugin in registry.failures())
        raise UsageError(
            f"no installed plugin offers {what!r}" + (f"; failed to load: {failed}" if failed else ""),
            field="backend",
            value=what,
            remedy=f"there are {known or 'none'}",
        )
    return offers


def selection_of(entry: PlanEntry, query: PlanQuery) -> Selection:
    """What the config says about a plan entry; :func:`named_by` has accepted the config."""
    value = query.backends.get(entry.role, AUTO)
    if isinstance(value, Mapping):
        value = value.get(entry.part or ANY_KEY, value.get(ANY_KEY, AUTO))
    names = (value,) if isinstance(value, str) else tuple(value)
    return Selection(() if names == (AUTO,) else names)


class Named(NamedTuple):
    """What the config says of a role, or of a part of one. ``auto`` may be among the names."""

    role: Role
    part: str
    """Phase, operation or shape; :data:`ANY_KEY` = all parts that are not mentioned"""
    names: tuple[str, ...]

    def __str__(self) -> str:
        """As ``--backend`` takes it."""
        part = "" if self.part == ANY_KEY else f".{self.part}"
        return f"{self.role}{part}={','.join(self.names)}"


def named_by(backends: Mapping[str, Any]) -> Iterator[Named]:
    """Everything that the config names, in the order of the roles; ``auto`` alone is no name.

    Raises :class:`ConfigError` for an unknown role, an unknown key of a role's table, or a value that is no name.
    """
    for role in backends:
        _check_key("backends", role, ROLES)
    for role in (role for role in ROLES if role in backends):
        value = backends[role]
        whole = not isinstance(value, Mapping)
        for part, names in {ANY_KEY: value}.items() if whole else value.items():
            if role == "linear":
                weight_shape(part)
            elif not whole:
                _check_key(f"backends.{role}", part, _KEYS.get(role, ()))
            found = _names(f"backends.{role}" if whole else f"backends.{role}.{part}", names)
            if found != (AUTO,):
                yield Named(role, part, found)


def _check_key(table: str, key: str, known: Sequence[str]) -> None:
    if key in known:
        return
    hint = nearest(key, known) or (f"known are {', '.join(known)}" if known else "this role is chosen as a whole")
    raise ConfigError(f"unknown key {key!r} in {table}", field=f"{table}.{key}", value=key, remedy=hint)


def _names(setting: str, value: Any) -> tuple[str, ...]:
    names = (value,) if isinstance(value, str) else value
    if isinstance(names, Sequence) and names and all(isinstance(name, str) and name for name in names):
        return tuple(names)
    raise ConfigError(
        f"{setting} is {value!r}", field=setting, value=value, remedy="give a backend name, a list of names, or auto"
    )


def check_used(query: PlanQuery, registry: Registry) -> None:
    """Raise :class:`ConfigError` for a name that nothing in this model would use.

    With ``auto`` behind it, a name is a preference: it may go unused, so a config that serves several models can have
    one. A name on a whole role whose parts all have names of their own is no mistake either.
    """
    entries = entries_of(query)
    for named in named_by(query.backends):
        if AUTO not in named.names and not any(_means(named, entry, registry) for entry in entries):
            names = ", ".join(f'"{name}"' for name in (*named.names, AUTO))
            preference = f"{str(named).partition('=')[0]} = [{names}]"
            raise ConfigError(
                f"this model has no experts, so {named} would not be used",
                field=f"backends.{named.role}",
                value=named.names[0],
                remedy="leave it out, or give a model with experts; "
                f"a config file that serves both kinds of models says {preference}",
            )


def _means(named: Named, entry: PlanEntry, registry: Registry) -> bool:
    """Could the named backends serve this entry, as far as its role and part go?"""
    if entry.role != named.role:
        return False
    if named.part != ANY_KEY:
        return named.part == entry.part
    if entry.op is None:
        return True
    named_ones = (one for one in registry.candidates(named.role) if Selection(named.names).names_it(one))
    return any(entry.op in caps.ops for candidate in named_ones for caps in candidate.spec.caps)
