"""How one request is sampled, checked and normalised when it is made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Final, cast

import numpy as np

from ..errors import AdmissionError, unknown_name
from ..plugin_api import Grammar, GrammarError

__all__ = ["HINTS", "MAX_CHOICES", "MAX_LOGPROBS", "SEEDS", "SamplingParams"]

SEEDS: Final = range(-(2**63), 2**64)
"""Seeds are taken modulo 2**64: signed and unsigned 64-bit numbers are welcome, any larger one would be an alias."""
GREEDY_BELOW: Final = 1e-5
"""Temperatures below this are greedy: dividing logits by them leaves nothing but the maximum."""
MAX_LOGPROBS: Final = 20
"""Of the likeliest tokens of a place"""
MAX_CHOICES: Final = 1024
"""Answers to one prompt"""
_MAX_INT: Final = 2**31 - 1
_GOLDEN: Final = 0x9E3779B97F4A7C15
"""2**64 divided by the golden ratio, made odd."""

HINTS: Final = {
    "max_new_tokens": "SamplingParams calls this `max_tokens`",
    "max_completion_tokens": "SamplingParams calls this `max_tokens`",
    "max_length": "`max_tokens` counts the tokens of the answer alone",
    "min_new_tokens": "SamplingParams calls this `min_tokens`",
    "min_length": "`min_tokens` counts the tokens of the answer alone",
    "do_sample": "`temperature=0` takes the likeliest token, any higher one samples",
    "num_return_sequences": "SamplingParams calls this `n`",
    "best_of": "set `n`, and choose among the answers by their `logprobs`",
    "stop_strings": "SamplingParams calls this `stop`",
    "stop_sequences": "SamplingParams calls this `stop`",
    "eos_token_id": "give further ids that end an answer as `stop_token_ids`",
    "repeat_penalty": "SamplingParams calls this `repetition_penalty`",
    "top_logprobs": "SamplingParams calls this `logprobs`: the number of alternatives",
    "use_beam_search": "there is no beam search; set `n` and a `temperature`",
    "num_beams": "there is no beam search; set `n` and a `temperature`",
    "beam_width": "there is no beam search; set `n` and a `temperature`",
}
"""What other libraries call a parameter: what to do here."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request is sampled.

    ``temperature`` 0 = always the likeliest token. ``top_k`` k keeps the k likeliest tokens and every token as likely
    as the k-th, so ties at the k-th place all survive; 0 or -1 = off. ``top_p`` p then keeps, of what top-k has left,
    the fewest likeliest tokens whose probabilities add up to at least p of the whole; 1 = off, 0 = the likeliest token.
    ``min_p`` keeps the tokens at least this share as likely as the likeliest one; 0 = off.

    ``max_tokens`` None = as many as context and KV pool leave; 0 scores the prompt and generates nothing, which needs
    ``prompt_logprobs``. Before ``min_tokens`` tokens the ids that would end the answer have probability 0, and stop
    strings are not looked for. ``n`` answers share the prompt; each has a seed of its own, and the first is the answer
    that ``n=1`` gives. ``seed`` None = engine seed + uid.

    ``logprobs`` n: for each token its log-probability and the n likeliest, None = none. ``prompt_logprobs`` n: the same
    for each token of the prompt but the first, which nothing predicts; the prompt is then computed from its beginning,
    whatever is cached.

    ``grammar`` g: the form of the answer, a :class:`~minisgl_core.plugin_api.Grammar` or data such as ``{"regex":
    "..."}``. The answer ends where nothing could follow; ``ignore_eos`` and ``min_tokens`` prolong it as far as its
    grammar allows, ``stop``, ``stop_token_ids`` and ``max_tokens`` may cut it.

    Every parameter may be None, which means the default, and NumPy scalars count as numbers. Raises
    :class:`~minisgl_core.errors.AdmissionError` on a value out of range, :class:`~minisgl_core.errors.UsageError` on
    an unknown name.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    n: int = 1
    max_tokens: int | None = 1024
    min_tokens: int = 0
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
    prompt_logprobs: int | None = None
    grammar: Grammar | Mapping[str, Any] | None = None

    def __new__(cls, *args: Any, **given: Any) -> SamplingParams:
        """Refuse unknown names before ``__init__`` does so without a hint."""
        for name, value in given.items():
            if name not in cls.__slots__:
                raise unknown_name("SamplingParams", name, value, cls.__slots__, HINTS)
        return object.__new__(cls)

    def __post_init__(self) -> None:
        for field in fields(self):
            value = _plain(getattr(self, field.name))
            if value is None and field.name != "max_tokens":
                value = field.default
            object.__setattr__(self, field.name, value)  # normalising inside __post_init__ is the record's own business
        self._check_numbers()
        clean = (
            ("stop", _stop_strings(self.stop)),
            ("stop_token_ids", _stop_ids(self.stop_token_ids)),
            ("logit_bias", _biases(self.logit_bias)),
            ("grammar", _grammar(self.grammar)),
        )
        for name, value in clean:
            object.__setattr__(self, name, value)

    def _check_numbers(self) -> None:
        _number("temperature", self.temperature, 0.0, 1e6)
        _integer("top_k", self.top_k, -1, _MAX_INT)
        _number("top_p", self.top_p, 0.0, 1.0)
        _number("min_p", self.min_p, 0.0, 1.0)
        _integer("n", self.n, 1, MAX_CHOICES)
        _number("repetition_penalty", self.repetition_penalty, 0.0, 1e6, open_low=True)
        _number("presence_penalty", self.presence_penalty, -1e6, 1e6)
        _number("frequency_penalty", self.frequency_penalty, -1e6, 1e6)
        if self.seed is not None:
            _integer("seed", self.seed, SEEDS.start, SEEDS.stop - 1)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _integer(name, getattr(self, name), 0, MAX_LOGPROBS)
        if not isinstance(cast("object", self.ignore_eos), bool):
            raise _error("ignore_eos", self.ignore_eos, "give True or False")
        self._check_lengths()

    def _check_lengths(self) -> None:
        if self.max_tokens is not None:
            only_scores = self.prompt_logprobs is not None and self.n == 1
            _integer("max_tokens", self.max_tokens, 0 if only_scores else 1, _MAX_INT)
        _integer("min_tokens", self.min_tokens, 0, _MAX_INT)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise _error("min_tokens", self.min_tokens, f"give at most `max_tokens`, which is {self.max_tokens}")

    def choices(self) -> list[SamplingParams]:
        """The parameters of each of the ``n`` answers: one answer each, with a seed that depends on (seed, i) alone.

        The first has the seed itself, and is the only one to score the prompt.
        """
        if self.n == 1:
            return [self]
        first = replace(self, n=1)
        others = [replace(first, seed=_derived_seed(self.seed, i), prompt_logprobs=None) for i in range(1, self.n)]
        return [first, *others]

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
        """Penalties, biases or a grammar are in force, as long as it runs."""
        has_penalties = self.repetition_penalty != 1.0 or self.presence_penalty or self.frequency_penalty
        return bool(has_penalties or self.logit_bias or self.grammar is not None)


