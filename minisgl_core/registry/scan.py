"""Which distributions carry minisgl entry points, read from their metadata without importing anything."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import Distribution, EntryPoint
from pathlib import Path
from typing import Final

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from .records import CORE, Note

__all__ = ["GROUP", "Found", "core_requirement_problem", "folder_name", "is_editable", "metadata_path", "scan"]

GROUP: Final = "minisgl"

_SECTION: Final = re.compile(rf"^\s*\[\s*{GROUP}\s*\]", re.MULTILINE)
_ENTRY: Final = re.compile(r"([^=\s][^=]*?)\s*=\s*([\w.]+\s*(?::\s*[\w.]+\s*)?(?:\[.*\])?)")
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
            entries, malformed = _entries(distribution)
        except Exception as error:
            malformed = f"its entry points cannot be read: {type(error).__name__}: {error}"
        problem = problem or malformed
        if not name and (entries or malformed):
            path = metadata_path(distribution) or Path(_place(distribution))
            name, problem = folder_name(path), f"its metadata at {path} has no name; install it again"
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


def _entries(distribution: Distribution) -> tuple[tuple[EntryPoint, ...], str]:
    """Entry points of our group, and what is wrong with the first line that is none."""
    text = distribution.read_text("entry_points.txt")
    if text is None or not _SECTION.search(text):
        return (), ""
    entries: list[EntryPoint] = []
    ours = False
    for line in map(str.strip, text.splitlines()):
        if line.startswith("["):
            ours = _SECTION.match(line) is not None
        elif ours and line and not line.startswith("#"):
            found = _ENTRY.fullmatch(line)
            if found is None:
                return tuple(entries), f"its entry point {line!r} is malformed; write NAME = MODULE"
            entries.append(EntryPoint(found[1], found[2].strip(), GROUP))
    return tuple(entries), ""


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


def metadata_path(distribution: Distribution) -> Path | None:
    """The ``.dist-info`` or ``.egg-info`` itself; importlib.metadata has no public name for it."""
    path = getattr(distribution, "_path", None)
    return path if isinstance(path, Path) else None


def folder_name(path: Path) -> str:
    """``my_plugin-1.0.dist-info`` -> ``my_plugin``"""
    return path.stem.partition("-")[0]


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
