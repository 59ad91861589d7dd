"""A Batch: the Reqs of one pass. Shapes: T tokens, B rows."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from .req import Req, ReqTable

if TYPE_CHECKING:
    import torch

    from ..plugin_api import BatchView, Phase

__all__ = ["Batch", "ScoredRows"]


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
