"""The examination: metadata, each plugin's import, the backends, the plan. Nothing that it meets ends it."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from minisgl_core.builtin.devices import cuda_use
from minisgl_core.installation import Installed, exclusion
from minisgl_core.installation.distributions import Found, scan
from minisgl_core.registry import DeviceFacts, PlanQuery, PluginRecord, Registry, discover
from minisgl_core.registry.records import CORE
from minisgl_core.sandbox.imports import import_plugin, private_imports

from .backends import check_caps, check_clashes, check_code, check_requirements, offered
from .finding import Finding
from .isolated import Ending, Isolated
from .machine import Machine, check_memory, look_around, weight_bytes
from .metadata import check_distributions, check_editable, check_origin, check_requires
from .plans import RankPlan, plans_of_ranks

__all__ = ["Diagnosis", "ImportCost", "diagnose"]

SLOW_IMPORT_MS: Final = 100.0


@dataclass(frozen=True, slots=True)
class ImportCost:
    """A plugin's import in a fresh process. ``ms`` None: it could not be measured."""

    distribution: str
    module: str
    ms: float | None
    heavy: tuple[str, ...] = ()
    device_use: str = ""
    """How the import initialises a device; empty if it does not"""
    effects: tuple[str, ...] = ()
    """What the import changes in the process"""
    private: tuple[str, ...] = ()
    """Modules of the core that are no part of the contract"""
    problem: str = ""
    ending: Ending = Ending.NONE

    def to_json(self) -> dict[str, Any]:
        """As plain JSON data."""
        return {
            "distribution": self.distribution,
            "module": self.module,
            "import_ms": None if self.ms is None else round(self.ms, 3),
            "heavy_imports": list(self.heavy),
            "device_use": self.device_use or None,
            "effects": list(self.effects),
            "private_imports": list(self.private),
        }


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Everything that was found. It is well if nothing is ``wrong``."""

    machine: Machine
    imports: tuple[ImportCost, ...]
    ranks: tuple[RankPlan, ...]
    findings: tuple[Finding, ...]

    @property
    def well(self) -> bool:
        """Is nothing wrong?"""
        return all(finding.level != "wrong" for finding in self.findings)

    def to_json(self) -> dict[str, Any]:
        """As plain JSON data."""
        return {
            "well": self.well,
            "machine": self.machine.to_json(),
            "plugins": [item.to_json() for item in self.imports],
            "ranks": [item.to_json() for item in self.ranks],
            "findings": [item.to_json() for item in self.findings],
        }


def diagnose(
    device: DeviceFacts,
    *,
    query: PlanQuery | None = None,
    model: Path | None = None,
    allow: Sequence[str] | None = None,
    deny: Sequence[str] = (),
    timeout_s: float = 60.0,
) -> Diagnosis:
    """Examine this installation. ``query``: what to make each rank's plan for; ``model``: where its weights are.

    Every plugin is first imported in a process of its own, so that one that crashes there is kept out of this one.
    Raises :class:`~minisgl_core.errors.ConfigError` for lists or a query that make no sense.
    """
    distributions = list(importlib.metadata.distributions())
    found = [item for item in scan(distributions)[0] if item.name != CORE and not exclusion(item.name, allow, deny)]
    imports = [cost for item in found for cost in _import_costs(item, timeout_s)]
    killers = sorted({cost.distribution for cost in imports if cost.ending is not Ending.NONE})
    registry = discover(distributions, allow=allow, deny=(*deny, *killers))
    machine = look_around(device, timeout_s)
    findings = [
        *check_distributions(distributions, registry),
        *_plugin_findings(found, registry, imports),
        *_backend_findings(registry, device, timeout_s),
    ]
    ranks: list[RankPlan] = []
    if query is not None:
        ranks, of_ranks = plans_of_ranks(query, registry, machine.devices)
        findings.extend(of_ranks)
        if model is not None:
            findings.extend(check_memory(machine, weight_bytes(model), query.tp_size))
    return Diagnosis(machine, tuple(imports), tuple(ranks), tuple(findings))


def _import_costs(found: Found, timeout_s: float) -> Iterator[ImportCost]:
    for entry in found.entries:
        with Isolated(timeout_s) as process:
            device_use = f"{cuda_use.__module__}:{cuda_use.__qualname__}"
            answer, problem, ending = process.ask(import_plugin, module=entry.module, device_use=device_use)
        if problem:
            yield ImportCost(found.name, entry.module, None, problem=problem, ending=ending)
        else:
            yield ImportCost(
                found.name,
                entry.module,
                answer["ms"],
                tuple(answer["heavy"]),
                answer["device"],
                tuple(answer["effects"]),
                tuple(private_imports(entry.module)),
            )


def _plugin_findings(found: Sequence[Found], registry: Registry, imports: Sequence[ImportCost]) -> Iterator[Finding]:
    environment = Installed()
    for item in found:
        stale = check_editable(item)
        if stale is not None:
            yield stale
            continue
        yield from check_requires(item.name, item.distribution.requires or (), environment)
        for record in registry.plugins:
            if record.distribution == item.name:
                yield from _record_findings(item, record, environment)
        for cost in imports:
            if cost.distribution == item.name:
                yield from _cost_findings(cost)


def _record_findings(found: Found, record: PluginRecord, environment: Installed) -> Iterator[Finding]:
    if record.printed:
        text = f"it prints to standard output when it is loaded, which every command does: {record.printed!r}"
        yield Finding("note", "plugin", found.name, text, "print nothing there, or use logging")
    if not record.failure:
        origin = check_origin(found, record.file)
        if origin is not None:
            yield origin
        return
    gone = [entry.module for entry in found.entries if not environment.has_module(entry.module)]
    if gone and not found.problem:
        text = f"its entry point names the module {gone[0]}, which is not there"
        yield Finding("wrong", "metadata", found.name, text, f"pip uninstall {found.name}, or install it again")
        return
    name = found.name
    remedy = f'pip install --force-reinstall {name}, pip uninstall {name}, or set [plugins] deny = ["{name}"]'
    yield Finding("wrong", "plugin", found.name, f"it is not used: {record.failure}", remedy)


def _cost_findings(cost: ImportCost) -> Iterator[Finding]:
    def finding(text: str, remedy: str, *, wrong: bool = True) -> Finding:
        return Finding("wrong" if wrong else "note", "import", cost.distribution, text, remedy)

    inside = "import it inside functions, or in the factory's module"
    if cost.ending is not Ending.NONE:
        longer = "give it longer with --timeout SECONDS; if it never ends, " if cost.ending is Ending.TIMED_OUT else ""
        name = cost.distribution
        kept_out = f'{longer}pip uninstall {name}, or set [plugins] deny = ["{name}"]: no command can use it'
        yield finding(f"importing {cost.module}, the process {cost.problem}", kept_out)
    if cost.device_use:
        text = f"importing {cost.module} initialises a device: {cost.device_use}"
        yield finding(text, "leave devices to the factory or the probe")
    for effect in cost.effects:
        text = f"importing {cost.module} {effect}"
        yield finding(text, "the whole process shares it: leave it to the user")
    if cost.private:
        text = f"it imports what is no part of the contract: {', '.join(cost.private)}"
        yield finding(text, "import minisgl_core.plugin_api only: the rest changes without notice", wrong=False)
    if cost.heavy:
        yield finding(f"importing {cost.module} imports {', '.join(cost.heavy)}, {cost.ms:.0f} ms", inside)
    elif cost.ms is not None and cost.ms > SLOW_IMPORT_MS:
        yield finding(f"importing {cost.module} takes {cost.ms:.0f} ms", inside, wrong=False)


def _backend_findings(registry: Registry, device: DeviceFacts, timeout_s: float) -> Iterator[Finding]:
    environment, candidates = Installed(), offered(registry, device)
    yield from check_clashes(registry)
    yield from check_caps(registry)
    yield from check_requirements(candidates, environment)
    yield from check_code(candidates, environment, timeout_s)
