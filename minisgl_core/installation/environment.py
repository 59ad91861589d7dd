"""Which distributions, modules and programs there are. Answered without importing anything."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import shutil
import sys
from importlib.machinery import PathFinder
from typing import Protocol

__all__ = ["Environment", "Installed", "installed_version"]


def installed_version(distribution: str) -> str:
    """Empty if it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


class Environment(Protocol):
    """An installation; a fake one makes resolving testable."""

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
