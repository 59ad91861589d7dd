"""A Req, the table of the lengths and tokens of all Reqs of a scheduler, and a Batch: the Reqs of one pass.

Shapes: T tokens of a pass, B rows of a batch, R rows of the table.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..errors import AdmissionError
from .sampling_params import SamplingParams

if TYPE_CHECKING:
    from ..plugin_api import BatchView, Phase

__all__ = ["Batch", "Req", "ReqTable", "ScoredRows"]


class ReqTable:
    """Lengths and tokens of all Reqs of one scheduler, by ``table_idx``: a batch of them is advanced as a whole.

    R rows. A Req that is made with a table keeps its numbers there, and reads and writes them as attributes all the
    same.
    """

    def __init__(self, rows: int, width: int) -> None:
        self.lens = np.zeros((3, rows), dtype=np.int64)
        self.cached_len, self.device_len, self.num_tokens = self.lens
        """(R,) views"""
        self.max_device_len = np.zeros(rows, dtype=np.int64)
        self.tokens = np.empty((rows, width), dtype=np.int32)

    def complete_one(self, rows: np.ndarray) -> None:
        """:meth:`Req.complete_one` of each Req in ``rows``."""
        device_len = self.device_len[rows]
        self.cached_len[rows] = device_len
        self.device_len[rows] = device_len + 1

    def append_tokens(self, rows: np.ndarray, tokens: np.ndarray) -> None:
        """:meth:`Req.append_token` of each Req in ``rows`` with its token."""
        places = self.num_tokens[rows]
        self.tokens[rows, places] = tokens
        self.num_tokens[rows] = places + 1


class Req:
    """An admitted sequence. Owns its token ids on the host; its row of the device state is ``table_idx``.

    ``input_ids``: int32 host tensor, the prompt (and, after preemption, tokens already generated). ``output_len``: how
    many tokens may still be generated. Invariant: ``0 <= cached_len < device_len <= max_device_len``. ``table``: where
    it keeps lengths and tokens until its row is given to another; None = for itself.
    """

    __slots__ = (
        "_lens",
        "_tokens",
        "cache_handle",
        "extra",
        "grammar",
        "max_device_len",
        "prompt_len",
        "sampling_params",
        "stop_ids",
        "table_idx",
        "uid",
    )

    def __init__(
        self,
        input_ids: torch.Tensor,
        table_idx: int,
        cached_len: int,
        output_len: int,
        uid: int,
        sampling_params: SamplingParams,
        cache_handle: Any = None,
        table: ReqTable | None = None,
    ) -> None:
        length = len(input_ids)
        if not 0 <= cached_len < length:
            raise AdmissionError(
                f"a Req of {length} tokens cannot have cached_len {cached_len}",
                field="cached_len",
                value=cached_len,
                remedy="at least one token must be computed",
            )
        if table is None:
            self._lens = np.empty(3, dtype=np.int64)
            self._tokens = np.empty(length + output_len + 1, dtype=np.int32)
        else:
            self._lens, self._tokens = table.lens[:, table_idx], table.tokens[table_idx]
            table.max_device_len[table_idx] = length + output_len
        self._lens[:] = cached_len, length, length
        self._tokens[:length] = input_ids.numpy()
        self.table_idx = table_idx
        self.max_device_len = length + output_len
        self.prompt_len = length
        self.uid = uid
        self.sampling_params = sampling_params
        self.stop_ids = frozenset(sampling_params.stop_token_ids)
        """Ids that end it. A scheduler adds the model's own."""
        self.cache_handle = cache_handle
        self.extra: Any = None
        """Owned by the scheduler."""
        self.grammar: Any = None
        """The state of a constrained answer, on rank 0, with ``fill_mask`` as :class:`plugin_api.Matcher` has it."""

    @property
    def cached_len(self) -> int:
        return self._lens.item(0)

    @cached_len.setter
    def cached_len(self, length: int) -> None:
        self._lens[0] = length

    @property
    def device_len(self) -> int:
        return self._lens.item(1)

    @device_len.setter
    def device_len(self, length: int) -> None:
        self._lens[1] = length

    @property
    def num_tokens(self) -> int:
        """Tokens known on the host."""
        return self._lens.item(2)

    @property
    def input_ids(self) -> torch.Tensor:
        """(tokens known on the host,) int32: a view, not a copy."""
        return torch.from_numpy(self.tokens)

    @property
    def tokens(self) -> np.ndarray:
        """:attr:`input_ids` as a numpy view."""
        return self._tokens[: self.num_tokens]

    @property
    def extend_len(self) -> int:
        return self.device_len - self.cached_len

    @property
    def remain_len(self) -> int:
        """Tokens it may still generate, counting from the device's point of view."""
        return self.max_device_len - self.device_len

    @property
    def can_decode(self) -> bool:
        return self.device_len < self.max_device_len

    def complete_one(self) -> None:
        """A pass over this Req was launched: its tokens have KV, and one more token exists on the device."""
        self.cached_len = length = self.device_len
        self.device_len = length + 1

    def append_token(self, token: int) -> None:
        """One sampled token reached the host."""
        place = self.num_tokens
        self._tokens[place] = token
        self._lens[2] = place + 1

    def append_host(self, next_tokens: torch.Tensor) -> None:
        """As :meth:`append_token`, from a (1,) host tensor."""
        self.append_token(int(next_tokens[0]))

    def __repr__(self) -> str:
        return (
            f"Req(uid={self.uid}, row={self.table_idx}, cached={self.cached_len}, device={self.device_len}, "
            f"max={self.max_device_len})"
        )


