"""Error texts of resolving: which slots have no backend, every candidate's reasons, and what to install."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from minisgl_core.errors import BackendError, UsageError, nearest
from minisgl_core.plugin_api import Reason, Role

from .query import PlanQuery, Slot
from .records import Registry, told_exclusions
from .solve import Field, Solution

__all__ = ["SEE_EXPLAIN", "UnknownBackendError", "refusal", "unknown_backend"]

SEE_EXPLAIN: Final = "`minisgl explain` shows every candidate and what would allow it"
"""The remedy where there is no better one; ``explain`` itself leaves it out."""
_CPU_SIM: Final = "minisgl-cpu-sim"
_WHERE: Final[Mapping[str, Mapping[str, tuple[str, ...]]]] = {
    "cpu": dict.fromkeys(("attention", "kv", "graph", "moe"), (_CPU_SIM,)),
    "cuda": {
        "kv": ("minisgl-cuda",),
        "attention": ("minisgl-flashinfer", "minisgl-fa"),
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


class UnknownBackendError(BackendError, UsageError):
    """A name that no loaded plugin offers: the call is wrong, as with an unknown role."""

    exit_code = UsageError.exit_code


def unknown_backend(role: Role, text: str, device_kind: str, registry: Registry) -> UnknownBackendError:
    """The error for a backend name that no loaded plugin offers."""
    known = sorted({item.spec.name for item in registry.candidates(role)})
    name = text.partition("@")[0].partition("/")[0]
    parts = [f"installed for {role}: {', '.join(item.label for item in registry.candidates(role)) or 'none'}"]
    failed = [f"{plugin.distribution} ({plugin.failure})" for plugin in registry.failures()]
    if failed:
        parts.append(f"failed to load: {', '.join(failed)}")
    parts.extend(told_exclusions(registry.excluded()))
    parts.extend(f"{note.distribution}: {note.text}" for note in registry.notes)
    remedy = nearest(text, known)
    if not remedy:
        packages = (_NAMES[name],) if name in _NAMES else _WHERE[device_kind].get(role, ())
        remedy = _pip(packages, registry) or "`minisgl plugins` lists what is installed"
    return UnknownBackendError(
        f"no plugin offers the {role} backend {text!r} ({'; '.join(parts)})",
        field=f"backends.{role}",
        value=text,
        remedy=remedy,
    )


def refusal(query: PlanQuery, solution: Solution, registry: Registry) -> BackendError:
    """The error for a query without a solution: its smallest conflict, with the reasons of each candidate."""
    fields = [field for field in solution.fields if field.slot in solution.conflict]
    if _is_unsupported(fields, query, solution):
        return _unsupported_architecture(fields[0], query)
    labels = " and ".join(field.slot.label for field in fields)
    what = f"{query.model.architecture} in {query.dtype} on {query.device}"
    if len(fields) > 1:
        head = f"no page size, KV layout and graph level serve {labels} together for {what}"
        texts = [f"{field.slot.label}: {_reasons(field, query, solution)}" for field in fields]
    else:
        head = f"no backend for {labels} ({what})"
        texts = [_reasons(field, query, solution) for field in fields]
    absent = _absent_plugins(fields, query, solution, registry)
    if absent:
        head = f"no plugin for {query.device.kind} is installed: pip install {' '.join(absent)}; {head}"
    failed = [f"plugin {plugin.distribution} failed to load: {plugin.failure}" for plugin in registry.failures()]
    return BackendError(
        f"{head}: {'; '.join([*texts, *failed, *told_exclusions(registry.excluded())])}",
        field=fields[0].slot.label,
        value=fields[0].selection.names or None,
        remedy="" if absent else _remedy(query, fields, registry),
    )


def _is_unsupported(fields: Sequence[Field], query: PlanQuery, solution: Solution) -> bool:
    """Does no model class serve the architecture, whatever else they lack?"""
    return fields[0].slot.role == "models" and all(
        any(reason.code == "architecture" for reason in verdict.reasons)
        for verdict in fields[0].verdicts(query, solution.joint)
    )


def _unsupported_architecture(field: Field, query: PlanQuery) -> BackendError:
    name = query.model.architecture
    known = {known for candidate, _ in field.ranked for box in candidate.spec.caps for known in box.architectures}
    return BackendError(
        f"unsupported architecture {name!r}; known: {', '.join(sorted(known)) or 'none'}",
        field="architectures",
        value=name,
    )


def _absent_plugins(
    fields: Sequence[Field], query: PlanQuery, solution: Solution, registry: Registry
) -> tuple[str, ...]:
    """This project's plugins for the device, if none of them is here and nothing else is meant for that device."""
    served = _WHERE[query.device.kind]
    roles = {field.slot.role for field in solution.fields}
    packages = tuple(dict.fromkeys(name for role, names in served.items() if role in roles for name in names))
    if not {plugin.distribution for plugin in registry.plugins}.isdisjoint(packages):
        return ()
    lacking = any(
        field.slot.role in served
        and all(
            any(reason.code in ("device", "stand_in") for reason in verdict.reasons)
            for verdict in field.verdicts(query, solution.joint)
        )
        for field in fields
    )
    return packages if lacking else ()


def _reasons(field: Field, query: PlanQuery, solution: Solution) -> str:
    verdicts = field.verdicts(query, solution.joint)
    if not verdicts:
        return "none is installed"
    return "; ".join(
        f"{verdict.candidate.label}: {', '.join(map(str, verdict.reasons)) or 'fits alone'}" for verdict in verdicts
    )


def _remedy(query: PlanQuery, fields: Iterable[Field], registry: Registry) -> str:
    for field in fields:
        kept_out = not registry.excluded().keys().isdisjoint(_WHERE[query.device.kind].get(field.slot.role, ()))
        if kept_out or all(_needs_install(reasons) for _, reasons in field.ranked):
            return _install_for(field.slot, query, registry)
    return SEE_EXPLAIN


def _needs_install(reasons: Iterable[Reason]) -> bool:
    return any(reason.code in ("requires", "stand_in") for reason in reasons)


def _install_for(slot: Slot, query: PlanQuery, registry: Registry) -> str:
    packages = _WHERE[query.device.kind].get(slot.role, ())
    if slot.role == "models":
        return f"install a plugin with a model for {query.model.architecture}, or use a model of a known architecture"
    return _pip(packages, registry) or SEE_EXPLAIN


def _pip(packages: Sequence[str], registry: Registry) -> str:
    """How to get one of these; empty if all are here. What the lists of the config keep out need not be installed."""
    here, lists = {plugin.distribution for plugin in registry.plugins}, registry.excluded()
    changes = {"deny": "take {} out of plugins.deny", "allow": "add {} to plugins.allow"}
    kept_out = [changes[lists[package]].format(package) for package in packages if package in lists]
    return " or ".join(kept_out or [f"pip install {package}" for package in packages if package not in here])
