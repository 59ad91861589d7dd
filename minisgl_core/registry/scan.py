"""Which distributions carry minisgl entry points, read from their metadata without importing anything."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import Distribution, EntryPoint
from typing import Final

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from .records import CORE, Note

__all__ = ["GROUP", "Found", "core_requirement_problem", "is_editable", "scan"]

GROUP: Final = "minisgl"

_SECTION: Final = re.compile(rf"^\s*\[\s*{GROUP}\s*\]", re.MULTILINE)
_NAME: Final = re.compile(r"^Name:\s*(\S+)\s*$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Found:
    """One distribution with minisgl entry points, or with a problem in reading them."""

    name: str
    distribution: Distribution
    entries: tuple[EntryPoint, ...]
    problem: str = ""


def scan(distributions: Iterable[Distribution]) -> tuple[list[Found], list[Note]]:
    """Plugins by canonical name, sorted, and notes on metadata that hides other metadata.

    Python imports the first distribution of a name on ``sys.path``, so that one counts; a later one of the same name
    with minisgl entry points is hidden by it (a stale egg-info does this) and is reported.
    """
    first: dict[str, Distribution] = {}
    found: list[Found] = []
    notes: list[Note] = []
    for distribution in distributions:
        name, problem = _name(distribution)
        entries: tuple[EntryPoint, ...] = ()
        try:
            entries = _entries(distribution)
        except Exception as error:
            problem = problem or f"its entry points are malformed: {type(error).__name__}: {error}"
        if not name and entries:
            name, problem = _place(distribution), "its metadata has no name"
        shadow = first.setdefault(canonicalize_name(name), distribution) if name else distribution
        if shadow is not distribution:
            if entries or problem or any(item.name == canonicalize_name(name) for item in found):
                notes.extend(_shadowed(name, shadow, distribution))
        elif entries or (problem and name):
            found.append(Found(canonicalize_name(name), distribution, entries, problem))
    return sorted(found, key=lambda item: item.name), notes


def _shadowed(name: str, first: Distribution, later: Distribution) -> list[Note]:
    """Nothing to say of the same folder listed twice on ``sys.path``."""
    if _place(first) == _place(later):
        return []
    text = (
        f"metadata {_version(first)} at {_place(first)} hides {_version(later)} at {_place(later)}; "
        "remove the stale one (pip uninstall, or delete the egg-info)"
    )
    return [Note(canonicalize_name(name), text)]


def _entries(distribution: Distribution) -> tuple[EntryPoint, ...]:
    """Entry points of our group; raises if they are malformed."""
    text = distribution.read_text("entry_points.txt")
    if text is None or not _SECTION.search(text):
        return ()
    entries = tuple(entry for entry in distribution.entry_points if entry.group == GROUP)
    for entry in entries:
        if not entry.name or not entry.module:
            raise ValueError(f"{entry.name!r} = {entry.value!r} names no module")
    return entries


def _name(distribution: Distribution) -> tuple[str, str]:
    """(name, problem); both empty for a nameless distribution. Parsing all headers would take ten times longer."""
    try:
        text = distribution.read_text("METADATA") or distribution.read_text("PKG-INFO")
        if text is not None:
            match = _NAME.search(text.partition("\n\n")[0])
            return (match[1], "") if match else ("", "")
        # None where the metadata is broken, whatever the annotations say
        return distribution.metadata["Name"] or "", ""
    except Exception as error:
        return "", f"its metadata cannot be read: {type(error).__name__}: {error}"


def _version(distribution: Distribution) -> str:
    try:
        return distribution.version or "unknown version"
    except Exception:
        return "unknown version"


def _place(distribution: Distribution) -> str:
    try:
        return str(distribution.locate_file(""))
    except Exception:
        return "an unknown place"


def core_requirement_problem(requires: Iterable[str], core_version: str) -> str:
    """Why this core is not the one that a distribution's Requires-Dist lines ask for; empty if it is."""
    for line in requires:
        try:
            requirement = Requirement(line)
        except InvalidRequirement as error:
            if canonicalize_name(line).startswith(CORE):
                return f"its requirement {line!r} is malformed: {error}".splitlines()[0]
            continue
        if canonicalize_name(requirement.name) != CORE:
            continue
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        if not requirement.specifier.contains(core_version, prereleases=True):
            return f"it requires {CORE}{requirement.specifier}, this is {CORE} {core_version}"
    return ""


def is_editable(distribution: Distribution) -> bool:
    """Is it a development install (PEP 660)?"""
    try:
        data = json.loads(distribution.read_text("direct_url.json") or "{}")
        return bool(data.get("dir_info", {}).get("editable", False))
    except (ValueError, AttributeError, OSError):
        return False
