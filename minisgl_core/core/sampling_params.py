"""How one request is sampled, checked and normalised when it is made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, cast

from ..errors import AdmissionError

__all__ = ["MAX_LOGPROBS", "SEEDS", "SamplingParams"]

SEEDS: Final = range(-(2**63), 2**64)
"""Seeds are taken modulo 2**64: signed and unsigned 64-bit numbers are welcome, any larger one would be an alias."""
GREEDY_BELOW: Final = 1e-5
"""Temperatures below this are greedy: dividing logits by them leaves nothing but the maximum."""
MAX_LOGPROBS: Final = 20
"""Of the likeliest tokens of a place"""
_MAX_INT: Final = 2**31 - 1


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request is sampled. Raises :class:`~minisgl_core.errors.AdmissionError` on a value out of range.

    ``top_k`` 0 or -1 = off; ``top_p`` 1 = off, 0 = argmax; ``min_p`` 0 = off. ``seed`` None = engine seed + uid.
    ``logprobs`` n: the chosen token's log-probability and the n likeliest, None = none.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    max_tokens: int = 1024
    ignore_eos: bool = False
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Sequence[tuple[int, float]] | dict[int, float] = ()
    """``{token id: number added to its logit}``, or pairs of these"""
    logprobs: int | None = None

    def __post_init__(self) -> None:
        _number("temperature", self.temperature, 0.0, 1e6)
        _integer("top_k", self.top_k, -1, _MAX_INT)
        _number("top_p", self.top_p, 0.0, 1.0)
        _number("min_p", self.min_p, 0.0, 1.0)
        _integer("max_tokens", self.max_tokens, 1, _MAX_INT)
        _number("repetition_penalty", self.repetition_penalty, 0.0, 1e6, open_low=True)
        _number("presence_penalty", self.presence_penalty, -1e6, 1e6)
        _number("frequency_penalty", self.frequency_penalty, -1e6, 1e6)
        if self.seed is not None:
            _integer("seed", self.seed, SEEDS.start, SEEDS.stop - 1)
        if self.logprobs is not None:
            _integer("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        if not isinstance(cast("object", self.ignore_eos), bool):
            raise _error("ignore_eos", self.ignore_eos, "give True or False")
        clean = (
            ("stop", _stop_strings(self.stop)),
            ("stop_token_ids", _stop_ids(self.stop_token_ids)),
            ("logit_bias", _biases(self.logit_bias)),
        )
        for name, value in clean:
            object.__setattr__(self, name, value)  # normalising inside __post_init__ is the record's own business

    @property
    def is_greedy(self) -> bool:
        """A true argmax: no temperature to speak of, or a filter that leaves one token."""
        return self.temperature < GREEDY_BELOW or self.top_k == 1 or self.top_p == 0.0

    @property
    def is_filtered(self) -> bool:
        """Random, with top-k, top-p or min-p in force."""
        return not self.is_greedy and (self.top_k > 1 or self.top_p < 1.0 or self.min_p > 0.0)

    @property
    def changes_logits(self) -> bool:
        """Penalties or biases are in force."""
        return bool(
            self.repetition_penalty != 1.0 or self.presence_penalty or self.frequency_penalty or self.logit_bias
        )

    @property
    def edits_logits(self) -> bool:
        """Needs its logits changed before sampling, or read after it: sampled outside the step."""
        return self.changes_logits or self.logprobs is not None


def _error(name: str, value: object, remedy: str) -> AdmissionError:
    return AdmissionError(f"sampling parameter `{name}` is {value!r:.80}", field=name, value=value, remedy=remedy)


def _error_in(name: str, part: object, remedy: str) -> AdmissionError:
    return AdmissionError(f"sampling parameter `{name}` holds {part!r:.80}", field=name, value=part, remedy=remedy)


def _is_number(value: object, low: float, high: float) -> bool:
    # NaN fails every comparison, infinity the upper one.
    return isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high


def _is_integer(value: object, low: int, high: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def _number(name: str, value: object, low: float, high: float, *, open_low: bool = False) -> None:
    if not _is_number(value, low, high) or (open_low and value == low):
        raise _error(name, value, f"give a finite number in {'(' if open_low else '['}{low:g}, {high:g}]")


def _integer(name: str, value: object, low: int, high: int) -> None:
    if not _is_integer(value, low, high):
        raise _error(name, value, f"give an integer from {low} to {high}")


def _listed(name: str, given: object) -> tuple[object, ...]:
    if not isinstance(given, list | tuple | set | frozenset):
        raise _error(name, given, "give a list")
    return tuple(given)


def _stop_strings(given: object) -> tuple[str, ...]:
    texts: tuple[object, ...] = (given,) if isinstance(given, str) else _listed("stop", given)
    for text in texts:
        if not isinstance(text, str) or not text:
            raise _error_in("stop", text, "give non-empty strings")
    return cast("tuple[str, ...]", texts)


def _stop_ids(given: object) -> tuple[int, ...]:
    ids = _listed("stop_token_ids", given)
    for token in ids:
        _integer("stop_token_ids", token, 0, _MAX_INT)
    return cast("tuple[int, ...]", ids)


def _biases(given: object) -> tuple[tuple[int, float], ...]:
    pairs = tuple(given.items()) if isinstance(given, Mapping) else _listed("logit_bias", given)
    clean = []
    for pair in pairs:
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise _error_in("logit_bias", pair, "give {token id: number}, or a list of such pairs")
        token, bias = pair
        if not _is_integer(token, 0, _MAX_INT) or not _is_number(bias, -1e6, 1e6):
            raise _error_in(
                "logit_bias", pair, f"give {{token id: number}}: ids from 0 to {_MAX_INT}, numbers from -1e6 to 1e6"
            )
        clean.append((token, float(bias)))
    return tuple(clean)
