"""Prompts in every accepted form, converted to token ids that the model can serve."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, NamedTuple, cast

import numpy as np
import torch

from minisgl_core.core import SamplingParams
from minisgl_core.errors import AdmissionError, UsageError
from minisgl_core.scheduler import Limits
from minisgl_core.tokenizer import Tokenizer

__all__ = ["PreparedPrompt", "Prompt", "Prompts", "prepare_prompts"]

Prompt = str | Iterable[int]
"""A text, or its token ids: a list, a generator, a NumPy array, a torch tensor."""
Prompts = str | Iterable[int | Prompt]
"""One prompt or several; the rows of a two-dimensional array are several. (Not ``Prompt | Iterable[Prompt]``: between
these two mypy cannot decide for a list that holds a text and a list of ids.)
"""

_GIVE = "give a text or token ids"
_GIVE_MANY = "give a text, a list of token ids, or a list of these"
_INTEGERS = frozenset(
    (torch.uint8, torch.int8, torch.uint16, torch.int16, torch.uint32, torch.int32, torch.uint64, torch.int64)
)
_NO_LISTING = (str, bytes, bytearray, Mapping, AbstractSet)
"""Iterable, but not a sequence of prompts or of ids."""


class PreparedPrompt(NamedTuple):
    """A checked prompt and how to answer it."""

    input_ids: np.ndarray
    """(N,) int32"""
    params: SamplingParams
    priority: int = 0
    shown: frozenset[int] = frozenset()
    """Special tokens whose names are part of the answer's text."""


def prepare_prompts(
    prompts: Prompts,
    params: SamplingParams | Sequence[SamplingParams] | None,
    tokenizer: Tokenizer | None,
    limits: Limits,
    priority: int = 0,
) -> list[PreparedPrompt]:
    """Check each prompt and convert it to token ids.

    Raises :class:`AdmissionError` for the first prompt that cannot be served, with its index.
    """
    limits.check_priority(priority)
    listed = _as_list(prompts)
    each = _params_of_each(params, len(listed))
    prepared = []
    for index, (prompt, own) in enumerate(zip(listed, each, strict=True)):
        with _AtPrompt(index):
            input_ids = _token_ids(prompt, tokenizer, limits)
            limits.check(input_ids, own)
            _check_stop(own, tokenizer)
        prepared.append(PreparedPrompt(input_ids, own, priority))
    return prepared


class _AtPrompt:
    """Prefixes an :class:`AdmissionError` with the prompt's index."""

    __slots__ = ("_index",)

    def __init__(self, index: int) -> None:
        self._index = index

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, AdmissionError):
            raise AdmissionError(
                f"prompt {self._index}: {error.message}", field=error.field, value=error.value, remedy=error.remedy
            ) from None


def _token_ids(prompt: object, tokenizer: Tokenizer | None, limits: Limits) -> np.ndarray:
    """(N,) int32."""
    if isinstance(prompt, str):
        if tokenizer is None:
            raise AdmissionError(
                "a text cannot be encoded: the model has no tokenizer files",
                field="prompt",
                value=prompt[:40],
                remedy="give token ids",
            )
        return np.array(tokenizer.encode(prompt), dtype=np.int32)
    if isinstance(prompt, torch.Tensor | np.ndarray) and not _holds_objects(prompt):
        return _narrowed(_checked_array(prompt), limits)
    if not isinstance(prompt, Iterable) or isinstance(prompt, _NO_LISTING):
        raise AdmissionError(
            f"the prompt is {prompt!r:.60}", field="prompt", value=prompt, remedy=_remedy_for(prompt, _GIVE)
        )
    return _narrowed(_listed_ids(list(prompt), limits), limits)


def _checked_array(prompt: torch.Tensor | np.ndarray) -> np.ndarray:
    """(N,) of some integer dtype. An empty array may have any dtype: by default NumPy and torch make it of floats."""
    shape = tuple(prompt.shape)
    if len(shape) != 1 or (shape != (0,) and not _holds_integers(prompt)):
        raise AdmissionError(
            f"the prompt is an array of shape {shape} and dtype {prompt.dtype}",
            field="prompt",
            value=prompt,
            remedy="give token ids: one dimension, integers",
        )
    if shape == (0,):
        return np.empty(0, dtype=np.int32)
    return prompt.detach().cpu().numpy() if isinstance(prompt, torch.Tensor) else prompt


