"""``attention:torch``: paged attention in plain torch, float32 inside, on any device.

Softmax runs online over blocks of keys, so that no score matrix larger than one block exists. Decode reads lengths and
pages from device tensors only and has shapes that depend on ``max_kv`` alone: it can be captured. Prefill uses the host
lengths. Shapes: T tokens, B rows, H query heads, K kv heads, G = H / K, D head_dim, S page_size, L keys of a block.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from minisgl_core.plugin_api import AttentionSetup, BatchLike, KVPool, LayerFacts

__all__ = ["TorchAttention"]

QUERY_BLOCK = 256
KEY_BLOCK = 1024
_SLOTS = "attention:torch/slots"


class TorchAttention:
    """Any head count, head_dim, page size, window and softcap. Reads the pool as slots, whatever its page size."""

    def __init__(self, setup: AttentionSetup, options: object = None) -> None:
        self._layers = setup.layers
        self._kv_heads = setup.kv_heads
        self._group = setup.q_heads // setup.kv_heads
        self._caches: list[tuple[torch.Tensor, torch.Tensor]] = []

    def bind_kv(self, pool: KVPool) -> None:
        """Keep each layer's caches as (slots, K, D) views."""
        layers = range(len(self._layers))
        self._caches = [(pool.k_cache(layer).flatten(0, 1), pool.v_cache(layer).flatten(0, 1)) for layer in layers]

    def prepare_metadata(self, batch: BatchLike) -> None:
        """Nothing to plan."""

    def update_metadata(self, batch: BatchLike) -> None:
        """Derive every row's slots (B, keys) from its page ids; keys past a row's end name the dummy page's slots."""
        view = batch.view
        size = view.page_size
        pages = view.page_ids_device[:, : -(-view.max_kv // size)].long()
        within = torch.arange(size, device=pages.device)
        batch.scratch[_SLOTS] = (pages[:, :, None] * size + within).flatten(1)[:, : view.max_kv]

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer_id: int, batch: BatchLike
    ) -> torch.Tensor:
        """q (T, H, D) -> new (T, H, D), reading keys and values from the pool."""
        facts = self._layers[layer_id]
        k_cache, v_cache = self._caches[layer_id]
        slots: torch.Tensor = batch.scratch[_SLOTS]
        if batch.phase == "decode":
            return self._decode(q, k_cache, v_cache, slots, batch.view.kv_lens_device, facts)
        view = batch.view
        if view.q_lens_host is None or view.kv_lens_host is None:
            raise RuntimeError("attention:torch cannot capture prefill: the batch has no host lengths")
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        start = 0
        for row, (q_len, kv_len) in enumerate(zip(view.q_lens_host, view.kv_lens_host, strict=True)):
            own = slots[row, :kv_len]
            rows = slice(start, start + q_len)
            out[rows] = self._prefill_row(q[rows], k_cache, v_cache, own, facts)
            start += q_len
        return out

    def _decode(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        slots: torch.Tensor,
        kv_lens: torch.Tensor,
        facts: LayerFacts,
    ) -> torch.Tensor:
        """One query per row: q (B, H, D), slots (B, keys)."""
        rows, heads, dim = q.shape
        grouped = q.float().view(rows, self._kv_heads, self._group, dim) * facts.scale
        softmax = _OnlineSoftmax.start(grouped)
        for begin in range(0, slots.shape[1], KEY_BLOCK):
            block = slots[:, begin : begin + KEY_BLOCK]
            position = torch.arange(begin, begin + block.shape[1], device=q.device)
            visible = _visible(kv_lens[:, None] - 1, position, facts.window)
            # Slots past the end may contain anything, including NaN, and 0 * NaN is NaN: clear them.
            keys = k_cache[block].float().masked_fill_(~visible[:, :, None, None], 0)
            values = v_cache[block].float().masked_fill_(~visible[:, :, None, None], 0)
            scores = _capped(grouped @ keys.permute(0, 2, 3, 1), facts.softcap)
            softmax.add(scores.masked_fill_(~visible[:, None, None, :], -torch.inf), values.transpose(1, 2))
        return softmax.result().view(rows, heads, dim).to(q.dtype)

    def _prefill_row(
        self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slots: torch.Tensor, facts: LayerFacts
    ) -> torch.Tensor:
        """The last ``len(q)`` of ``len(slots)`` positions of one sequence: q (M, H, D) -> (M, H, D)."""
        new, heads, dim = q.shape
        total = slots.shape[0]
        blocks = []
        for begin in range(0, new, QUERY_BLOCK):
            part = q[begin : begin + QUERY_BLOCK]
            first, count = total - new + begin, part.shape[0]
            position = torch.arange(first, first + count, device=q.device)[:, None]
            grouped = part.float().view(count, self._kv_heads, self._group, dim).permute(1, 2, 0, 3) * facts.scale
            softmax = _OnlineSoftmax.start(grouped)
            low = 0 if facts.window is None else max(0, first - facts.window + 1)
            for at in range(low, first + count, KEY_BLOCK):
                end = min(at + KEY_BLOCK, first + count)
                own = slots[at:end]
                keys, values = k_cache[own].float(), v_cache[own].float()
                scores = _capped(grouped @ keys.permute(1, 2, 0)[:, None], facts.softcap)
                visible = _visible(position, torch.arange(at, end, device=q.device), facts.window)
                softmax.add(scores.masked_fill_(~visible, -torch.inf), values.transpose(0, 1)[:, None])
            blocks.append(softmax.result().permute(2, 0, 1, 3).reshape(count, heads, dim))
        return torch.cat(blocks).to(q.dtype)

    def init_capture_graph(self, max_seq_len: int, bs_list: tuple[int, ...]) -> None:
        """Nothing to allocate."""

    def prepare_for_capture(self, batch: BatchLike) -> None:
        """Nothing to plan."""

    def prepare_for_replay(self, batch: BatchLike) -> None:
        """Nothing to plan."""

    def close(self) -> None:
        """Release the pool."""
        self._caches = []


@dataclass(slots=True)
class _OnlineSoftmax:
    """softmax(scores) @ values over blocks of keys (Milakov and Gimelshein, 2018). Leading dimensions are free."""

    top: torch.Tensor
    """(..., M, 1) largest score so far"""
    total: torch.Tensor
    """(..., M, 1) sum of exp(score - top)"""
    mixed: torch.Tensor
    """(..., M, D) sum of exp(score - top) * value"""

    @classmethod
    def start(cls, queries: torch.Tensor) -> _OnlineSoftmax:
        total = queries.new_zeros((*queries.shape[:-1], 1))
        return cls(torch.full_like(total, -torch.inf), total, torch.zeros_like(queries))

    def add(self, scores: torch.Tensor, values: torch.Tensor) -> None:
        """scores (..., M, L) with -inf where invisible; values broadcastable to (..., L, D)."""
        top = torch.maximum(self.top, scores.amax(-1, keepdim=True))
        # A row that has seen no key yet has top = -inf, and -inf - -inf is NaN.
        origin = top.masked_fill(top == -torch.inf, 0)
        weights = torch.exp(scores - origin)
        decay = torch.exp(self.top - origin)
        self.total = self.total * decay + weights.sum(-1, keepdim=True)
        self.mixed = self.mixed * decay + weights @ values
        self.top = top

    def result(self) -> torch.Tensor:
        return self.mixed / self.total


def _visible(query: torch.Tensor, key: torch.Tensor, window: int | None) -> torch.Tensor:
    """Which key positions a query position sees: all up to its own, or the last ``window`` of those."""
    visible = key <= query
    return visible if window is None else visible & (key > query - window)


def _capped(scores: torch.Tensor, softcap: float | None) -> torch.Tensor:
    return scores if softcap is None else torch.tanh(scores / softcap) * softcap
