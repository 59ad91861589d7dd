"""Does what pip has written agree with what Python imports? Answered without importing a plugin."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from importlib.metadata import Distribution
from pathlib import Path
from urllib.parse import unquote, urlparse

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from minisgl_core.installation import Environment
from minisgl_core.installation.distributions import Found, folder_name, is_editable, metadata_path, scan
from minisgl_core.registry import Registry
from minisgl_core.registry.records import CORE

from .finding import Finding

__all__ = ["check_distributions", "check_editable", "check_origin", "check_requires"]


def check_distributions(distributions: Sequence[Distribution], registry: Registry) -> Iterator[Finding]:
    """Metadata that hides other metadata, and metadata that is there twice."""
    for note in scan(distributions)[1]:  # the registry's notes are of backends, too
        yield Finding("wrong", "metadata", note.distribution, *note.text.rsplit("; ", 1))
    plugins = {plugin.distribution for plugin in registry.plugins}
    seen: dict[tuple[str, Path], Path] = {}
    for distribution in distributions:
        path = metadata_path(distribution)
        if path is None:
            continue
        name = canonicalize_name(folder_name(path))
        first = seen.setdefault((name, path.parent), path)
        if first != path and name in plugins:
            yield Finding(
                "wrong",
                "metadata",
                name,
                f"{path.parent} holds its metadata twice: {first.name} and {path.name}",
                f"pip uninstall {name} until nothing is left, then install it again",
            )


def check_editable(found: Found) -> Finding | None:
    """Is the source folder of a development install still there?"""
    root = editable_root(found.distribution)
    if root is None or root.is_dir():
        return None
    return Finding(
        "wrong",
        "metadata",
        found.name,
        f"it is a development install of {root}, which is gone",
        f"pip uninstall {found.name}, or install it from where its sources are now",
    )


def check_origin(found: Found, file: str) -> Finding | None:
    """Does Python import the plugin from the distribution that claims it? ``file``: its module's."""
    root = editable_root(found.distribution) or Path(str(found.distribution.locate_file("")))
    if not file or Path(file).resolve().is_relative_to(root.resolve()):
        return None
    return Finding(
        "wrong",
        "metadata",
        found.name,
        f"it is installed in {root}, but Python imports its module from {file}",
        "remove that file's folder from PYTHONPATH and the working directory, or uninstall the distribution",
    )


def check_requires(name: str, requires: Sequence[str], environment: Environment) -> Iterator[Finding]:
    """Every distribution that the metadata says must be there is there, and new enough."""
    for line in requires:
        try:
            requirement = Requirement(line)
        except InvalidRequirement:
            continue  # pip refuses such a distribution
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        if canonicalize_name(requirement.name) == CORE:
            continue  # discovery itself checks this one
        version = environment.version(requirement.name)
        wanted = f"{requirement.name}{requirement.specifier}"
        if version is None or not requirement.specifier.contains(version, prereleases=True):
            what = f"{requirement.name} is {version or 'not installed'}"
            yield Finding("wrong", "requirement", name, f"it needs {wanted}, {what}", f"pip install '{wanted}'")


def editable_root(distribution: Distribution) -> Path | None:
    """The folder that a development install points to, None for any other."""
    if not is_editable(distribution):
        return None
    url = urlparse(json.loads(distribution.read_text("direct_url.json") or "{}").get("url", ""))
    return Path(unquote(url.path)) if url.scheme == "file" else None
