"""What a request may demand of an engine, checked before any work is done for it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple, cast

from minisgl_core.errors import AdmissionError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np

    from minisgl_core.core import SamplingParams

__all__ = ["MAX_PRIORITY", "Limits"]

MAX_PRIORITY: Final = 100
"""Bounds how long a request can be overtaken: by ``2 * MAX_PRIORITY`` levels at most."""


class Limits(NamedTuple):
    """Limits of one engine; lengths are in tokens."""

    max_seq_len: int
    """Longest prompt plus output that the context allows."""
    pool_tokens: int | None
    """Number of slots in the KV pool; None before it is sized."""
    vocab_size: int
    uses_priority: bool = False
    """Whether the queue orders requests by priority."""

    @property
    def max_total_len(self) -> int:
        """Longest prompt plus output of a request that has the pool to itself."""
        return self.max_seq_len if self.pool_tokens is None else min(self.max_seq_len, self.pool_tokens)

    def check(self, input_ids: np.ndarray, params: SamplingParams, priority: int = 0) -> None:
        """Raise :class:`AdmissionError` for a request that can never be served; nothing is ever truncated."""
        self._check_prompt(input_ids, longest=self.max_total_len - (params.max_tokens != 0))
        self._check_params(params)
        self.check_priority(priority)

    def _check_prompt(self, input_ids: np.ndarray, longest: int) -> None:
        length = len(input_ids)
        if length == 0:
            raise AdmissionError("the prompt is empty", field="prompt", value=0, remedy="give at least one token")
        if length > longest:
            pool = "" if self.pool_tokens is None else f" and the KV pool holds {self.pool_tokens}"
            problem = "is too long" if longest == self.max_total_len else "leaves no room for an answer"
            raise AdmissionError(
                f"a prompt of {length} tokens {problem}: the context is {self.max_seq_len} tokens{pool}",
                field="prompt",
                value=length,
                remedy=self._more_room(longest),
            )
        low, high = int(input_ids.min()), int(input_ids.max())
        if low < 0 or high >= self.vocab_size:
            raise self.unknown_token(low if low < 0 else high)

    def _more_room(self, longest: int) -> str:
        remedies = []
        if longest:
            remedies.append(f"shorten it to at most {longest} tokens")
        if self.max_total_len < self.max_seq_len:
            remedies.append("give the KV pool more pages (num_page_override or memory_ratio)")
        return ", or ".join(remedies)

    def unknown_token(self, token: int) -> AdmissionError:
        """The error for a prompt with a token id that the vocabulary does not have."""
        return AdmissionError(
            f"the prompt holds token id {token}",
            field="prompt",
            value=token,
            remedy=f"this model's ids go from 0 to {self.vocab_size - 1}",
        )

    def _check_params(self, params: SamplingParams) -> None:
        """This model's vocabulary must have what they name."""
        biased = (token for token, _ in cast("Sequence[tuple[int, float]]", params.logit_bias))
        for name, tokens in (("logit_bias", biased), ("stop_token_ids", params.stop_token_ids)):
            for token in tokens:
                if token >= self.vocab_size:
                    raise AdmissionError(
                        f"sampling parameter `{name}` names token id {token}",
                        field=name,
                        value=token,
                        remedy=f"this model's ids go from 0 to {self.vocab_size - 1}",
                    )
        for name, wanted in (("logprobs", params.logprobs), ("prompt_logprobs", params.prompt_logprobs)):
            if wanted is not None and wanted > self.vocab_size:
                raise AdmissionError(
                    f"sampling parameter `{name}` is {wanted}",
                    field=name,
                    value=wanted,
                    remedy=f"this model has only {self.vocab_size} tokens",
                )

    def check_priority(self, priority: int) -> None:
        """Raise :class:`AdmissionError` for a value that is out of range or that the queue would ignore."""
        is_integer = isinstance(cast("object", priority), int) and not isinstance(priority, bool)
        if not is_integer or not -MAX_PRIORITY <= priority <= MAX_PRIORITY:
            raise AdmissionError(
                f"`priority` is {priority!r:.40}",
                field="priority",
                value=priority,
                remedy=f"give an integer from {-MAX_PRIORITY} to {MAX_PRIORITY}; higher is admitted first",
            )
        if priority and not self.uses_priority:
            raise AdmissionError(
                f"`priority` is {priority}, but this engine admits requests in the order of their arrival",
                field="priority",
                value=priority,
                remedy='set `queue="priority"`',
            )

    def output_len(self, prompt_len: int, params: SamplingParams) -> int:
        """Tokens that may be generated: ``max_tokens``, capped at what context and pool leave (it then ends with
        "length").
        """
        left = self.max_total_len - prompt_len
        return left if params.max_tokens is None else min(params.max_tokens, left)
