"""Typed access to the keys of one config.json; every complaint names the file, the key and the value."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

from ..errors import CheckpointError

__all__ = ["REQUIRED", "Keys"]


class _Required:
    """The type of :data:`REQUIRED`."""


REQUIRED: Final = _Required()
"""As a default: the key must be there."""


class Keys:
    """A JSON object whose values are asked for with their type. ``null`` counts as missing where a default exists."""

    def __init__(self, content: Mapping[str, Any], where: str) -> None:
        self.content = content
        self.where = where

    def error(self, key: str, problem: str, remedy: str) -> CheckpointError:
        """A one-line error about one key."""
        return CheckpointError(
            f"`{key}` in {self.where!r} {problem}", field=key, value=self.content.get(key), remedy=remedy
        )

    def get(self, key: str) -> Any:
        """The bare value; None if absent."""
        return self.content.get(key)

    def integer(self, key: str, default: int | _Required = REQUIRED, *, low: int = 1) -> int:
        value = self._value(key, default)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool) or value < low:
            raise self.error(key, f"is {value!r}", f"it must be an integer of at least {low}")
        return value

    def number(self, key: str, default: float | _Required = REQUIRED) -> float:
        """A finite number above 0."""
        value = self._value(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value) or value <= 0:
            raise self.error(key, f"is {value!r}", "it must be a finite number above 0")
        return float(value)

    def optional_number(self, key: str) -> float | None:
        return None if self.content.get(key) is None else self.number(key)

    def flag(self, key: str, default: bool) -> bool:
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise self.error(key, f"is {value!r}", "it must be true or false")
        return value

    def token_ids(self, key: str) -> tuple[int, ...]:
        """One id, a list of ids, or nothing."""
        value = self.content.get(key)
        ids = [] if value is None else value if isinstance(value, list) else [value]
        if not all(isinstance(token, int) and not isinstance(token, bool) for token in ids):
            raise self.error(key, f"is {value!r}", "it must be a token id or a list of them")
        return tuple(ids)

    def _value(self, key: str, default: Any) -> Any:
        value = self.content.get(key)
        if value is not None:
            return value
        if isinstance(default, _Required):
            raise self.error(key, "is missing", "add the key or download the model again")
        return default
