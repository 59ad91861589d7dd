"""Input gates: the treatment of each key of a file that minisgl reads. No key is ignored silently.

Each reader has one :class:`Gate`, a table of keys and their :class:`Rule`. docs/reference/inputs.md is generated from
these tables.
"""

from __future__ import annotations

import functools
import logging
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, Literal

from .errors import CheckpointError, MinisglError, nearest

__all__ = ["Gate", "Rule", "ignored", "refused", "used", "warn_once", "warned"]

log = logging.getLogger(__name__)

_WARNINGS_KEPT: Final = 4096
_LONGEST_VALUE: Final = 80


@dataclass(frozen=True, slots=True)
class Rule:
    """The treatment of one key.

    ``used``: the reader reads it. ``ignored``: it does not change any answer. ``warned``: it is not applied, and the
    log says so once. ``refused``: answers would be wrong without it. The last two allow ``neutral`` values; null is
    one.
    """

    fate: Literal["used", "ignored", "warned", "refused"]
    why: str
    """What the key is used for, or why it is harmless, not applied, or refused."""
    remedy: str = ""
    neutral: tuple[object, ...] = ()

    def concerns(self, value: object) -> bool:
        """True if this value would change something."""
        return value is not None and not any(type(value) is type(item) and value == item for item in self._neutral)

    @property
    def _neutral(self) -> tuple[object, ...]:
        """0 is neutral as an integer and as a float, but False only where it is listed."""
        numbers = [item for item in self.neutral if isinstance(item, int | float) and not isinstance(item, bool)]
        return (*self.neutral, *map(float, numbers), *(int(item) for item in numbers if float(item).is_integer()))


def used(what: str) -> Rule:
    """The rule for a key that the reader reads; ``what`` it is used for."""
    return Rule("used", what)


def ignored(why: str) -> Rule:
    """The rule for a key that changes no answer, and ``why``."""
    return Rule("ignored", why)


def warned(why: str, *neutral: object) -> Rule:
    """The rule for a key that is not applied: the log says so once, unless the value is null or ``neutral``."""
    return Rule("warned", why, neutral=neutral)


def refused(why: str, remedy: str, *neutral: object) -> Rule:
    """The rule for a key that is refused unless its value is null or ``neutral``."""
    return Rule("refused", why, remedy, neutral)


@dataclass(frozen=True, slots=True)
class Gate:
    """The keys of one reader. A name that ends in ``*`` matches all keys with that prefix; an exact name takes
    precedence.
    """

    title: str
    """Such as ``config.json``."""
    rules: Mapping[str, Rule]
    unknown: Literal["warned", "refused"] = "warned"
    """The treatment of a key without a rule; a null value is reported only if such keys are refused."""
    error: type[MinisglError] = CheckpointError

    def rule(self, key: str) -> Rule | None:
        """The rule for a key; None if there is none."""
        if key in self.rules:
            return self.rules[key]
        prefixes = [name[:-1] for name in self.rules if name.endswith("*") and key.startswith(name[:-1])]
        return self.rules[f"{max(prefixes, key=len)}*"] if prefixes else None

    def check(self, content: Mapping[str, object], where: str, prefix: str = "") -> None:
        """Raise :attr:`error` for a refused key; log what is not applied. ``prefix`` precedes each key in messages."""
        unknown: list[str] = []
        dropped: dict[str, list[str]] = defaultdict(list)
        for key, value in content.items():
            rule = self.rule(key)
            if rule is None:
                if value is not None or self.unknown == "refused":
                    unknown.append(key)
            elif rule.fate == "refused" and rule.concerns(value):
                raise self.refusal(f"{prefix}{key}", value, where, rule)
            elif rule.fate == "warned" and rule.concerns(value):
                dropped[rule.why].append(f"`{prefix}{key}` = {shown(value)}")
        self.report_unknown(unknown, where, prefix)
        for why, found in dropped.items():
            warn_once(f"{where!r}: {', '.join(found)} not applied: {why}")

    def refusal(self, key: str, value: object, where: str, rule: Rule) -> MinisglError:
        """The error about a refused key."""
        message = f"`{key}` in {where!r} is {shown(value)}: {rule.why}"
        return self.error(message, field=key, value=value, remedy=rule.remedy)

    def report_unknown(self, keys: Iterable[str], where: str, prefix: str = "") -> None:
        """Refuse the first unknown key, or warn about all of them in one line, depending on the gate."""
        keys = sorted(keys)
        if keys and self.unknown == "refused":
            raise self.error(
                f"unknown key `{prefix}{keys[0]}` in {where!r}",
                field=f"{prefix}{keys[0]}",
                value=keys[0],
                remedy=nearest(keys[0], self.rules) or f"known are {', '.join(self.rules)}",
            )
        if keys:
            names = ", ".join(f"`{prefix}{key}`"[:_LONGEST_VALUE] for key in keys)
            warn_once(f"{where!r} has keys that minisgl does not know and ignores: {names}")


def shown(value: object) -> str:
    """A value as text of one short line, for a message."""
    return f"{value!r:.{_LONGEST_VALUE}}"


@functools.lru_cache(maxsize=_WARNINGS_KEPT)
def warn_once(message: str) -> None:
    """Log a warning once per process; a start reads the same files several times."""
    log.warning("%s", message)
