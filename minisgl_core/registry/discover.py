"""Discovery: every plugin is imported, checked and called for its backends in isolation from all others."""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from importlib.metadata import Distribution
from typing import Any, Final, NamedTuple

from minisgl_core import __version__
from minisgl_core.installation import Note, check_lists, exclusion
from minisgl_core.installation.distributions import Found, core_requirement_problem, is_editable, scan
from minisgl_core.plugin_api import ROLES, BackendSpec
from minisgl_core.plugin_api.spec_validation import unused_words
from minisgl_core.sandbox import Sandbox, SandboxError, diverted_output, notify_if_slow
from minisgl_core.sandbox.imports import HEAVY

from .hook_validation import OBSERVER, PluginFault, check_api, check_hooks, check_specs
from .records import CORE, Candidate, PluginRecord, Registry

__all__ = ["BUILTIN", "discover"]

BUILTIN: Final = "minisgl_core.builtin.plugin"
"""The core's own plugin module; loaded like any other, and there even where the core is not installed but on a path."""


class _Source(NamedTuple):
    """One entry point before it is loaded. ``record`` already holds what its metadata says, a failure included."""

    record: PluginRecord
    found: Found | None = None
    module: str = ""
    attribute: str = ""


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
    core = PluginRecord(CORE, f"core = {BUILTIN}", version=__version__, editable=editable)
    sources = [_Source(core, module=BUILTIN), *(source for item in found for source in _sources(item, allow, deny))]
    loaded: dict[int, str] = {}
    with diverted_output(), Sandbox() as sandbox:
        registry = Registry(tuple(_load(source, sandbox, loaded) for source in sources))
    return replace(registry, notes=(*notes, *_notes_on_specs(registry)))


def _notes_on_specs(registry: Registry) -> Iterator[Note]:
    """Names that belong to another distribution, and words that this core does not know."""
    for item in (item for role in ROLES for item in registry.candidates(role)):
        name = f"{item.spec.role}:{item.spec.name}"
        if item.qualified:
            yield Note(item.distribution, f"its {name} is {item.typed_name}; the bare name is another distribution's")
        yield from (Note(item.distribution, f"its {name} {text}") for text in unused_words(item.spec))


def _sources(found: Found, allow: Sequence[str] | None, deny: Sequence[str]) -> list[_Source]:
    entries = sorted(found.entries, key=lambda entry: entry.name)
    texts = [f"{entry.name} = {entry.value}" for entry in entries]
    excluded = exclusion(found.name, allow, deny)
    record = PluginRecord(found.name, ", ".join(texts), version=found.version, excluded=excluded)
    if problem := found.problem or _core_problem(found):
        return [_Source(replace(record, failure=problem))]
    record = replace(record, editable=is_editable(found.distribution))
    return [
        _Source(replace(record, entry_point=text), found, entry.module, entry.attr or "")
        for text, entry in zip(texts, entries, strict=True)
    ]


def _core_problem(found: Found) -> str:
    try:
        requires = found.header("Requires-Dist") or found.distribution.requires or ()
        return core_requirement_problem(requires, __version__)
    except Exception as error:
        return f"its requirements cannot be read: {type(error).__name__}: {error}"


def _load(source: _Source, sandbox: Sandbox, loaded: dict[int, str]) -> PluginRecord:
    record, name = source.record, source.record.distribution
    if record.excluded:
        return replace(record, failure="")
    if record.failure:
        return record
    facts: dict[str, Any] = {}
    failure, output = "", None
    doing = f'importing plugin {name} ([plugins] deny = ["{name}"] would skip it)'
    try:
        with notify_if_slow(doing), diverted_output() as output:
            facts["effects"] = _effects(source, sandbox)
            _load_into(source, facts, loaded)
    except KeyboardInterrupt:
        print(f"interrupted while plugin {name} was loaded", file=sys.stderr)
        raise
    except PluginFault as fault:
        failure = str(fault)
    except BaseException as error:  # a plugin may even call sys.exit() when imported
        failure = f"{type(error).__name__}: {error}".strip(": \n").replace("\n", " ")
    return replace(record, **facts, failure=failure, printed=output.first_line if output else "")


def _effects(source: _Source, sandbox: Sandbox) -> tuple[str, ...]:
    """What importing the plugin does to the process, judged in another one, again only after its files have changed.

    Raises :class:`PluginFault` if the import ends that process. What raises there will raise here, too.
    """
    if source.found is None or source.module in sys.modules:
        return ()
    versions = (source.record.version, *source.found.stamps(source.module))
    try:
        answer = sandbox.call("minisgl_core.sandbox.imports:import_plugin", {"module": source.module}, versions)
    except SandboxError as error:
        raise PluginFault(f"importing it would end or block every command: the process {error}") from error
    return tuple(answer["value"]["effects"]) if answer["ok"] else ()


def _load_into(source: _Source, facts: dict[str, Any], loaded: dict[int, str]) -> None:
    """Import, check and call one plugin; ``facts`` is what is known of it, also if it fails half-way. ``loaded``: the
    entry points so far, by their object's id.
    """
    plugin, own = _import(source, facts), f"{source.record.distribution}: {source.record.entry_point}"
    if (first := loaded.setdefault(id(plugin), own)) != own:
        raise PluginFault(f"it is the same plugin as {first}; keep one of the two entry points")
    hooks = check_hooks(plugin)
    facts["hooks"] = tuple(hooks)
    check_api(plugin, hooks)
    facts["name"] = plugin.MINISGL_PLUGIN.name
    offers = {name: hook for name, hook in hooks.items() if name != OBSERVER}
    specs: list[BackendSpec] = [spec for name, hook in offers.items() for spec in check_specs(name, hook())]
    distribution, version = source.record.distribution, source.record.version
    offered = [Candidate(spec, distribution, version, index) for index, spec in enumerate(specs)]
    _refuse_duplicates(offered)
    facts.update(candidates=tuple(offered), observer=hooks.get(OBSERVER))


def _import(source: _Source, facts: dict[str, Any]) -> Any:
    before = {name for name in HEAVY if name in sys.modules}
    start = time.perf_counter()
    try:
        plugin: Any = importlib.import_module(source.module)
        for attribute in filter(None, source.attribute.split(".")):
            plugin = getattr(plugin, attribute)
    finally:
        facts["import_ms"] = (time.perf_counter() - start) * 1000
        facts["heavy_imports"] = tuple(name for name in HEAVY if name in sys.modules and name not in before)
        facts["file"] = getattr(sys.modules.get(source.module), "__file__", None) or ""
    return plugin


def _refuse_duplicates(candidates: Sequence[Candidate]) -> None:
    seen: set[str] = set()
    for candidate in candidates:
        if candidate.key in seen:
            raise PluginFault(f"it offers {candidate.spec.role}:{candidate.label} twice; give one a variant")
        seen.add(candidate.key)