def _holds_integers(array: torch.Tensor | np.ndarray) -> bool:
    if isinstance(array, np.ndarray):
        return array.dtype.kind in "iu"
    return array.dtype in _INTEGERS and array.layout is torch.strided and not array.is_meta


def _holds_objects(array: torch.Tensor | np.ndarray) -> bool:
    """Whether it holds texts or Python objects, like a column of a table."""
    return isinstance(array, np.ndarray) and array.ndim > 0 and array.dtype.kind in "OU"


def _listed_ids(tokens: list[Any], limits: Limits) -> np.ndarray:
    """(N,) int64. NumPy would convert True to 1 and 1.5 to 1, so the types are checked first."""
    if all(map(_is_token_type, set(map(type, tokens)))):
        try:
            return np.fromiter(tokens, dtype=np.int64, count=len(tokens))
        except OverflowError:
            raise limits.unknown_token(next(int(t) for t in tokens if not -(2**63) <= int(t) < 2**63)) from None
    plain = list(map(_plain, tokens))
    for index, token in enumerate(plain):
        if not _is_token_type(type(token)):
            raise AdmissionError(
                f"the prompt holds {tokens[index]!r:.60} at index {index}",
                field="prompt",
                value=tokens[index],
                remedy=_GIVE,
            )
    return _listed_ids(plain, limits)


def _narrowed(array: np.ndarray, limits: Limits) -> np.ndarray:
    """Convert to int32, after checking that no id is changed by that."""
    if array.size and array.dtype != np.int32:
        low, high = int(array.min()), int(array.max())
        if low < 0 or high >= limits.vocab_size:
            raise limits.unknown_token(low if low < 0 else high)
    return array.astype(np.int32)


def _is_token_type(kind: type) -> bool:
    return issubclass(kind, int | np.integer) and not issubclass(kind, bool)


def _plain(value: object) -> object:
    """The number in an array of no dimensions."""
    return value.item() if isinstance(value, torch.Tensor | np.ndarray) and value.ndim == 0 else value


def _check_stop(params: SamplingParams, tokenizer: Tokenizer | None) -> None:
    if params.stop and (tokenizer is None or tokenizer.refusal is not None):
        reason = "the model has none" if tokenizer is None else tokenizer.refusal
        raise AdmissionError(
            f"`stop` strings need a tokenizer: {reason}",
            field="stop",
            value=params.stop,
            remedy="use `stop_token_ids`",
        )


def _as_list(prompts: object) -> list[Any]:
    """A list of prompts. A text is one prompt, and so is a non-empty list that begins with a token id."""
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, torch.Tensor | np.ndarray) and not _holds_objects(prompts):
        return [prompts] if prompts.ndim < 2 else list(prompts)
    if not isinstance(prompts, Iterable) or isinstance(prompts, _NO_LISTING):
        raise AdmissionError(
            f"the prompts are {prompts!r:.60}", field="prompts", value=prompts, remedy=_remedy_for(prompts, _GIVE_MANY)
        )
    listed = prompts if isinstance(prompts, list) else list(prompts)
    return [listed] if listed and _is_token_type(type(_plain(listed[0]))) else listed


def _remedy_for(prompts: object, otherwise: str) -> str:
    for name in ("input_ids", "prompt_token_ids", "prompt"):
        if isinstance(prompts, Mapping) and name in prompts:
            return f"give what it holds as {name!r}"
    return otherwise


def _params_of_each(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if not isinstance(cast("object", params), list | tuple) or not all(
        isinstance(cast("object", one), SamplingParams) for one in params
    ):
        raise AdmissionError(
            f"the sampling parameters are {params!r:.80}",
            field="params",
            value=params,
            remedy="give a SamplingParams, or a list with one for each prompt",
        )
    if len(params) != count:
        raise UsageError(
            f"{len(params)} sampling parameters for {count} prompts",
            field="params",
            value=len(params),
            remedy="give one for all prompts, or one for each",
        )
    return list(params)
