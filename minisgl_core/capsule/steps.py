"""Which roles and steps can be recorded. Steps are text: ``first:8``, ``every:100``, or numbers such as ``0,5,7``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from minisgl_core.errors import ConfigError
from minisgl_core.plugin_api import Role

__all__ = ["RECORDED_ROLES", "StepChoice"]

RECORDED_ROLES: Final[tuple[Role, ...]] = ("attention", "moe")
"""The roles that can be recorded and shadowed; the first is the default."""


@dataclass(frozen=True, slots=True)
class StepChoice:
    """A choice of steps. Eager steps count from 0, over both phases."""

    first: int = 0
    """This many from the start"""
    every: int = 0
    """One in this many, the first included; 0 = none"""
    numbers: frozenset[int] = frozenset()

    @classmethod
    def parse(cls, text: str) -> StepChoice:
        """Parse the text of a setting. Raises :class:`ConfigError` for any other text."""
        kind, colon, number = text.replace(" ", "").partition(":")
        if colon and kind in ("first", "every") and number.isdecimal() and int(number) > 0:
            return cls(first=int(number)) if kind == "first" else cls(every=int(number))
        parts = kind.split(",")
        if not colon and all(part.isdecimal() for part in parts):
            return cls(numbers=frozenset(map(int, parts)))
        raise ConfigError(
            f"`record_steps` is {text!r}",
            field="record_steps",
            value=text,
            remedy="use such as first:8, every:100 or 0,5,7",
        )

    def __contains__(self, step: int) -> bool:
        return step < self.first or step in self.numbers or (self.every > 0 and step % self.every == 0)
