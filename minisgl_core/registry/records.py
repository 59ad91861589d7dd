"""What discovery found: plugins with their provenance, their failures, and the backends they offer."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from minisgl_core.installation import Note, check_lists, exclusion
from minisgl_core.plugin_api import BackendSpec, Role
from minisgl_core.plugin_api.hooks import CORE
from minisgl_core.sandbox import diverted_output

from .index import is_listed

__all__ = ["CORE", "Candidate", "Note", "PluginRecord", "Registry"]

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
        """The shortest name that means it, without the variant: ``NAME``, or ``NAME@DISTRIBUTION``."""
        return f"{self.spec.name}@{self.distribution}" if self.qualified else self.spec.name

    @property
    def label(self) -> str:
        """``NAME@DISTRIBUTION`` or ``NAME/VARIANT@DISTRIBUTION``."""
        variant = f"/{self.spec.variant}" if self.spec.variant else ""
        return f"{self.spec.name}{variant}@{self.distribution}"

    @property
    def key(self) -> str:
        """Unique in a registry: ``ROLE:`` and the label."""
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
    effects: tuple[str, ...] = ()
    """What its import changes in the process, such as ``changes the environment: X``."""
    printed: str = ""
    """The first line that it wrote to standard output while it was loaded; standard error got it instead."""
    hooks: tuple[str, ...] = ()
    candidates: tuple[Candidate, ...] = ()
    observer: Callable[..., object] | None = field(default=None, compare=False, repr=False)
    """Its hook that is notified of the plan."""
    failure: str = ""
    excluded: str = ""
    """The list that keeps it out: ``allow`` or ``deny``; it is not imported then."""

    def to_json(self) -> dict[str, Any]:
        """As plain JSON data."""
        names = [field.name for field in fields(self) if field.name not in ("candidates", "observer")]
        own = {name: getattr(self, name) for name in names}
        texts = {name: own[name] or None for name in ("printed", "failure", "excluded")}
        lists = {name: list(value) for name, value in own.items() if isinstance(value, tuple)}
        backends = [item.key for item in self.candidates]
        return {**own, **texts, **lists, "import_ms": round(self.import_ms, 3), "backends": backends}


@dataclass(frozen=True)
class Registry:
    """All plugins of this installation."""

    plugins: tuple[PluginRecord, ...]
    notes: tuple[Note, ...] = ()

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
        return replace(self, plugins=tuple(plugins))

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
            kept_out = replace(plugin, candidates=(), observer=None, failure="", excluded=excluded)
            plugins.append(kept_out if excluded else plugin)
        return replace(self, plugins=tuple(plugins))

    def announce(self, plan: Mapping[str, object]) -> None:
        """Call the observers. One that raises is logged and stops no other."""
        for plugin in self.plugins:
            if plugin.observer is None:
                continue
            code = getattr(plugin.observer, "__code__", None)
            takes_plan = code is None or "plan" in code.co_varnames[: code.co_argcount]
            try:
                with diverted_output():
                    plugin.observer(**({"plan": plan} if takes_plan else {}))
            except Exception:
                logger.exception("the plan observer of plugin %s failed", plugin.distribution)
