"""``attention:cpu``: blocked prefill and split decode over the paged pool, float32 inside."""

from __future__ import annotations

import torch

from minisgl_core.plugin_api import AttentionSetup, BatchLike, KVPool

from .build import library
from .entry import DTYPE_CODES, kernel, threads

__all__ = ["NativeAttention"]


def _attention(
    out: torch.Tensor,
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    cu_q: torch.Tensor,
    kv_lens: torch.Tensor,
    page_ids: torch.Tensor,
    page_size: int,
    scale: float,
    window: int,
    softcap: float,
) -> tuple[float, ...]:
    _, heads, dim = q.shape
    slot, head = k_cache.stride()[1:3]
    return (
        q.data_ptr(),
        k_cache.data_ptr(),
        v_cache.data_ptr(),
        out.data_ptr(),
        cu_q.data_ptr(),
        kv_lens.data_ptr(),
        page_ids.data_ptr(),
        q.stride(0),
        q.stride(1),
        slot,
        head,
        page_ids.stride(0),
        kv_lens.shape[0],
        heads,
        k_cache.shape[2],
        dim,
        page_size,
        window,
        DTYPE_CODES[q.dtype],
        DTYPE_CODES[k_cache.dtype],
        threads(),
        scale,
        softcap,
    )


_OP = kernel(
    "attention(Tensor(a!) out, Tensor q, Tensor k_cache, Tensor v_cache, Tensor cu_q, Tensor kv_lens, Tensor page_ids, "
    "int page_size, float scale, int window, float softcap) -> ()",
    "minisgl_attention",
    "7P14q2d",
    _attention,
)


class NativeAttention:
    """Any head count, head_dim, page size, window and softcap. Lengths and pages are read when the kernel runs."""

    def __init__(self, setup: AttentionSetup, options: object = None) -> None:
        library()
        self._facts = tuple((layer.scale, layer.window or 0, layer.softcap or 0.0) for layer in setup.layers)
        self._caches: list[tuple[torch.Tensor, torch.Tensor]] = []

    def bind_kv(self, pool: KVPool) -> None:
        """Keep each layer's caches. The kernel treats pages as runs of slots, for any page size."""
        self._caches = [(pool.k_cache(layer), pool.v_cache(layer)) for layer in range(len(self._facts))]
        for pair in self._caches:
            for cache in pair:
                if cache.stride(3) != 1 or cache.stride(0) != cache.shape[1] * cache.stride(1):
                    raise ValueError(f"attention:cpu needs pages of consecutive slots, got strides {cache.stride()}")

    def prepare_metadata(self, batch: BatchLike) -> None:
        """Nothing to plan."""

    def update_metadata(self, batch: BatchLike) -> None:
        """Nothing: the view has everything."""

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer_id: int, batch: BatchLike
    ) -> torch.Tensor:
        """q (T, H, D) -> new (T, H, D), reading keys and values from the pool."""
        view = batch.view
        out = q.new_empty(q.shape)
        _OP(
            out,
            q,
            *self._caches[layer_id],
            view.cu_q_device,
            view.kv_lens_device,
            view.page_ids_device,
            view.page_size,
            *self._facts[layer_id],
        )
        return out

    def init_capture_graph(self, max_seq_len: int, bs_list: tuple[int, ...]) -> None:
        """Nothing to allocate."""

    def prepare_for_capture(self, batch: BatchLike) -> None:
        """Nothing to plan."""

    def prepare_for_replay(self, batch: BatchLike) -> None:
        """Nothing to plan."""

    def close(self) -> None:
        """Release the pool."""
        self._caches = []
