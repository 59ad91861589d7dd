"""A name in the config is strict: what this model would never call may not be named; graphs that are off are told."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from minisgl_core.errors import ConfigError
from minisgl_core.plugin_api import ROLES, Role

from .last_resorts import told_last_resorts
from .query import ANY_KEY, PlanQuery, Slot, slots_of
from .ranking import AUTO, selects
from .records import Registry
from .solve import Solution
from .stand_ins import told_stand_ins

__all__ = ["Named", "check_used", "named_by", "remarks"]


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
    slots = slots_of(query)
    for named in named_by(query.backends):
        if AUTO not in named.names and not any(_means(named, slot, registry) for slot in slots):
            wish = ", ".join(f'"{name}"' for name in (*named.names, AUTO))
            preference = f"{str(named).partition('=')[0]} = [{wish}]"
            raise ConfigError(
                f"this model has no experts, so {named} would not be used",
                field=f"backends.{named.role}",
                value=named.names[0],
                remedy="leave it out, or give a model with experts; "
                f"a config file that serves both kinds of models says {preference}",
            )


def _means(named: Named, slot: Slot, registry: Registry) -> bool:
    """Could the named backends serve this slot, as far as the kind of the slot goes?"""
    if slot.role != named.role:
        return False
    if named.part != ANY_KEY:
        return named.part == slot.label.partition(".")[2]
    if slot.op is None:
        return True
    return any(
        slot.op in box.ops
        for candidate in registry.candidates(named.role)
        if any(selects(name, candidate) for name in named.names)
        for box in candidate.spec.caps
    )


def remarks(query: PlanQuery, solution: Solution) -> tuple[str, ...]:
    """What is to be told beside this plan: a named graph runner that records nothing, slow stand-ins, last resorts."""
    return (
        *_idle_graph_runner(query, solution),
        *told_stand_ins(query, solution),
        *told_last_resorts(query, solution),
    )


def _idle_graph_runner(query: PlanQuery, solution: Solution) -> tuple[str, ...]:
    """A named graph runner records nothing where no graphs are asked for."""
    named = any(one.role == "graph" and AUTO not in one.names for one in named_by(query.backends))
    runner = next((verdict for slot, verdict in solution.chosen.items() if slot.role == "graph"), None)
    if query.graph or not named or runner is None or runner.box is None or runner.box.graph == "never":
        return ()
    told = f"graphs are off, so graph={runner.candidate.spec.name} records nothing and runs every step eagerly"
    return (f"{told}; cuda_graph_max_bs=N turns them on (a CPU has none unless it is set)",)
