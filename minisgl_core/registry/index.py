"""The shipped index: which distributions ``auto`` chooses from, and what each serves and offers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from packaging.utils import canonicalize_name

__all__ = ["brings", "is_listed", "serving"]


@cache
def _index() -> Mapping[str, Any]:
    found: dict[str, Any] = json.loads(Path(__file__).with_name("index.json").read_text(encoding="utf-8"))
    return found


def is_listed(distribution: str) -> bool:
    """Is it an incumbent, whose backends ``auto`` chooses without being asked to?"""
    return canonicalize_name(distribution) in _index()["distributions"]


def serving(device: str, *roles: str) -> tuple[str, ...]:
    """The listed distributions that serve any of these roles on a kind of device."""
    listed: Mapping[str, Mapping[str, list[str]]] = _index()["distributions"]
    return tuple(name for name, served in listed.items() if {*roles} & {*served.get(device, ())})


def brings(backend: str) -> tuple[str, ...]:
    """The listed distribution that brings a backend of this name; empty if none does."""
    names: Mapping[str, str] = _index()["backends"]
    return (names[backend],) if backend in names else ()
