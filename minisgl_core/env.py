"""Switches that are read from ``MINISGL_*`` environment variables, typed and settable at run time.

A variable is read when its value is used, so it may be set after import. A value set in the program takes precedence.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Final, Generic, TypeVar

from minisgl_core.errors import ConfigError

__all__ = ["ENV", "EnvVar"]

T = TypeVar("T")


class EnvVar(Generic[T]):
    """One switch. ``value`` is what the program set, else the environment variable, else the default."""

    def __init__(self, name: str, default: Callable[[], T], parse: Callable[[str], T], accepts: str, help: str) -> None:  # noqa: A002
        self.name, self.accepts, self.help = name, accepts, help
        self._default, self._parse = default, parse
        self._set: list[T] = []

    @property
    def default(self) -> T:
        """The value if neither the program nor the environment sets one."""
        return self._default()

    @property
    def value(self) -> T:
        """Raises :class:`ConfigError`, naming the variable, for text that cannot be read."""
        if self._set:
            return self._set[0]
        text = os.environ.get(self.name)
        if text is None or not text.strip():
            return self._default()
        try:
            return self._parse(text.strip())
        except (ValueError, RuntimeError) as error:  # RuntimeError: the home folder of an unknown user
            raise ConfigError(
                f"{self.name} is {text!r}", field=self.name, value=text, remedy=f"use {self.accepts}, or unset it"
            ) from error

    @value.setter
    def value(self, value: T) -> None:
        self._set = [value]

    def reset(self) -> None:
        """Discard the value that the program set."""
        self._set = []


def _flag(text: str) -> bool:
    words = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
    if text.lower() not in words:
        raise ValueError(text)
    return words[text.lower()]


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise ValueError(text)
    return value


def _cache_dir() -> Path:
    base = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(base):
        return Path(base) / "minisgl"
    try:
        return Path.home() / ".cache" / "minisgl"
    except RuntimeError as error:
        raise ConfigError(
            "this user has no home folder for the cache", field="HOME", remedy="set MINISGL_CACHE_DIR to a folder"
        ) from error


def _switch(name: str, help: str) -> EnvVar[bool]:  # noqa: A002
    return EnvVar(name, lambda: False, _flag, "1 or 0", help)


class _Env:
    """All switches, by name."""

    def __init__(self) -> None:
        self.DISABLE_OVERLAP_SCHEDULING = _switch(
            "MINISGL_DISABLE_OVERLAP_SCHEDULING", "process each step before the next is scheduled"
        )
        self.CHECK_INTEGRITY = _switch(
            "MINISGL_CHECK_INTEGRITY",
            "check after every step that no page of the KV pool is lost or shared",
        )
        self.CACHE_DIR: EnvVar[Path] = EnvVar(
            "MINISGL_CACHE_DIR",
            _cache_dir,
            lambda text: Path(text).expanduser(),
            "a folder",
            "where downloads, compiled kernels and probe results are kept",
        )
        self.PROBE_TIMEOUT_S: EnvVar[float] = EnvVar(
            "MINISGL_PROBE_TIMEOUT_S",
            lambda: 120.0,
            _seconds,
            "a number of seconds",
            "how long the probe process may take for one answer",
        )

    def all(self) -> tuple[EnvVar[object], ...]:
        """Every switch, by variable name."""
        return tuple(sorted((item for item in vars(self).values()), key=lambda item: str(item.name)))


ENV: Final = _Env()
