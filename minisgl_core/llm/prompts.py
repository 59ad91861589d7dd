"""From what a caller gives as prompts to token ids that the model can serve."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np

from minisgl_core.core import SamplingParams
from minisgl_core.errors import AdmissionError, UsageError
from minisgl_core.scheduler import Limits
from minisgl_core.tokenizer import Tokenizer

__all__ = ["PreparedPrompt", "Prompt", "prepare_prompts"]

Prompt = str | Sequence[int]
"""A text, or the token ids of one."""
PreparedPrompt = tuple[np.ndarray, SamplingParams]
"""Token ids (int32) and how to answer them."""


def prepare_prompts(
    prompts: Prompt | Sequence[Prompt],
    params: SamplingParams | Sequence[SamplingParams] | None,
    tokenizer: Tokenizer | None,
    limits: Limits,
) -> list[PreparedPrompt]:
    """Token ids and parameters of each prompt.

    Raises :class:`AdmissionError` for the first prompt that cannot be served, with its index.
    """
    listed = _as_list(prompts)
    prepared = []
    for index, (prompt, own) in enumerate(zip(listed, _params_of_each(params, len(listed)), strict=True)):
        try:
            input_ids = _token_ids(prompt, tokenizer, limits)
            limits.check_prompt(input_ids)
            limits.check_params(own)
            _check_stop(own, tokenizer)
        except AdmissionError as error:
            raise AdmissionError(
                f"prompt {index}: {error.message}", field=error.field, value=error.value, remedy=error.remedy
            ) from None
        prepared.append((input_ids, own))
    return prepared


def _token_ids(prompt: Prompt, tokenizer: Tokenizer | None, limits: Limits) -> np.ndarray:
    if isinstance(prompt, str):
        if tokenizer is None:
            raise AdmissionError(
                "a text cannot be encoded: the model has no tokenizer files",
                field="prompt",
                value=prompt[:40],
                remedy="give token ids",
            )
        return np.array(tokenizer.encode(prompt), dtype=np.int32)
    if not _is_listing(prompt):
        raise AdmissionError(
            f"the prompt is {prompt!r:.60}", field="prompt", value=prompt, remedy="give a text or token ids"
        )
    wrong = [token for token in prompt if not _is_token(token)]
    if wrong:
        raise AdmissionError(
            f"the prompt holds {wrong[0]!r}", field="prompt", value=wrong[0], remedy="give a text or token ids"
        )
    beyond_int32 = next((token for token in prompt if not -(2**31) <= token < 2**31), None)
    if beyond_int32 is not None:
        raise limits.unknown_token(beyond_int32)
    return np.array(prompt, dtype=np.int32)


def _check_stop(params: SamplingParams, tokenizer: Tokenizer | None) -> None:
    if params.stop and tokenizer is None:
        raise AdmissionError(
            "`stop` strings need a tokenizer, and the model has none",
            field="stop",
            value=params.stop,
            remedy="use `stop_token_ids`",
        )


def _is_token(value: object) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _is_listing(value: object) -> bool:
    return isinstance(value, Sequence | np.ndarray) and not isinstance(value, str | bytes | bytearray)


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A text, or a non-empty list of token ids, is one prompt."""
    if isinstance(prompts, str):
        return [prompts]
    if not _is_listing(prompts):
        raise AdmissionError(
            f"the prompts are {prompts!r:.60}",
            field="prompts",
            value=prompts,
            remedy="give a text, a list of token ids, or a list of these",
        )
    listed: list[Any] = list(prompts)
    return [listed] if listed and all(map(_is_token, listed)) else listed


def _params_of_each(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if not _is_listing(params) or not all(isinstance(cast("object", one), SamplingParams) for one in params):
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
