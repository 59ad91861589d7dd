"""What discovery found: plugins with their provenance, their failures, and the backends they offer."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Final

import pluggy
from packaging.utils import canonicalize_name

from minisgl_core.errors import ConfigError, nearest
from minisgl_core.plugin_api import BackendSpec, Role

from .guest import ProcessEndsError, as_guest
from .index import is_listed

__all__ = ["CORE", "Candidate", "Note", "PluginRecord", "Registry", "exclusion_lines"]

CORE: Final = "minisgl-core"
"""The distribution of the core and of its built-in backends."""

logger = logging.getLogger("minisgl.registry")


@dataclass(frozen=True, slots=True)
class Candidate:
    """A spec and the distribution it comes from. ``index`` is its place in what the plugin returned."""

    spec: BackendSpec
    distribution: str
    version: str
    index: int = 0
    qualified: bool = False
    """Does its bare name belong to an incumbent, so that only ``name@distribution`` means this one?"""

    @property
    def incumbent(self) -> bool:
        """Does it come from a distribution of the shipped index?"""
        return is_listed(self.distribution)

    @property
    def typed_name(self) -> str:
        """The shortest name that means it, without the variant: such as ``fa``, or ``fa@some-dist``."""
        return f"{self.spec.name}@{self.distribution}" if self.qualified else self.spec.name

    @property
    def label(self) -> str:
        """Such as ``fa/fa3@minisgl-fa``."""
        variant = f"/{self.spec.variant}" if self.spec.variant else ""
        return f"{self.spec.name}{variant}@{self.distribution}"

    @property
    def key(self) -> str:
        """Unique in a registry: such as ``attention:fa/fa3@minisgl-fa``."""
        return f"{self.spec.role}:{self.label}"


@dataclass(frozen=True, slots=True)
class PluginRecord:
    """One entry point: where it comes from and what became of it. It has candidates or a failure, never both."""

    distribution: str
    entry_point: str
    """``name = value``"""
    name: str = ""
    """As the plugin calls itself in ``MINISGL_PLUGIN``"""
    version: str = ""
    file: str = ""
    editable: bool = False
    import_ms: float = 0.0
    heavy_imports: tuple[str, ...] = ()
    """Heavy packages that its import pulled in first."""
    printed: str = ""
    """The first line that it wrote to standard output while it was loaded; standard error got it instead."""
    hooks: tuple[str, ...] = ()
    candidates: tuple[Candidate, ...] = ()
    failure: str = ""
    excluded: str = ""
    """The list that keeps it out: ``allow`` or ``deny``; it is not imported then."""

    def to_json(self) -> dict[str, Any]:
        """As plain JSON data."""
        own = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "candidates"}
        texts = {name: own[name] or None for name in ("printed", "failure", "excluded")}
        lists = {"heavy_imports": list(self.heavy_imports), "hooks": list(self.hooks)}
        backends = [item.key for item in self.candidates]
        return {**own, **texts, **lists, "import_ms": round(self.import_ms, 3), "backends": backends}


@dataclass(frozen=True, slots=True)
class Note:
    """Something odd about the installation itself, such as stale metadata that hides a distribution."""

    distribution: str
    text: str


@dataclass(frozen=True)
class Registry:
    """All plugins of this installation."""

    plugins: tuple[PluginRecord, ...]
    notes: tuple[Note, ...] = ()
    manager: pluggy.PluginManager | None = field(default=None, compare=False, repr=False)
    """Holds the plugins that passed every check, by the name that :class:`PluginRecord` calls ``distribution``."""

    def candidates(self, role: Role) -> tuple[Candidate, ...]:
        """Every backend on offer for a role, in a fixed order that does not depend on installation."""
        found = [item for plugin in self.plugins for item in plugin.candidates if item.spec.role == role]
        owned = {item.spec.name for item in found if item.incumbent}
        named = (replace(item, qualified=item.spec.name in owned and not item.incumbent) for item in found)
        return tuple(sorted(named, key=lambda item: (item.spec.name, item.distribution, item.index)))

    def without_requirements(self, candidate: Candidate) -> Registry:
        """As if everything that a candidate requires were installed."""

        def met(item: Candidate) -> Candidate:
            return replace(item, spec=replace(item.spec, requires=())) if item.key == candidate.key else item

        plugins = (replace(plugin, candidates=tuple(map(met, plugin.candidates))) for plugin in self.plugins)
        return Registry(tuple(plugins), self.notes, self.manager)

    def failures(self) -> tuple[PluginRecord, ...]:
        """The plugins that could not be loaded."""
        return tuple(plugin for plugin in self.plugins if plugin.failure)

    def excluded(self) -> dict[str, str]:
        """The list, ``allow`` or ``deny``, by each distribution that it keeps out: what these offer is not known."""
        return {plugin.distribution: plugin.excluded for plugin in self.plugins if plugin.excluded}

    def restricted(self, allow: Sequence[str] | None, deny: Sequence[str]) -> Registry:
        """The plugins that the lists exclude are marked so and offer nothing.

        Raises :class:`ConfigError` for a name that matches nothing.
        """
        check_lists([plugin.distribution for plugin in self.plugins], allow, deny)
        plugins = []
        for plugin in self.plugins:
            excluded = plugin.excluded or exclusion(plugin.distribution, allow, deny)
            plugins.append(replace(plugin, candidates=(), failure="", excluded=excluded) if excluded else plugin)
        return Registry(tuple(plugins), self.notes, self.manager)

    def announce(self, plan: Mapping[str, object]) -> None:
        """Call the observers. One that raises is logged and hinders nobody."""
        if self.manager is None:
            return
        plugins = self.manager.get_plugins()
        kept = {plugin.distribution for plugin in self.plugins if not (plugin.failure or plugin.excluded)}
        for plugin in plugins:
            name = self.manager.get_name(plugin) or ""
            if name.partition(":")[0] not in kept:
                continue
            caller = self.manager.subset_hook_caller("minisgl_plan_resolved", plugins - {plugin})
            try:
                with as_guest():
                    caller(plan=plan)
            except (Exception, ProcessEndsError):
                logger.exception("the plan observer of plugin %s failed", name)


def exclusion_lines(excluded: Mapping[str, str]) -> tuple[str, ...]:
    """:meth:`Registry.excluded` for people, a text for each list."""
    lists: dict[str, list[str]] = {}
    for distribution, name in excluded.items():
        lists.setdefault(name, []).append(distribution)
    return tuple(f"plugins.{name} keeps out {', '.join(found)}" for name, found in sorted(lists.items()))


def exclusion(distribution: str, allow: Sequence[str] | None, deny: Sequence[str]) -> str:
    """Which list keeps a distribution out; empty if none does. The core itself is always in."""
    name = canonicalize_name(distribution)
    if name == CORE:
        return ""
    if name in {canonicalize_name(item) for item in deny}:
        return "deny"
    if allow is not None and name not in {canonicalize_name(item) for item in allow}:
        return "allow"
    return ""


def check_lists(installed: Sequence[str], allow: Sequence[str] | None, deny: Sequence[str]) -> None:
    """Raise :class:`ConfigError` for a listed name that no installed plugin has, and for denying the core."""
    known = {canonicalize_name(name) for name in installed}
    for setting, names in (("plugins.allow", allow or ()), ("plugins.deny", deny)):
        for name in names:
            if canonicalize_name(name) not in known:
                raise ConfigError(
                    f"{setting} names {name!r}, which is no installed plugin",
                    field=setting,
                    value=name,
                    # the nearest name is no guess for deny: it would switch off another plugin
                    remedy=(nearest(name, known) if setting == "plugins.allow" else "")
                    or f"installed: {', '.join(sorted(known)) or 'none'}",
                )
    if CORE in {canonicalize_name(name) for name in deny}:
        raise ConfigError(
            f"plugins.deny names {CORE}, which nothing runs without",
            field="plugins.deny",
            value=CORE,
            remedy="remove it; choose other backends by name in [backends]",
        )