@dataclass(slots=True)
class ScoredRows:
    """The tokens of a prefill pass that scores prompts: which of them the last layer and the head need.

    On the device: ``kept`` (K,) int64, of the T tokens those that are scored and each Req's last one, ascending;
    ``last`` (B,) and ``scored`` (S,) int64, which of the K these are; ``targets`` (S,) int32, the token that follows
    each scored one in its prompt.
    """

    kept: torch.Tensor
    last: torch.Tensor
    scored: torch.Tensor
    targets: torch.Tensor
    counts: tuple[tuple[int, int], ...]
    """(row of the batch, how many of its tokens are scored)"""
    hidden: torch.Tensor | None = None
    """(K, hidden): the normalised state of the kept tokens; the model sets it."""


@dataclass(slots=True)
class Batch:
    """The Reqs of one pass, all in one phase.

    ``input_ids``, ``positions`` and ``out_loc`` (T,) int32 are derived on the device inside the step; values that the
    caller sets by hand win: they are copied into the device buffers first.
    """

    reqs: list[Req]
    phase: Phase
    input_ids: torch.Tensor | None = None
    positions: torch.Tensor | None = None
    out_loc: torch.Tensor | None = None
    padded_size: int = 0
    """Rows it runs at, padding included; 0 = not padded yet (``GraphRunner.pad_batch`` sets it)."""
    view: BatchView | None = None
    scratch: dict[str, Any] = field(default_factory=dict)
    captured: bool = False
    rows: torch.Tensor | None = None
    """(padded_size,) int32 on the device: each row's ``table_idx``; padding names the dummy row."""
    mode: Any = None
    """The SamplingMode that ``sampler.prepare`` chose."""
    last_rows: torch.Tensor | None = None
    """(B,) int64 on the device: the place of each Req's last token among the T tokens (prefill)."""
    scored: ScoredRows | None = None
    """Set where a Req has its prompt scored (prefill)."""
    attn: Any = None
    """The attention backend that serves this batch, chosen once by the dispatcher."""
    table: ReqTable | None = None
    table_idx: np.ndarray | None = None
    """(B,) int64 on the host: each Req's row of ``table``, where they keep their lengths; both or neither is set. Other
    Reqs mean another array: the same array object means the same batch.
    """

    def rows_host(self) -> np.ndarray:
        """(B,) int64: each Req's ``table_idx``."""
        if self.table_idx is not None:
            return self.table_idx
        return np.array([req.table_idx for req in self.reqs], dtype=np.int64)

    def cached_lens(self) -> np.ndarray:
        """(B,) int64"""
        if self.table is not None:
            return self.table.cached_len[self.table_idx]
        return np.array([req.cached_len for req in self.reqs], dtype=np.int64)

    def device_lens(self) -> np.ndarray:
        """(B,) int64"""
        if self.table is not None:
            return self.table.device_len[self.table_idx]
        return np.array([req.device_len for req in self.reqs], dtype=np.int64)

    def complete_one(self) -> None:
        """:meth:`Req.complete_one` of each Req."""
        if self.table is not None and self.table_idx is not None:
            self.table.complete_one(self.table_idx)
        else:
            for req in self.reqs:
                req.complete_one()

    @property
    def size(self) -> int:
        return len(self.reqs)

    @property
    def is_prefill(self) -> bool:
        return self.phase == "prefill"

    @property
    def is_decode(self) -> bool:
        return self.phase == "decode"
