"""FlashInfer's wrappers, with the synchronization that their pinned staging memory needs.

Shapes: T tokens, B rows, H query heads, K kv heads, D head_dim, S page_size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from .compiling import refuse_if_missing

if TYPE_CHECKING:
    from minisgl_core.plugin_api import AttentionSetup, BatchView, LayerFacts

__all__ = ["CapturedDecode", "EagerDecode", "EagerPrefill", "HostPages", "Planned", "plan_arguments"]


class HostPages(NamedTuple):
    """The host part of FlashInfer's page list, int32."""

    indptr: torch.Tensor
    """(B+1,) prefix sum of the rows' page counts"""
    last_page_len: torch.Tensor
    """(B,) tokens in each row's last page"""
    total: int

    @classmethod
    def of(cls, view: BatchView) -> HostPages:
        """Compute it from the host lengths, padded rows included."""
        if view.kv_lens_host is None:
            raise RuntimeError("attention:flashinfer plans on the host: it needs a batch with host lengths")
        lens = np.array(view.kv_lens_host, dtype=np.int32)
        counts = (lens + (view.page_size - 1)) // view.page_size
        indptr = np.zeros(len(lens) + 1, dtype=np.int32)
        np.cumsum(counts, out=indptr[1:])
        last = lens - (counts - 1) * np.int32(view.page_size)
        return cls(torch.from_numpy(indptr), torch.from_numpy(last), int(indptr[-1]))


def plan_arguments(setup: AttentionSetup, facts: LayerFacts) -> dict[str, Any]:
    """The arguments of every plan for layers with these facts. FlashInfer counts the keys left of the query's own."""
    return {
        "sm_scale": facts.scale,
        "window_left": -1 if facts.window is None else facts.window - 1,
        "logits_soft_cap": facts.softcap,
        "q_data_type": setup.dtype,
        "kv_data_type": setup.kv_dtype,
    }


class Planned:
    """One wrapper.

    A plan is computed in the wrapper's pinned memory and copied to its workspace asynchronously. The memory must not be
    written before that copy is done, so each plan waits for the event of the previous one.
    """

    def __init__(self, setup: AttentionSetup, facts: LayerFacts, wrapper: Any) -> None:
        self._wrapper = wrapper
        self._geometry = (setup.q_heads, setup.kv_heads, setup.head_dim, setup.page_size)
        self._arguments = plan_arguments(setup, facts)
        self._copied = setup.platform.new_event()

    def _plan(self, plan: Callable[..., None], *tensors: torch.Tensor, **arguments: Any) -> None:
        self._copied.synchronize()
        try:
            plan(*tensors, *self._geometry, **self._arguments, **arguments)
        except RuntimeError as error:
            refuse_if_missing(error)
            raise
        self._copied.record()

    def run(self, q: torch.Tensor, caches: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """q (T, H, D) -> new (T, H, D)."""
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        self._wrapper.run(q, caches, out=out)
        return out


class EagerPrefill(Planned):
    """Causal attention of the last ``q_len`` tokens of each row."""

    def plan(self, q_lens: tuple[int, ...], host: HostPages, pages: torch.Tensor) -> None:
        """``pages`` (host.total,) is on the device, int32."""
        cu_q = np.zeros(len(q_lens) + 1, dtype=np.int32)
        np.cumsum(np.array(q_lens, dtype=np.int32), out=cu_q[1:])
        self._plan(self._wrapper.plan, torch.from_numpy(cu_q), host.indptr, pages, host.last_page_len, causal=True)


class EagerDecode(Planned):
    """One query per row."""

    def plan(self, host: HostPages, pages: torch.Tensor) -> None:
        """``pages`` (host.total,) is on the device, int32."""
        self._plan(self._wrapper.plan, host.indptr, pages, host.last_page_len)


class CapturedDecode(Planned):
    """One query per row, over fixed buffers that the captured step fills; the host only divides the work.

    Keys may always be split: with ``disable_split_kv`` a tensor-core plan of a graph leaves the tiles past the last row
    undefined, and the kernel would read their rows from stale staging memory.
    """

    def __init__(
        self,
        setup: AttentionSetup,
        facts: LayerFacts,
        wrapper: Any,
        fast_plan: Callable[..., None],
        pages: torch.Tensor,
    ) -> None:
        super().__init__(setup, facts, wrapper)
        self._fast_plan, self._pages = fast_plan, pages

    def plan(self, host: HostPages) -> None:
        """Plan before the capture; also loads the kernels and fixes the grid."""
        self._plan(self._wrapper.plan, host.indptr, self._pages[: host.total], host.last_page_len)

    def replan(self, host: HostPages) -> None:
        """Plan before a replay. The fast plan leaves the buffers unchanged and copies only the division of work."""
        self._plan(self._replan, host.indptr, self._pages, host.last_page_len)

    def _replan(self, *positional: Any, **arguments: Any) -> None:
        self._fast_plan(self._wrapper, *positional, **arguments)
