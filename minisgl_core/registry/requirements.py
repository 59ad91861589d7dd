"""Is what a backend requires installed? Answered without importing anything."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import shutil
import sys
from importlib.machinery import PathFinder
from typing import Protocol

from packaging.requirements import InvalidRequirement, Requirement

from minisgl_core.plugin_api import BackendSpec, Reason

__all__ = ["Environment", "Installed", "check_requirements"]


class Environment(Protocol):
    """What can be asked of an installation; a fake one makes resolving testable."""

    def version(self, distribution: str) -> str | None:
        """Installed version, None if absent."""
        ...

    def has_module(self, module: str) -> bool:
        """Could this (dotted) module be imported?"""
        ...

    def has_program(self, program: str) -> bool:
        """Is it on PATH?"""
        ...


class Installed:
    """This Python environment."""

    def version(self, distribution: str) -> str | None:
        """Installed version, None if absent."""
        try:
            # None where the metadata is broken, whatever the annotations say
            return importlib.metadata.version(distribution) or None
        except importlib.metadata.PackageNotFoundError:
            return None

    def has_module(self, module: str) -> bool:
        """Walk down the package folders by hand: ``find_spec`` of a dotted name would import the parents."""
        path = None
        for depth in range(module.count(".") + 1):
            name = ".".join(module.split(".")[: depth + 1])
            if depth == 0:
                loaded = sys.modules.get(name)
                spec = loaded.__spec__ if loaded is not None else None
                spec = spec or importlib.util.find_spec(name)
            else:
                spec = PathFinder.find_spec(name, path)
            if spec is None:
                return False
            path = spec.submodule_search_locations or []
        return True

    def has_program(self, program: str) -> bool:
        """Is it on PATH?"""
        return shutil.which(program) is not None


def check_requirements(spec: BackendSpec, environment: Environment | None) -> list[Reason]:
    """One reason for each unmet item of ``spec.requires``. Environment None, a machine elsewhere, meets them all."""
    if environment is None:
        return []
    reasons = []
    for item in spec.requires:
        alternatives = (item,) if isinstance(item, str) else item
        failed = [reason for one in alternatives if (reason := _check(one, environment)) is not None]
        if len(failed) < len(alternatives):
            continue
        reasons.append(
            Reason(
                code="requires",
                field="requires",
                wanted=" or ".join(alternatives),
                supported="; ".join(dict.fromkeys(reason.supported for reason in failed)),
                fix=" or ".join(dict.fromkeys(reason.fix for reason in failed if reason.fix)),
            )
        )
    return reasons


def _check(item: str, environment: Environment) -> Reason | None:
    kind, _, name = item.partition(":")
    if kind == "import":
        return None if environment.has_module(name) else _missing(item, f"no module {name}", "")
    if kind == "exec":
        return None if environment.has_program(name) else _missing(item, f"no {name} on PATH", f"install {name}")
    try:
        requirement = Requirement(item)
    except InvalidRequirement as error:
        return _missing(item, f"an unreadable requirement: {error}".splitlines()[0], "report it to the plugin's author")
    if requirement.marker is not None and not requirement.marker.evaluate():
        return None
    version = environment.version(requirement.name)
    if version is None:
        return _missing(item, f"{requirement.name} is not installed", f"pip install '{item}'")
    if not requirement.specifier.contains(version, prereleases=True):
        return _missing(item, f"{requirement.name} {version}", f"pip install '{item}'")
    return None


def _missing(item: str, found: str, fix: str) -> Reason:
    return Reason("requires", "requires", item, found, fix)
