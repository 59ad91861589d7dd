"""Checks of single settings: each raises :class:`~minisgl_core.errors.ConfigError` naming setting, value and remedy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from minisgl_core.errors import ConfigError

__all__ = [
    "check_choice",
    "check_flag",
    "check_integer",
    "check_kind",
    "check_mapping",
    "check_names",
    "check_number",
]


def _wrong(name: str, value: object, remedy: str) -> ConfigError:
    return ConfigError(f"`{name}` is {value!r:.80}", field=name, value=value, remedy=remedy)


def check_integer(name: str, value: object, low: int, high: int | None = None) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < low or (high is not None and value > high):
        bounds = f"of at least {low}" if high is None else f"from {low} to {high}"
        raise _wrong(name, value, f"give an integer {bounds}")


def check_number(name: str, value: object, high: float, remedy: str) -> None:
    """Check a number above 0 and at most ``high``."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= high:
        raise _wrong(name, value, remedy)


def check_choice(name: str, value: object, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise _wrong(name, value, f"use {', '.join(allowed[:-1])} or {allowed[-1]}")


def check_flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise _wrong(name, value, "give True or False")


def check_kind(name: str, value: object, kind: type | tuple[type, ...], remedy: str) -> None:
    if not isinstance(value, kind):
        raise _wrong(name, value, remedy)


def check_names(name: str, value: object) -> None:
    """Check a list of names. A single text would be read letter by letter."""
    if not isinstance(value, list | tuple | set | frozenset) or not all(isinstance(one, str) for one in value):
        raise _wrong(name, value, "give a list of names")


def check_mapping(name: str, value: object, remedy: str) -> None:
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise _wrong(name, value, remedy)