def _derived_seed(seed: int | None, choice: int) -> int | None:
    """Scrambled (SplitMix64, Steele et al. 2014): users often give ``seed + 1`` to their next request."""
    if seed is None:
        return None
    mixed = (seed + choice * _GOLDEN) % 2**64
    mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB % 2**64
    return mixed ^ (mixed >> 31)


def _plain(value: object) -> object:
    """A NumPy scalar as the Python number that it holds."""
    return value.item() if isinstance(value, np.generic) else value


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


def _grammar(given: object) -> Grammar | None:
    if given is None or isinstance(given, Grammar):
        return given
    if not isinstance(given, Mapping):
        raise _error("grammar", given, 'give a Grammar, or data such as {"json_schema": {...}}')
    try:
        return Grammar.of(given)
    except GrammarError as error:
        raise AdmissionError(f"`grammar` cannot be used: {error}", field="grammar", value=dict(given)) from error


def _stop_strings(given: object) -> tuple[str, ...]:
    texts: tuple[object, ...] = (given,) if isinstance(given, str) else _listed("stop", given)
    for text in texts:
        if not isinstance(text, str) or not text:
            raise _error_in("stop", text, "give non-empty strings")
    return cast("tuple[str, ...]", texts)


def _stop_ids(given: object) -> tuple[int, ...]:
    ids = tuple(map(_plain, _listed("stop_token_ids", given)))
    for token in ids:
        _integer("stop_token_ids", token, 0, _MAX_INT)
    return cast("tuple[int, ...]", ids)


def _biases(given: object) -> tuple[tuple[int, float], ...]:
    pairs = tuple(given.items()) if isinstance(given, Mapping) else _listed("logit_bias", given)
    clean = []
    for pair in pairs:
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise _error_in("logit_bias", pair, "give {token id: number}, or a list of such pairs")
        token, bias = map(_plain, pair)
        if not _is_integer(token, 0, _MAX_INT) or not _is_number(bias, -1e6, 1e6):
            raise _error_in(
                "logit_bias", pair, f"give {{token id: number}}: ids from 0 to {_MAX_INT}, numbers from -1e6 to 1e6"
            )
        clean.append((cast("int", token), float(cast("float", bias))))
    return tuple(clean)
