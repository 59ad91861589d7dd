"""The records that travel through the engine: sampling parameters, a Req, a Batch of them, and the Context of a model.

Lengths of a Req, in tokens: ``cached_len`` have KV in the pool before this pass, ``device_len`` after it,
``extend_len`` is the difference. Shapes: T tokens, B rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from .errors import AdmissionError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .distributed import DistributedInfo
    from .modelconfig import ModelConfig
    from .plugin_api import (
        BatchView,
        Communicator,
        KVKernels,
        LayerOps,
        LinearBackend,
        MoEExecutor,
        Phase,
        Platform,
    )
    from .plugin_api.batch import KVPool

__all__ = ["Batch", "Context", "Req", "ReqTable", "SamplingParams"]

GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy: dividing logits by them leaves nothing but the maximum."""


def _number(name: str, value: object, low: float, high: float, *, open_low: bool = False) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    # NaN fails every comparison, infinity the upper one.
    if not is_number or not low <= cast("float", value) <= high or (open_low and value == low):
        bracket = "(" if open_low else "["
        raise AdmissionError(
            f"sampling parameter `{name}` is {value!r}",
            field=name,
            value=value,
            remedy=f"give a finite number in {bracket}{low:g}, {high:g}]",
        )


def _integer(name: str, value: object, low: int, high: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise AdmissionError(
            f"sampling parameter `{name}` is {value!r}",
            field=name,
            value=value,
            remedy=f"give an integer from {low} to {high}",
        )


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
    logprobs: int | None = None

    def __post_init__(self) -> None:
        _number("temperature", self.temperature, 0.0, 1e6)
        _integer("top_k", self.top_k, -1, 2**31 - 1)
        _number("top_p", self.top_p, 0.0, 1.0)
        _number("min_p", self.min_p, 0.0, 1.0)
        _integer("max_tokens", self.max_tokens, 1, 2**31 - 1)
        _number("repetition_penalty", self.repetition_penalty, 0.0, 1e6, open_low=True)
        _number("presence_penalty", self.presence_penalty, -1e6, 1e6)
        _number("frequency_penalty", self.frequency_penalty, -1e6, 1e6)
        if self.seed is not None:
            _integer("seed", self.seed, -(2**63), 2**64 - 1)
        if self.logprobs is not None:
            _integer("logprobs", self.logprobs, 0, 20)
        if not isinstance(cast("object", self.ignore_eos), bool):
            raise AdmissionError(
                f"sampling parameter `ignore_eos` is {self.ignore_eos!r}",
                field="ignore_eos",
                value=self.ignore_eos,
                remedy="give True or False",
            )
        for name in ("stop", "stop_token_ids"):
            if not isinstance(getattr(self, name), list | tuple | set | frozenset | str):
                raise AdmissionError(
                    f"sampling parameter `{name}` is {getattr(self, name)!r}",
                    field=name,
                    value=getattr(self, name),
                    remedy="give a list",
                )
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        for text in stop:
            if not text or not isinstance(cast("object", text), str):
                raise AdmissionError(
                    f"sampling parameter `stop` holds {text!r}",
                    field="stop",
                    value=text,
                    remedy="give non-empty strings",
                )
        ids = tuple(self.stop_token_ids)
        for token in ids:
            _integer("stop_token_ids", token, 0, 2**31 - 1)
        pairs = self.logit_bias.items() if isinstance(self.logit_bias, dict) else self.logit_bias
        bias = tuple((token, float(value)) for token, value in pairs)
        for token, value in bias:
            _integer("logit_bias", token, 0, 2**31 - 1)
            _number("logit_bias", value, -1e6, 1e6)
        for name, clean in (("stop", stop), ("stop_token_ids", ids), ("logit_bias", bias)):
            object.__setattr__(self, name, clean)  # normalising inside __post_init__ is the record's own business

    @property
    def is_greedy(self) -> bool:
        """A true argmax: no temperature to speak of, or a filter that leaves one token."""
        return self.temperature < GREEDY_BELOW or self.top_k == 1 or self.top_p == 0.0

    @property
    def is_filtered(self) -> bool:
        """Random, with top-k, top-p or min-p in force."""
        return not self.is_greedy and (self.top_k > 1 or self.top_p < 1.0 or self.min_p > 0.0)

    @property
    def edits_logits(self) -> bool:
        """Needs its logits changed before sampling, or read after it: sampled outside the step."""
        return bool(
            self.repetition_penalty != 1.0
            or self.presence_penalty
            or self.frequency_penalty
            or self.logit_bias
            or self.logprobs is not None
        )


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
        "max_device_len",
        "prompt_len",
        "sampling_params",
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
        self.cache_handle = cache_handle
        self.extra: Any = None
        """Owned by the scheduler."""

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
    """(B,) int64 on the device: where each Req's last token stands among the T tokens (prefill)."""
    attn: Any = None
    """The attention backend that serves this batch, chosen once by the dispatcher."""
    table: ReqTable | None = None
    table_idx: np.ndarray | None = None
    """(B,) int64 on the host: each Req's row of ``table``, where they keep their lengths; both or neither is set. Other
    Reqs mean another array: whoever has seen this very array before knows the batch.
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


@dataclass(slots=True)
class Context:
    """What a model's layers need from their engine: facts and the chosen backends, handed down at construction."""

    config: ModelConfig
    tp: DistributedInfo
    device: torch.device
    dtype: torch.dtype
    platform: Platform
    comm: Communicator
    kv: KVKernels
    ops: LayerOps
    linear: LinearBackend
    moe: MoEExecutor | None = None
    attn: Any = None
    """The attention dispatcher: ``forward(q, k, v, layer_id, batch)``."""
    pool: KVPool | None = None
    max_seq_len: int = 0
    max_tokens: int = 0
