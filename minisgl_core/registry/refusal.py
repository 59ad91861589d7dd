"""Error texts of resolving: which entries have no backend, every candidate's reasons, and what to install."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Final, NamedTuple

from minisgl_core.errors import BackendError, UsageError, nearest
from minisgl_core.installation import Environment, exclusion_lines
from minisgl_core.plugin_api import Reason, Role

from .advice import Adviser
from .index import brings, serving
from .records import Registry
from .solve import Field, Solution, Verdict

__all__ = ["SEE_EXPLAIN", "UnknownBackendError", "refusal", "unknown_backend"]

SEE_EXPLAIN: Final = "`minisgl explain` shows every candidate and what would allow it"
"""The remedy where there is no better one; ``explain`` itself leaves it out."""


_FROM_WHEELS: Final = "(built by make wheels: see --find-links in the README)"
_GRAVEST: Final = {"device": 0, "sm": 1, "requires": 2}
"""Codes of the reasons to give first: what cannot be changed, then what can be installed."""


class UnknownBackendError(BackendError, UsageError):
    """A name that no loaded plugin offers: the call is wrong, as with an unknown role."""

    exit_code = UsageError.exit_code


def unknown_backend(role: Role, text: str, device_kind: str, registry: Registry) -> UnknownBackendError:
    """The error for a backend name that no loaded plugin offers."""
    known = sorted({item.spec.name for item in registry.candidates(role)})
    name = text.partition("@")[0].partition("/")[0]
    failed = [f"{plugin.distribution} ({plugin.failure})" for plugin in registry.failures()]  # may have offered it
    parts = [f"failed to load: {', '.join(failed)}"] if failed else []
    parts.append(f"installed for {role}: {', '.join(item.label for item in registry.candidates(role)) or 'none'}")
    parts.extend(exclusion_lines(registry.excluded()))
    parts.extend(f"{note.distribution}: {note.text}" for note in registry.notes)
    remedy = nearest(text, known)
    if not remedy:
        packages = brings(name) or serving(device_kind, role)
        remedy = _pip(packages, registry) or "`minisgl plugins` lists what is installed"
    return UnknownBackendError(
        f"no plugin offers the {role} backend {text!r} ({'; '.join(parts)})",
        field=f"backends.{role}",
        value=text,
        remedy=remedy,
    )


def refusal(solution: Solution, registry: Registry, environment: Environment | None) -> BackendError:
    """The error for a query without a solution: its smallest conflict, and below it the reasons of each candidate with
    what would allow it.
    """
    fields, device = [field for field in solution.fields if field.entry in solution.conflict], solution.query.device
    if fields[0].entry.role == "models" and _all_lack("architecture", solution.verdicts(fields[0])):
        return _unsupported_architecture(fields[0])
    message = _headline(fields)
    absent, named = _absent_plugins(fields, solution, registry), _named(fields, solution, registry)
    if absent:
        install = f"pip install {' '.join(absent)} {_FROM_WHEELS}"
        message = f"no plugin for {device.kind} is installed: {install}; {message}"
    failed = [f"plugin {plugin.distribution} failed to load: {plugin.failure}" for plugin in registry.failures()]
    adviser = Adviser(solution, registry, environment)
    details = [*_details(fields, adviser), *failed, *exclusion_lines(registry.excluded())]
    if named is not None and not absent:
        details.insert(0, f"{message}; no other was considered")
        message = named.message
    return BackendError(
        message,
        field=fields[0].entry.label,
        value=fields[0].selection.names or None,
        remedy="" if absent else named.remedy if named else _remedy(fields, registry),
        details=details,
    )


def _headline(fields: Sequence[Field]) -> str:
    query = fields[0].query
    labels = " and ".join(field.entry.label for field in fields)
    what = f"{query.model.architecture} in {query.dtype} on {query.device}"
    if len(fields) > 1:
        return f"no page size, KV layout and graph level serve {labels} together for {what}"
    return f"no backend for {labels} ({what})"


class _NamedInVain(NamedTuple):
    message: str
    remedy: str


def _named(fields: Sequence[Field], solution: Solution, registry: Registry) -> _NamedInVain | None:
    """What to say first where config names the backends of a plan entry, so that no other was considered."""
    field = next((field for field in fields if not field.selection.auto), None)
    if field is None:
        return None
    names, role = field.selection.names, field.entry.role
    others = [
        {item.candidate.typed_name: None for item in other.outsiders(solution.joint) if not item.reasons}
        for other in solution.fields
        if other.entry.role == role and other.selection == field.selection
    ]
    shared = [name for name in others[0] if all(name in names for names in others)]
    message = f"you named {', '.join(names)} for {role}; it {_lack(solution.verdicts(field))}"
    return _NamedInVain(message, f"leave it out, or use {' or '.join(shared)}" if shared else _remedy(fields, registry))


def _lack(verdicts: Sequence[Verdict]) -> str:
    """What all of these lack, else what the nearest one does."""
    nearest = min(verdicts, key=lambda verdict: len(verdict.reasons))
    shared = [
        reason
        for reason in nearest.reasons
        if all(any(other.code == reason.code for other in verdict.reasons) for verdict in verdicts)
    ]
    reason = min(shared or nearest.reasons, key=lambda reason: _GRAVEST.get(reason.code, len(_GRAVEST)), default=None)
    if reason is None:
        return "does not go with the rest of the plan"
    if reason.code == "requires":
        return f"needs {reason.wanted.replace('import:', 'the module ').replace('exec:', 'the program ')}"
    if reason.code in ("device", "sm"):
        return f"needs {reason.supported.upper() if reason.code == 'device' else reason.supported}"
    return f"does not fit ({replace(reason, fix='')})"


def _all_lack(code: str, verdicts: Sequence[Verdict], or_else: str = "") -> bool:
    """Has every one of them a reason of this code, or of the other one?"""
    return all(any(reason.code in (code, or_else) for reason in verdict.reasons) for verdict in verdicts)


def _unsupported_architecture(field: Field) -> BackendError:
    name = field.query.model.architecture
    known = {known for item in field.ranked for caps in item.candidate.spec.caps for known in caps.architectures}
    return BackendError(
        f"unsupported architecture {name!r}; known: {', '.join(sorted(known)) or 'none'}",
        field="architectures",
        value=name,
    )


def _absent_plugins(fields: Sequence[Field], solution: Solution, registry: Registry) -> tuple[str, ...]:
    """The listed plugins for the device, if none of them is here and nothing else is meant for that device."""
    kind = solution.query.device.kind
    packages = serving(kind, *{field.entry.role for field in solution.fields})
    if not {plugin.distribution for plugin in registry.plugins}.isdisjoint(packages):
        return ()
    lacking = any(
        serving(kind, field.entry.role) and _all_lack("device", solution.verdicts(field), "stand_in")
        for field in fields
    )
    return packages if lacking else ()


def _details(fields: Sequence[Field], adviser: Adviser) -> Iterator[str]:
    """A line for each candidate."""
    for field in fields:
        verdicts = adviser.solution.verdicts(field)
        head = f"{field.entry.label}: " if len(fields) > 1 else ""
        if not verdicts:
            yield f"{head}none is installed"
        for verdict in verdicts:
            why = ", ".join(map(str, verdict.reasons)) or "fits alone"
            advice = " or ".join(text for text in adviser.would_allow(field.entry, verdict) if text not in why)
            yield f"{head}{verdict.candidate.label}: {why}{f' ({advice} would do)' if advice else ''}"


def _remedy(fields: Iterable[Field], registry: Registry) -> str:
    for field in fields:
        packages = serving(field.query.device.kind, field.entry.role)
        kept_out = not registry.excluded().keys().isdisjoint(packages)
        if kept_out or all(_needs_install(item.static) for item in field.ranked):
            if field.entry.role == "models":
                architecture = field.query.model.architecture
                return f"install a plugin with a model for {architecture}, or use a model of a known architecture"
            return _pip(packages, registry) or SEE_EXPLAIN
    return SEE_EXPLAIN


def _needs_install(reasons: Iterable[Reason]) -> bool:
    return any(reason.code in ("requires", "stand_in") for reason in reasons)


def _pip(packages: Sequence[str], registry: Registry) -> str:
    """How to get one of these; empty if all are here. What the lists of the config keep out need not be installed."""
    here, lists = {plugin.distribution for plugin in registry.plugins}, registry.excluded()
    changes = {"deny": "take {} out of plugins.deny", "allow": "add {} to plugins.allow"}
    kept_out = [changes[lists[package]].format(package) for package in packages if package in lists]
    absent = [f"pip install {package}" for package in packages if package not in here]
    return " or ".join(kept_out) or (f"{' or '.join(absent)} {_FROM_WHEELS}" if absent else "")
