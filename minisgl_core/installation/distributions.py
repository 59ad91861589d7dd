"""Which distributions carry minisgl entry points, read from their metadata without importing anything."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from importlib.metadata import Distribution, EntryPoint
from pathlib import Path
from typing import Final

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from minisgl_core.plugin_api.hooks import CORE

__all__ = ["GROUP", "Found", "Note", "core_requirement_problem", "folder_name", "is_editable", "metadata_path", "scan"]

GROUP: Final = "minisgl"

_SECTION: Final = re.compile(rf"^\s*\[\s*{GROUP}\s*\]", re.MULTILINE)
_ENTRY: Final = re.compile(r"([^=\s][^=]*?)\s*=\s*([\w.]+\s*(?::\s*[\w.]+\s*)?(?:\[.*\])?)")
_OF_CORE: Final = re.compile(rf"\s*{CORE.replace('-', '[-_.]+')}(?![A-Za-z0-9._-])", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Note:
    """Something odd about the installation itself, such as stale metadata that hides a distribution."""

    distribution: str
    text: str


@dataclass(frozen=True, slots=True)
class Found:
    """One distribution with minisgl entry points, or with a problem in reading them."""

    name: str
    distribution: Distribution
    entries: tuple[EntryPoint, ...]
    headers: str = ""
    problem: str = ""

    @property
    def version(self) -> str:
        """Empty if the metadata has none."""
        return next(iter(self.header("Version")), "")

    def header(self, name: str) -> list[str]:
        """The values of a header. An email parser, which importlib.metadata uses, takes ten times longer."""
        return re.findall(rf"^{name}:[ \t]*(\S.*?)[ \t]*$", self.headers, re.MULTILINE)

    def stamps(self, module: str) -> Iterator[str]:
        """Size and time of the list of its installed files; of the source files of the module's package where there is
        no list, or where they may be edited.
        """
        record = metadata_path(self.distribution)
        files = [record / "RECORD"] if record and not is_editable(self.distribution) else []
        if not any(file.is_file() for file in files):
            package = importlib.util.find_spec(module.partition(".")[0])
            folders = (package.submodule_search_locations if package else None) or ()
            files = [file for folder in folders for file in sorted(Path(folder).rglob("*.py"))]
            files += [Path(package.origin)] if package and package.origin else []
        for file in filter(Path.is_file, files):
            status = file.stat()
            yield f"{file} {status.st_size} {status.st_mtime_ns}"


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
        earlier = first.get(name)
        if earlier is None:
            found += [plugin] if plugin else []
            if name:
                first[name] = distribution
        elif earlier is not distribution and (plugin or any(item.name == name for item in found)):
            notes.extend(_shadowed(name, earlier, distribution))
    return sorted(found, key=lambda item: item.name), notes


def _plugin(distribution: Distribution) -> Found | None:
    """None for a distribution without our entry points, as far as can be read."""
    entries: tuple[EntryPoint, ...] = ()
    try:
        entries, problem = _entries(distribution)
    except Exception as error:
        problem = f"its entry points cannot be read: {type(error).__name__}: {error}"
    if not entries and not problem:
        return None
    headers = ""
    try:
        headers = _headers(distribution)
    except Exception as error:
        problem = problem or f"its metadata cannot be read: {type(error).__name__}: {error}"
    found = Found("", distribution, entries, headers, problem)
    names = found.header("Name")
    if names:
        return replace(found, name=canonicalize_name(names[0]))
    path = metadata_path(distribution) or Path(_place(distribution))
    nameless = f"its metadata at {path} has no name; install it again"
    return replace(found, name=canonicalize_name(folder_name(path)), problem=problem or nameless)


def _shadowed(name: str, first: Distribution, later: Distribution) -> list[Note]:
    """A folder that is listed twice on ``sys.path`` hides nothing."""
    if _place(first) == _place(later):
        return []
    text = (
        f"metadata {_version(first)} at {_place(first)} hides {_version(later)} at {_place(later)}; "
        "remove the stale one (pip uninstall, or delete the egg-info)"
    )
    return [Note(canonicalize_name(name), text)]


def _entries(distribution: Distribution) -> tuple[tuple[EntryPoint, ...], str]:
    """Entry points of our group, and what is wrong with the first malformed line."""
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
    """The canonical name, of the folder where there is one: that saves opening every file."""
    path = metadata_path(distribution)
    try:
        name = folder_name(path) if path else distribution.metadata["Name"] or ""
    except Exception:
        name = ""
    return canonicalize_name(name)


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
    """Why this core does not meet a distribution's Requires-Dist lines; empty if it does."""
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
