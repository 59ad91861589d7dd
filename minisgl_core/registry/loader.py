"""Discovery: every plugin is imported, checked and asked for its backends in isolation from all others."""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib.metadata import Distribution, EntryPoint
from types import ModuleType
from typing import Any, Final

import pluggy

from minisgl_core import __version__
from minisgl_core.plugin_api import PROJECT, ROLES, BackendSpec, hooks

from .claims import unused_words
from .contract import HOOKS, PluginFault, check_api, check_hooks, check_specs
from .guest import ProcessEndsError, Stream, as_guest, told_if_slow
from .records import CORE, Candidate, Note, PluginRecord, Registry, check_lists, exclusion
from .scan import Found, core_requirement_problem, is_editable, scan

__all__ = ["BUILTIN", "discover"]

BUILTIN: Final = "minisgl_core.builtin.plugin"
"""The core's own plugin module; loaded like any other, and there even where the core is not installed but on a path."""

_HEAVY: Final = ("torch", "pydantic", "triton", "flashinfer", "flash_attn", "transformers")


def discover(
    distributions: Iterable[Distribution] | None = None,
    *,
    allow: Sequence[str] | None = None,
    deny: Sequence[str] = (),
) -> Registry:
    """Load all plugins among these distributions (None = the installed ones).

    A plugin's failure never raises here: it is in its record. ``allow`` and ``deny`` keep distributions from being
    imported; a name in them that matches nothing is a :class:`ConfigError`.
    """
    found, notes = scan(importlib.metadata.distributions() if distributions is None else distributions)
    editable = any(is_editable(item.distribution) for item in found if item.name == CORE)
    found = [item for item in found if item.name != CORE]
    check_lists([CORE, *(item.name for item in found)], allow, deny)
    manager = _new_manager()
    sources = [_Source(CORE, f"core = {BUILTIN}", __version__, module=BUILTIN, editable=editable)]
    sources += [source for item in found for source in _sources(item, allow, deny)]
    records = []
    with as_guest(), told_if_slow() as doing:
        for source in sources:
            doing(f'importing plugin {source.distribution} ([plugins] deny = ["{source.distribution}"] would skip it)')
            records.append(_load(source, manager))
    return Registry(tuple(records), (*notes, *_notes_on_specs(Registry(tuple(records)))), manager)


def _notes_on_specs(registry: Registry) -> Iterator[Note]:
    """Names that belong to another distribution, and words that this core does not know."""
    for item in (item for role in ROLES for item in registry.candidates(role)):
        name = f"{item.spec.role}:{item.spec.name}"
        if item.qualified:
            yield Note(item.distribution, f"its {name} is {item.typed_name}; the bare name is another distribution's")
        yield from (Note(item.distribution, f"its {name} {text}") for text in unused_words(item.spec))


@dataclass(frozen=True, slots=True)
class _Source:
    """One plugin before it is loaded."""

    distribution: str
    entry_point: str
    version: str
    module: str = ""
    attribute: str = ""
    editable: bool = False
    problem: str = ""
    excluded: str = ""


def _sources(found: Found, allow: Sequence[str] | None, deny: Sequence[str]) -> list[_Source]:
    version, problem = next(iter(found.header("Version")), ""), found.problem
    if not problem:
        try:
            requires = found.header("Requires-Dist") or found.distribution.requires or ()
            problem = core_requirement_problem(requires, __version__)
        except Exception as error:
            problem = f"its requirements cannot be read: {type(error).__name__}: {error}"
    excluded = exclusion(found.name, allow, deny)
    if problem:
        return [_Source(found.name, _entry_text(found.entries), version, problem=problem, excluded=excluded)]
    return [
        _Source(
            found.name,
            f"{entry.name} = {entry.value}",
            version,
            module=entry.module,
            attribute=entry.attr or "",
            editable=is_editable(found.distribution),
            excluded=excluded,
        )
        for entry in sorted(found.entries, key=lambda entry: entry.name)
    ]


def _entry_text(entries: Sequence[EntryPoint]) -> str:
    return ", ".join(f"{entry.name} = {entry.value}" for entry in entries)


