"""Error texts of resolving: which slots have no backend, every candidate's reasons, and what to install."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from minisgl_core.errors import BackendError, nearest
from minisgl_core.plugin_api import Reason, Role

from .query import PlanQuery, Slot
from .records import Registry
from .solve import Field, Solution

__all__ = ["refusal", "unknown_backend"]

_CPU_SIM: Final = "minisgl-cpu-sim"
_WHERE: Final[Mapping[str, Mapping[str, tuple[str, ...]]]] = {
    "cpu": dict.fromkeys(("attention", "kv", "graph", "moe"), (_CPU_SIM,)),
    "cuda": {
        "attention": ("minisgl-flashinfer", "minisgl-fa"),
        "kv": ("minisgl-cuda",),
        "graph": ("minisgl-cuda",),
        "moe": ("minisgl-moe",),
    },
}
"""Which of this project's distributions serve a role on a device."""

_NAMES: Final[Mapping[str, str]] = {
    "flashinfer": "minisgl-flashinfer",
    "fa": "minisgl-fa",
    "cuda": "minisgl-cuda",
    "triton": "minisgl-moe",
    "cpu": _CPU_SIM,
    "torch": _CPU_SIM,
    "emulated": _CPU_SIM,
}
"""Which of them brings a well-known backend name."""


def unknown_backend(role: Role, text: str, query: PlanQuery, registry: Registry) -> BackendError:
    """The error for a backend name that no loaded plugin offers."""
    known = sorted({item.spec.name for item in registry.candidates(role)})
    name = text.partition("@")[0].partition("/")[0]
    parts = [f"installed for {role}: {', '.join(item.label for item in registry.candidates(role)) or 'none'}"]
    failed = [f"{plugin.distribution} ({plugin.failure})" for plugin in registry.failures()]
    if failed:
        parts.append(f"failed to load: {', '.join(failed)}")
    excluded = [plugin.distribution for plugin in registry.plugins if plugin.excluded]
    if excluded:
        parts.append(f"excluded by plugins.allow or plugins.deny: {', '.join(excluded)}")
    parts.extend(f"{note.distribution}: {note.text}" for note in registry.notes)
    remedy = nearest(text, known)
    if not remedy:
        packages = (_NAMES[name],) if name in _NAMES else _WHERE[query.device.kind].get(role, ())
        remedy = _pip(packages) or "`minisgl plugins` lists what is installed"
    return BackendError(
        f"no plugin offers the {role} backend {text!r} ({'; '.join(parts)})",
        field=f"backends.{role}",
        value=text,
        remedy=remedy,
    )


def refusal(query: PlanQuery, solution: Solution, registry: Registry) -> BackendError:
    """The error for a query without a solution: its smallest conflict, with the reasons of each candidate."""
    fields = [field for field in solution.fields if field.slot in solution.conflict]
    labels = " and ".join(field.slot.label for field in fields)
    what = f"{query.model.architecture} in {query.dtype} on {query.device}"
    if len(fields) > 1:
        head = f"no page size, KV layout and graph level serve {labels} together for {what}"
        texts = [f"{field.slot.label}: {_reasons(field, query, solution)}" for field in fields]
    else:
        head = f"no backend for {labels} ({what})"
        texts = [_reasons(field, query, solution) for field in fields]
    failed = [f"plugin {plugin.distribution} failed to load: {plugin.failure}" for plugin in registry.failures()]
    return BackendError(
        f"{head}: {'; '.join([*texts, *failed])}",
        field=fields[0].slot.label,
        value=fields[0].selection.names or None,
        remedy=_remedy(query, fields),
    )


def _reasons(field: Field, query: PlanQuery, solution: Solution) -> str:
    verdicts = field.verdicts(query, solution.joint)
    if not verdicts:
        return "none is installed"
    return "; ".join(
        f"{verdict.candidate.label}: {', '.join(map(str, verdict.reasons)) or 'fits alone'}" for verdict in verdicts
    )


def _remedy(query: PlanQuery, fields: Iterable[Field]) -> str:
    for field in fields:
        if not field.ranked or all(_needs_install(reasons) for _, reasons in field.ranked):
            return _install_for(field.slot, query)
    return "`minisgl explain` shows every candidate and what would allow it"


def _needs_install(reasons: Iterable[Reason]) -> bool:
    return any(reason.code in ("requires", "stand_in") for reason in reasons)


def _install_for(slot: Slot, query: PlanQuery) -> str:
    packages = _WHERE[query.device.kind].get(slot.role, ())
    if slot.role == "models":
        return f"install a plugin with a model for {query.model.architecture}, or use a model of a known architecture"
    return _pip(packages) or "`minisgl explain` shows every candidate and what would allow it"


def _pip(packages: Iterable[str]) -> str:
    return " or ".join(f"pip install {package}" for package in packages)
