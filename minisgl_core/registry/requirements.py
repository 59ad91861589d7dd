"""Is what a backend requires installed? Answered without importing anything."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import shutil
import sys
from functools import lru_cache
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
    """This Python environment. Versions are read once: make a new one after an installation."""

    def __init__(self) -> None:
        self._versions: dict[str, str | None] = {}

    def version(self, distribution: str) -> str | None:
        """Installed version, None if absent."""
        if distribution not in self._versions:
            self._versions[distribution] = self._read_version(distribution)
        return self._versions[distribution]

    def _read_version(self, distribution: str) -> str | None:
        try:
            # None where the metadata is broken, whatever the annotations say
            return importlib.metadata.version(distribution) or None
        except importlib.metadata.PackageNotFoundError:
            return None

    def has_module(self, module: str) -> bool:
        """Walk down the package folders by hand: ``find_spec`` of a dotted name would import the parents."""
        if module in sys.modules:
            return sys.modules[module] is not None
        parent, _, _ = module.rpartition(".")
        if not parent:
            return importlib.util.find_spec(module) is not None
        folders = self._folders(parent)
        return bool(folders) and PathFinder.find_spec(module, folders) is not None

    def _folders(self, package: str) -> list[str]:
        """Where a package's modules lie; empty if there is no such package."""
        loaded = sys.modules.get(package)
        if loaded is not None:
            return list(getattr(loaded, "__path__", []))
        parent, _, _ = package.rpartition(".")
        spec = PathFinder.find_spec(package, self._folders(parent)) if parent else importlib.util.find_spec(package)
        return list(spec.submodule_search_locations or []) if spec is not None else []

    def has_program(self, program: str) -> bool:
        """Is it on PATH?"""
        return shutil.which(program) is not None


def check_requirements(spec: BackendSpec, environment: Environment | None) -> list[Reason]:
    """One reason for each unmet item of ``spec.requires``.

    Environment None is a machine elsewhere, which may have anything but what the plugin's own distribution lacks.
    """
    reasons = []
    wanted = spec.requires
    if environment is None:
        own = spec.factory.partition(":")[0].partition(".")[0]
        wanted = tuple(i for i in wanted if isinstance(i, str) and i.startswith(f"import:{own}."))
        environment = Installed()
    for item in wanted:
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
        requirement = _parsed(item)
    except InvalidRequirement as error:
        return _missing(item, f"an unreadable requirement: {error}".splitlines()[0], "")
    if requirement.marker is not None and not requirement.marker.evaluate():
        return None
    version = environment.version(requirement.name)
    if version is None:
        return _missing(item, f"{requirement.name} is not installed", f"pip install '{item}'")
    if not requirement.specifier.contains(version, prereleases=True):
        return _missing(item, f"{requirement.name} {version}", f"pip install '{item}'")
    return None


@lru_cache(maxsize=256)
def _parsed(item: str) -> Requirement:
    """Many specs require the same; a requirement is never changed."""
    return Requirement(item)


def _missing(item: str, found: str, fix: str) -> Reason:
    return Reason("requires", "requires", item, found, fix)
