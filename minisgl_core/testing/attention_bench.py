"""A paged pool with known sequences, and batches over them as the core would build them.

Memory that no live token owns is filled with NaN: foreign pages, the dummy page, and the rest of a row's last page. For
a backend that declares ``finite_tail`` that rest is zero, as in pages that the core has just allocated. Shapes: T
tokens, B rows, H query heads, K kv heads, D head_dim, P pages, S page_size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from minisgl_core.plugin_api import AttentionSetup, BatchView, LayerFacts

from . import reference
from .device_fixture import DeviceFixture, KitBatch, dtype_named

__all__ = ["AttentionBench", "Geometry", "Lens", "Pool", "whose"]

Lens = Sequence[tuple[int, int]]
"""(new tokens, total tokens) per row."""


@dataclass(frozen=True, slots=True)
class Geometry:
    """The parameters that the caps of an attention backend cover."""

    dtype: str
    kv_dtype: str
    page_size: int
    kv_heads: int
    q_heads: int
    head_dim: int
    layers: tuple[LayerFacts, ...]
    finite_tail: bool = False


class Pool:
    """Implements ``plugin_api.KVPool``; one allocation for all layers, as in the core."""

    layout = "NHD"

    def __init__(self, geometry: Geometry, num_pages: int, device: torch.device) -> None:
        self.num_pages, self.page_size = num_pages, geometry.page_size
        shape = (2, len(geometry.layers), num_pages + 1, self.page_size, geometry.kv_heads, geometry.head_dim)
        self.storage = torch.empty(shape, dtype=dtype_named(geometry.kv_dtype), device=device)

    def k_cache(self, layer: int) -> torch.Tensor:
        """(P + 1, S, K, D)"""
        return self.storage[0, layer]

    def v_cache(self, layer: int) -> torch.Tensor:
        """(P + 1, S, K, D)"""
        return self.storage[1, layer]


class AttentionBench:
    """``rows`` sequences of up to ``longest`` tokens on shuffled pages, and the device state of decode.

    The pool has at least ``slots`` slots.
    """

    def __init__(
        self, fixture: DeviceFixture, geometry: Geometry, rows: int, longest: int, seed: int, slots: int = 0
    ) -> None:
        self.fixture, self.geometry, self.rows, self.longest = fixture, geometry, rows, longest
        self._random = fixture.generator(seed)
        g, device = geometry, fixture.device
        self.dtype, kv_dtype = dtype_named(g.dtype), dtype_named(g.kv_dtype)
        pages = -(-longest // g.page_size)
        self.pool = Pool(g, max(rows * pages + 3, -(-slots // g.page_size)), device)
        shape = (2, len(g.layers), rows, longest, g.kv_heads, g.head_dim)
        self.kv = self.randn(*shape).to(kv_dtype)
        """The true keys and values of the rows, whichever part of them is in the pool."""
        self.dummy_slot = self.pool.num_pages * g.page_size
        self.page_table = torch.full((rows + 1, pages * g.page_size), self.dummy_slot, dtype=torch.int32, device=device)
        self.lengths = torch.zeros(rows + 1, dtype=torch.int32, device=device)
        self.iota = torch.arange(rows + 2, dtype=torch.int32, device=device)
        self.deal_pages()

    def randn(self, *shape: int) -> torch.Tensor:
        """Random numbers that are the same on every device."""
        return torch.randn(shape, generator=self._random).to(self.fixture.device)

    def deal_pages(self) -> None:
        """Assign other pages to every row, in random order."""
        size = self.geometry.page_size
        per_row = self.page_table.shape[1] // size
        order = torch.randperm(self.pool.num_pages, generator=self._random)[: self.rows * per_row]
        slots = order.view(self.rows, per_row, 1) * size + torch.arange(size)
        self.page_table[: self.rows] = slots.flatten(1).to(self.fixture.device, torch.int32)

    def renew(self) -> None:
        """Replace all sequences; the pool contains the new ones after :meth:`fill`."""
        self.kv = self.randn(*self.kv.shape).to(self.kv.dtype)

    def fill(self, kv_lens: Sequence[int], rows: Sequence[int] | None = None) -> None:
        """Write the first ``kv_lens`` tokens of the rows (None: of the first rows) to the pool, and NaN (see above) to
        everything else.
        """
        self.pool.storage.fill_(torch.nan)
        size = self.geometry.page_size
        flat = self.pool.storage.flatten(2, 3)
        for row, length in zip(_rows(rows, kv_lens), kv_lens, strict=True):
            slots = self.page_table[row].long()
            if self.geometry.finite_tail:
                flat[:, :, slots[: -(-length // size) * size]] = 0
            flat[:, :, slots[:length]] = self.kv[:, :, row, :length]

    def setup(self, max_tokens: int) -> AttentionSetup:
        """The setup that the core would pass to a backend."""
        g = self.geometry
        return AttentionSetup(
            device=self.fixture.device,
            dtype=self.dtype,
            kv_dtype=dtype_named(g.kv_dtype),
            kv_layout="NHD",
            page_size=g.page_size,
            q_heads=g.q_heads,
            kv_heads=g.kv_heads,
            head_dim=g.head_dim,
            layers=g.layers,
            max_batch=self.rows + 1,
            max_tokens=max_tokens,
            max_seq_len=self.longest,
            batches_in_flight=2,
            platform=self.fixture.platform,
        )

    # Batches.

    def eager(self, phase: str, lens: Lens, rows: Sequence[int] | None = None) -> KitBatch:
        """An eager batch: one of the ``rows`` (None: the first ones) for each item of ``lens``, with lengths on the
        host.
        """
        device = self.fixture.device
        q_lens, kv_lens = tuple(n for n, _ in lens), tuple(n for _, n in lens)
        table_idx = torch.tensor(_rows(rows, lens), device=device)
        cu_q = torch.tensor([0, *q_lens]).cumsum(0).to(device, torch.int32)
        kv_lens_device = torch.tensor(kv_lens, dtype=torch.int32, device=device)
        positions = torch.cat([torch.arange(total - new, total) for new, total in lens]).to(device, torch.int32)
        req = torch.repeat_interleave(table_idx, torch.tensor(q_lens, device=device))
        view = BatchView(
            q_lens,
            kv_lens,
            max(q_lens),
            max(kv_lens),
            cu_q,
            kv_lens_device,
            self._page_ids(table_idx, kv_lens_device, max(kv_lens)),
            self.geometry.page_size,
            self.page_table,
            table_idx.to(torch.int32),
        )
        out_loc = self.page_table[req, positions.long()]
        return KitBatch("decode" if phase == "decode" else "prefill", len(lens), len(lens), view, positions, out_loc)

    def captured(self, rows: torch.Tensor) -> KitBatch:
        """A decode batch over the fixed buffers; ``rows`` (B,) is one of them."""
        none = torch.empty(0, dtype=torch.int32, device=self.fixture.device)
        batch = KitBatch("decode", len(rows), len(rows), None, none, none, captured=True)  # type: ignore[arg-type]
        self.derive(batch, rows, None)
        return batch

    def derive(self, batch: KitBatch, rows: torch.Tensor, kv_lens_host: tuple[int, ...] | None) -> None:
        """Derive the inputs and the view of a decode batch from device state only. Part of a captured step."""
        batch.positions = self.lengths[rows]
        kv_lens = batch.positions + 1
        batch.out_loc = self.page_table[rows, batch.positions.long()]
        max_kv = self.longest if kv_lens_host is None else max(kv_lens_host)
        batch.view = BatchView(
            None if kv_lens_host is None else (1,) * batch.padded_size,
            kv_lens_host,
            1,
            max_kv,
            self.iota[: batch.padded_size + 1],
            kv_lens,
            self._page_ids(rows, kv_lens, max_kv),
            self.geometry.page_size,
            self.page_table,
            rows.to(torch.int32),
        )

    def _page_ids(self, rows: torch.Tensor, kv_lens: torch.Tensor, max_kv: int) -> torch.Tensor:
        size = self.geometry.page_size
        pages = -(-max_kv // size)
        ids = self.page_table[:, : pages * size : size][rows] // size
        starts = torch.arange(0, pages * size, size, dtype=torch.int32, device=kv_lens.device)
        return ids.masked_fill_(starts[None, :] >= kv_lens[:, None], self.pool.num_pages)

    # Inputs of a forward call, and the expected output.

    def wide(self, tokens: int) -> torch.Tensor:
        """(T, (H + 2K) * D) of NaN: rows of which q, k and v are views, like the output of the fused operation."""
        g = self.geometry
        shape = (tokens, (g.q_heads + 2 * g.kv_heads) * g.head_dim)
        return torch.full(shape, torch.nan, dtype=self.dtype, device=self.fixture.device)

    def views(self, wide: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q (T, H, D), k (T, K, D), v (T, K, D) of :meth:`wide`."""
        g = self.geometry
        heads = wide.view(wide.shape[0], g.q_heads + 2 * g.kv_heads, g.head_dim)
        q, k, v = heads.split((g.q_heads, g.kv_heads, g.kv_heads), dim=1)
        return q, k, v

    def write_inputs(self, wide: torch.Tensor, lens: Lens, layer: int, rows: Sequence[int] | None = None) -> None:
        """Write random queries and the keys and values of the new tokens; rows of ``wide`` past the live tokens become
        NaN.
        """
        wide.fill_(torch.nan)
        q, k, v = self.views(wide)
        tokens = sum(new for new, _ in lens)
        q[:tokens] = self.randn(tokens, *q.shape[1:]).to(self.dtype)
        for cache, given in ((self.kv[0, layer], k), (self.kv[1, layer], v)):
            own = zip(_rows(rows, lens), lens, strict=True)
            given[:tokens] = torch.cat([cache[row, total - new : total] for row, (new, total) in own]).to(self.dtype)

    def expected(self, q: torch.Tensor, lens: Lens, layer: int, rows: Sequence[int] | None = None) -> torch.Tensor:
        """The reference result: float64 (T, H, D)."""
        parts, start = [], 0
        for row, (new, total) in zip(_rows(rows, lens), lens, strict=True):
            k, v = self.kv[0, layer, row, :total], self.kv[1, layer, row, :total]
            parts.append(reference.attention(q[start : start + new], k, v, self.geometry.layers[layer]))
            start += new
        return torch.cat(parts)


def whose(lens: Lens) -> Callable[[int], str]:
    """Describe a token by its row, and that row's lengths."""
    owners = [row for row, (new, _) in enumerate(lens) for _ in range(new)]

    def describe(token: int) -> str:
        new, total = lens[owners[token]]
        return f"of row {owners[token]}: {new} new of {total} tokens"

    return describe


def _rows(rows: Sequence[int] | None, lens: Sequence[object]) -> Sequence[int]:
    return range(len(lens)) if rows is None else rows
