"""Typed access to the keys of one config.json; every error names the file, the key and the value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from ..errors import CheckpointError

__all__ = ["MAX_INTEGER", "MOST_LAYERS", "REQUIRED", "Keys"]

MAX_INTEGER: Final = 2**63 - 1
MOST_LAYERS: Final = 10_000
"""More layers than any model has. Each layer needs an entry in several tuples before memory is checked."""


class _Required:
    """The type of :data:`REQUIRED`."""


REQUIRED: Final = _Required()
"""Passed as the default: the key is required."""


class Keys:
    """Typed access to a JSON object. ``null`` counts as missing where there is a default."""

    def __init__(self, content: Mapping[str, Any], where: str) -> None:
        self.content = content
        self.where = where

    def error(self, key: str, problem: str, remedy: str) -> CheckpointError:
        """A one-line error about one key."""
        return CheckpointError(
            f"`{key}` in {self.where!r} {problem}", field=key, value=self.content.get(key), remedy=remedy
        )

    def wrong(self, key: str, remedy: str) -> CheckpointError:
        """Like :meth:`error`, about the value of the key."""
        return self.error(key, f"is {self.content.get(key)!r:.80}", remedy)

    def get(self, key: str) -> Any:
        """The value without a check; None if absent."""
        return self.content.get(key)

    def integer(self, key: str, default: int | _Required = REQUIRED, *, low: int = 1, high: int = MAX_INTEGER) -> int:
        value = self._value(key, default)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if not _is_integer(value) or not low <= value <= high:
            above = isinstance(value, int) and value > high
            raise self.wrong(key, f"it must be an integer of at {f'most {high}' if above else f'least {low}'}")
        return int(value)

    def number(self, key: str, default: float | _Required = REQUIRED, *, low: float, high: float) -> float:
        """A number from ``low`` to ``high``, both included."""
        value = self._value(key, default)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not low <= value <= high:
            raise self.error(key, f"is {value!r:.80}", f"it must be a number from {low:g} to {high:g}")
        return float(value)

    def optional_number(self, key: str, *, low: float, high: float) -> float | None:
        return None if self.content.get(key) is None else self.number(key, low=low, high=high)

    def text(self, key: str) -> str | None:
        value = self.content.get(key)
        if value is not None and not isinstance(value, str):
            raise self.wrong(key, "it must be a text")
        return value

    def texts(self, key: str) -> list[str] | None:
        value = self.content.get(key)
        if value is not None and not (isinstance(value, list) and all(isinstance(one, str) for one in value)):
            raise self.wrong(key, "it must be a list of texts")
        return value

    def integers(self, key: str) -> list[int]:
        """A list of integers; empty if absent."""
        value = self.content.get(key)
        if value is None:
            return []
        if not isinstance(value, list) or not all(map(_is_integer, value)):
            raise self.wrong(key, "it must be a list of integers")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise self.wrong(key, "it must be true or false")
        return value

    def token_ids(self, key: str) -> tuple[int, ...]:
        """One id, a list of ids, or none, which some files write as -1."""
        value = self.content.get(key)
        ids = [] if value is None else value if isinstance(value, list) else [value]
        if not all(map(_is_integer, ids)):
            raise self.wrong(key, "it must be a token id or a list of them")
        return tuple(token for token in ids if token >= 0)

    def _value(self, key: str, default: Any) -> Any:
        value = self.content.get(key)
        if value is not None:
            return value
        if isinstance(default, _Required):
            raise self.error(key, "is missing", "add the key or download the model again")
        return default


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
