"""The requests of a load: when each is sent, and what it contains."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, Final, NamedTuple

from minisgl_core.errors import UsageError

__all__ = ["Lengths", "Load", "Point", "Request", "parse_numbers", "read_trace"]

_TRACE_KEYS: Final = ("timestamp", "input_length", "output_length", "prompt")


class Lengths(NamedTuple):
    """A range of numbers of tokens; both ends are possible."""

    low: int
    high: int

    @classmethod
    def parse(cls, text: str, field: str) -> Lengths:
        """``128`` or ``100..1024``. Raises :class:`UsageError`."""
        low, dots, high = text.partition("..")
        found = [int(one) if one.isdecimal() else 0 for one in (low, high if dots else low)]
        if not 1 <= found[0] <= found[1]:
            remedy = "give a number of tokens, or a range such as 100..1024"
            raise UsageError(f"{field} is {text!r}", field=field, value=text, remedy=remedy)
        return cls(*found)


class Point(NamedTuple):
    """One load of a sweep."""

    rate: float
    """Requests per second; infinity = all at once."""
    concurrency: int | None = None
    """Most requests that are in flight."""

    @property
    def label(self) -> str:
        """For tables and plots."""
        rate = "" if math.isinf(self.rate) and self.concurrency else f"{self.rate:g}/s"
        return " ".join(filter(None, (rate, f"x{self.concurrency}" if self.concurrency else "")))


class Request(NamedTuple):
    """One request. ``at``: seconds after the start."""

    at: float
    prompt: tuple[int, ...] | str
    output: int


class Traced(NamedTuple):
    """A line of a trace."""

    at: float
    input_length: int
    output: int
    prompt: tuple[int, ...] | str | None


@dataclass(frozen=True, slots=True)
class Load:
    """How requests are drawn. Each point of a sweep draws its own prompts, so that none is in the prefix cache."""

    requests: int
    inputs: Lengths
    outputs: Lengths
    vocab_size: int
    duration_s: float | None = None
    """At a finite rate, send requests for this long instead of ``requests``."""
    arrivals: str = "poisson"
    burstiness: float = 1.0
    shared_prefix: int = 0
    """Tokens that come before each prompt, the same for all."""
    seed: int = 0
    trace: tuple[Traced, ...] = ()

    def draw(self, point: Point, number: int) -> list[Request]:
        """The requests of the sweep's point ``number``."""
        r = Random(f"{self.seed}:{number}")
        prefix = self._ids(Random(self.seed), self.shared_prefix)
        lines: Sequence[Traced] = self.trace or list(self._random(point, r))
        return [
            Request(one.at, prefix + self._ids(r, one.input_length) if one.prompt is None else one.prompt, one.output)
            for one in lines
        ]

    def _random(self, point: Point, r: Random) -> Iterator[Traced]:
        count = self.requests
        if self.duration_s is not None and math.isfinite(point.rate):
            count = max(1, round(self.duration_s * point.rate))
        at = 0.0
        for _ in range(count):
            yield Traced(at, r.randint(*self.inputs), r.randint(*self.outputs), None)
            at += self._gap(point.rate, r)

    def _gap(self, rate: float, r: Random) -> float:
        """Seconds until the next request; gamma-distributed with mean 1 / rate, exponential at burstiness 1."""
        if math.isinf(rate) or self.arrivals == "fixed":
            return 1 / rate
        return r.gammavariate(self.burstiness, 1 / (rate * self.burstiness))

    def _ids(self, r: Random, count: int) -> tuple[int, ...]:
        return tuple(r.randrange(self.vocab_size) for _ in range(count))

    @property
    def facts(self) -> dict[str, Any]:
        """As JSON data."""
        work = (
            {"trace_lines": len(self.trace)}
            if self.trace
            else {
                "requests": self.requests,
                "duration_s": self.duration_s,
                "input_len": list(self.inputs),
                "output_len": list(self.outputs),
                "arrivals": self.arrivals,
                "burstiness": self.burstiness,
            }
        )
        return {**work, "shared_prefix": self.shared_prefix, "vocab_size": self.vocab_size, "seed": self.seed}


def parse_numbers(text: str, field: str, *, whole: bool) -> list[float]:
    """Numbers above 0, separated by commas; ``inf`` unless they must be whole. Raises :class:`UsageError`."""
    try:
        found = [float(int(one)) if whole else float(one) for one in text.split(",")]
    except ValueError:
        found = []
    if not found or not all(one > 0 for one in found):
        remedy = "give whole numbers, such as 1,2,4" if whole else "give requests per second, such as 1,2,4,inf"
        raise UsageError(f"{field} is {text!r}", field=field, value=text, remedy=remedy)
    return found


def read_trace(path: Path) -> tuple[Traced, ...]:
    """A trace in order of time. Raises :class:`UsageError`, naming the line at fault."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise _trace_error(path, f"cannot be read: {error}", "name a JSON Lines file") from error
    lines = enumerate(text.splitlines(), 1)
    found = [_traced(path, number, line) for number, line in lines if line.strip()]
    if not found:
        raise _trace_error(path, "has no line", f"give JSON objects with {', '.join(_TRACE_KEYS)}")
    return tuple(sorted(found, key=lambda one: one.at))


def _traced(path: Path, number: int, line: str) -> Traced:
    try:
        content = json.loads(line)
        if not isinstance(content, dict):
            raise ValueError("it is no JSON object")
        if unknown := content.keys() - set(_TRACE_KEYS):
            raise ValueError(f"unknown key {min(unknown)!r}")
        at, prompt = _number(content, "timestamp", float), content.get("prompt")
        if isinstance(prompt, list):
            prompt = tuple(_number({"prompt": one}, "prompt", int) for one in prompt)
        if not (prompt is None or (prompt and isinstance(prompt, str | tuple))):
            raise ValueError("`prompt` is no text and no list of token ids")
        length = 0 if prompt is not None else _number(content, "input_length", int, at_least=1)
        return Traced(at, length, _number(content, "output_length", int, at_least=1), prompt)
    except ValueError as error:
        raise _trace_error(path, f"line {number}: {error}", f"keys are {', '.join(_TRACE_KEYS)}") from error


def _number(content: dict[str, Any], key: str, kind: type, at_least: int = 0) -> Any:
    value = content.get(key)
    if isinstance(value, bool) or not isinstance(value, int if kind is int else (int, float)):
        raise ValueError(f"`{key}` is {value!r}")
    if not at_least <= value < math.inf:
        raise ValueError(f"`{key}` is {value!r}")
    return kind(value)


def _trace_error(path: Path, what: str, remedy: str) -> UsageError:
    return UsageError(f"--trace {path} {what}", field="--trace", value=str(path), remedy=remedy)