@dataclass(slots=True)
class _Progress:
    """What is known of a plugin when it fails half-way."""

    name: str = ""
    file: str = ""
    import_ms: float = 0.0
    heavy_imports: tuple[str, ...] = ()
    hooks: tuple[str, ...] = ()
    candidates: tuple[Candidate, ...] = ()
    stream: Stream = field(default_factory=Stream)


def _load(source: _Source, manager: pluggy.PluginManager) -> PluginRecord:
    progress, failure = _Progress(), source.problem
    if not failure and not source.excluded:
        try:
            with as_guest() as progress.stream:
                _load_into(source, progress, manager)
        except KeyboardInterrupt:
            print(f"interrupted while plugin {source.distribution} was loaded", file=sys.stderr)
            raise
        except (PluginFault, ProcessEndsError) as fault:
            failure = str(fault)
        except BaseException as error:  # a plugin may even call sys.exit() when imported
            failure = f"{type(error).__name__}: {error}".strip(": \n").replace("\n", " ")
    return PluginRecord(
        distribution=source.distribution,
        entry_point=source.entry_point,
        name=progress.name,
        version=source.version,
        file=progress.file,
        editable=source.editable,
        import_ms=progress.import_ms,
        heavy_imports=progress.heavy_imports,
        printed=progress.stream.printed,
        hooks=progress.hooks,
        candidates=() if failure else progress.candidates,
        failure="" if source.excluded else failure,
        excluded=source.excluded,
    )


def _load_into(source: _Source, progress: _Progress, manager: pluggy.PluginManager) -> None:
    plugin = _import(source, progress)
    progress.hooks = check_hooks(plugin)
    check_api(plugin, progress.hooks)
    progress.name = plugin.MINISGL_PLUGIN.name
    scratch = _new_manager(progress.hooks)
    scratch.register(plugin, name=source.distribution)
    scratch.check_pending()
    specs: list[BackendSpec] = []
    for hook in progress.hooks:
        if hook in HOOKS.values():
            specs.extend(check_specs(hook, getattr(scratch.hook, hook)()))
    progress.candidates = tuple(
        Candidate(spec, source.distribution, source.version, index) for index, spec in enumerate(specs)
    )
    _refuse_duplicates(progress.candidates)
    name = f"{source.distribution}:{source.entry_point}"
    try:
        manager.register(plugin, name=name)
    except BaseException:
        if manager.has_plugin(name):  # pluggy before 1.7 leaves half a registration behind
            manager.unregister(name=name)
        raise


def _import(source: _Source, progress: _Progress) -> Any:
    before = {name for name in _HEAVY if name in sys.modules}
    start = time.perf_counter()
    try:
        plugin: Any = importlib.import_module(source.module)
        for attribute in filter(None, source.attribute.split(".")):
            plugin = getattr(plugin, attribute)
    finally:
        progress.import_ms = (time.perf_counter() - start) * 1000
        progress.heavy_imports = tuple(name for name in _HEAVY if name in sys.modules and name not in before)
        progress.file = getattr(sys.modules.get(source.module), "__file__", None) or ""
    return plugin


def _refuse_duplicates(candidates: Sequence[Candidate]) -> None:
    seen: set[str] = set()
    for candidate in candidates:
        if candidate.key in seen:
            raise PluginFault(f"it offers {candidate.spec.role}:{candidate.label} twice; give one a variant")
        seen.add(candidate.key)


class _Manager(pluggy.PluginManager):
    """pluggy asks every attribute of a plugin whether it is a hook, so statically that it takes most of the time."""

    def parse_hookimpl_opts(self, plugin: Any, name: str) -> pluggy.HookimplOpts | None:
        """A module's attribute is what its dictionary holds: only what ``@hookimpl`` has marked needs a closer look."""
        if isinstance(plugin, ModuleType) and not hasattr(vars(plugin).get(name), f"{PROJECT}_impl"):
            return None
        return super().parse_hookimpl_opts(plugin, name)


def _new_manager(names: Iterable[str] | None = None) -> pluggy.PluginManager:
    """With the specs of these hooks; None = of all. pluggy inspects all that it is given, so it is given little."""
    specs = hooks if names is None else ModuleType(hooks.__name__)
    for name in names or ():
        setattr(specs, name, getattr(hooks, name))
    manager = _Manager(PROJECT)
    manager.add_hookspecs(specs)
    return manager
