"""Which distributions carry minisgl entry points, read from their metadata without importing anything."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
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
_OF_CORE: Final = re.compile(rf"\s*{CORE.replace('-', '[-_.]+')}(?![A-Za-z0-9._-])", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Found:
    """One distribution with minisgl entry points, or with a problem in reading them."""

    name: str
    distribution: Distribution
    entries: tuple[EntryPoint, ...]
    headers: str = ""
    problem: str = ""

    def header(self, name: str) -> list[str]:
        """What the lines of a header say. An email parser, which importlib.metadata uses, takes ten times longer."""
        return re.findall(rf"^{name}:[ \t]*(\S.*?)[ \t]*$", self.headers, re.MULTILINE)


def scan(distributions: Iterable[Distribution]) -> tuple[list[Found], list[Note]]:
    """Plugins by canonical name, sorted, and notes on metadata that hides other metadata.

    Python imports the first distribution of a name on ``sys.path``, so that one counts; a later one of the same name
    with minisgl entry points is hidden by it (a stale egg-info does this) and is reported.
    """
    first: dict[str, Distribution] = {}
    found: list[Found] = []
    notes: list[Note] = []
    for distribution in distributions:
        plugin = _plugin(distribution)
        name = plugin.name if plugin else _folded_name(distribution)
        shadow = first.setdefault(name, distribution) if name else distribution
        if shadow is not distribution:
            if plugin or any(item.name == name for item in found):
                notes.extend(_shadowed(name, shadow, distribution))
        elif plugin:
            found.append(plugin)
    return sorted(found, key=lambda item: item.name), notes


def _plugin(distribution: Distribution) -> Found | None:
    """None for a distribution that is no business of ours, as far as can be read."""
    entries: tuple[EntryPoint, ...] = ()
    try:
        entries, problem = _entries(distribution)
    except Exception as error:
        problem = f"its entry points cannot be read: {_told(error)}"
    if not entries and not problem:
        return None
    headers = ""
    try:
        headers = _headers(distribution)
    except Exception as error:
        problem = problem or f"its metadata cannot be read: {_told(error)}"
    found = Found("", distribution, entries, headers, problem)
    names = found.header("Name")
    if names:
        return replace(found, name=canonicalize_name(names[0]))
    path = metadata_path(distribution) or Path(_place(distribution))
    nameless = f"its metadata at {path} has no name; install it again"
    return replace(found, name=canonicalize_name(folder_name(path)), problem=problem or nameless)


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


def _headers(distribution: Distribution) -> str:
    """The metadata down to the first empty line, where the description begins."""
    files = ("METADATA", "PKG-INFO", "")  # the last: an egg-info that is a file itself
    text = next((text for file in files if (text := distribution.read_text(file))), "")
    return text.partition("\n\n")[0]


def _folded_name(distribution: Distribution) -> str:
    """The canonical name; that of the folder, which is there to be looked up by, spares opening every file."""
    path = metadata_path(distribution)
    try:
        name = folder_name(path) if path else distribution.metadata["Name"] or ""
    except Exception:
        name = ""
    return canonicalize_name(name)


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


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
        if not _OF_CORE.match(line):
            continue
        try:
            requirement = Requirement(line)
        except InvalidRequirement as error:
            return f"its requirement {line!r} is malformed: {error}".splitlines()[0]
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
