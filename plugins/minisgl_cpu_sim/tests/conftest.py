"""Sequences in a paged pool whose every other slot is NaN, and the float64 attention that they are checked with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from minisgl_core.plugin_api import AttentionSetup, BatchView, LayerFacts


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)


@dataclass
class Paged:
    """Sequences of ``lens`` tokens with random keys and values, on shuffled pages. The dummy page is the last one."""

    lens: Sequence[int]
    q_heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    dtype: torch.dtype = torch.float32
    kv_dtype: torch.dtype | None = None
    seed: int = 0
    keys: list[torch.Tensor] = field(default_factory=list)
    values: list[torch.Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._random = torch.Generator().manual_seed(self.seed)
        kv_dtype = self.kv_dtype or self.dtype
        counts = [-(-n // self.page_size) for n in self.lens]
        self.num_pages = sum(counts) + 3
        shape = (self.num_pages + 1, self.page_size, self.kv_heads, self.head_dim)
        self._k, self._v = torch.full(shape, torch.nan, dtype=kv_dtype), torch.full(shape, torch.nan, dtype=kv_dtype)
        self._k[-1], self._v[-1] = 0, 0  # the dummy page is written by padding rows
        order = torch.randperm(self.num_pages, generator=self._random)
        self.pages = list(order[: sum(counts)].split(counts))
        for count, pages in zip(self.lens, self.pages, strict=True):
            k, v = (self.randn(count, self.kv_heads, self.head_dim).to(kv_dtype) for _ in range(2))
            slots = (pages[:, None] * self.page_size + torch.arange(self.page_size)).flatten()[:count]
            self._k.flatten(0, 1)[slots], self._v.flatten(0, 1)[slots] = k, v
            self.keys.append(k)
            self.values.append(v)

    def randn(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self._random)

    def k_cache(self, layer: int) -> torch.Tensor:
        return self._k

    def v_cache(self, layer: int) -> torch.Tensor:
        return self._v

    def setup(self, facts: LayerFacts) -> AttentionSetup:
        return AttentionSetup(
            device=torch.device("cpu"),
            dtype=self.dtype,
            kv_dtype=self.kv_dtype or self.dtype,
            kv_layout="NHD",
            page_size=self.page_size,
            q_heads=self.q_heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            layers=(facts,),
            max_batch=len(self.lens),
            max_tokens=sum(self.lens),
            max_seq_len=max(self.lens),
            batches_in_flight=2,
            platform=None,  # type: ignore[arg-type]  # neither backend uses it
        )

    def batch(self, q_lens: Sequence[int], *, captured: bool = False, max_kv: int | None = None) -> Any:
        """The last ``q_lens`` tokens of each sequence; decode if all are 1. ``captured``: padded by a dummy row."""
        q_lens, kv_lens = [*q_lens, *[1] * captured], [*self.lens, *[1] * captured]
        most = max_kv or max(kv_lens)
        ids = torch.full((len(kv_lens), -(-most // self.page_size)), self.num_pages, dtype=torch.int32)
        for row, pages in enumerate(self.pages):
            ids[row, : len(pages)] = pages
        cu_q = torch.tensor([0, *q_lens]).cumsum(0).to(torch.int32)
        q_host, kv_host = (None, None) if captured else (tuple(q_lens), tuple(kv_lens))
        lens = torch.tensor(kv_lens, dtype=torch.int32)
        view = BatchView(q_host, kv_host, max(q_lens), most, cu_q, lens, ids, self.page_size)
        phase = "decode" if max(q_lens) == 1 else "prefill"
        return SimpleNamespace(phase=phase, view=view, scratch={}, captured=captured)

    def expected(self, q: torch.Tensor, q_lens: Sequence[int], facts: LayerFacts) -> torch.Tensor:
        """Attention by its definition, in float64: (T, H, D)."""
        parts = zip(q.split(list(q_lens)), self.keys, self.values, strict=True)
        return torch.cat([_attention(part, k, v, facts) for part, k, v in parts])

    def run(self, backend_class: Any, q: torch.Tensor, batch: Any, facts: LayerFacts) -> torch.Tensor:
        """q as the fused operation leaves it: a view of wider rows."""
        backend = backend_class(self.setup(facts))
        backend.bind_kv(self)
        backend.prepare_metadata(batch)
        backend.update_metadata(batch)
        wide = torch.full((q.shape[0], q.shape[1] + 2, q.shape[2]), torch.nan, dtype=q.dtype)
        wide[:, : q.shape[1]] = q
        none = torch.empty(0)
        out = backend.forward(wide[:, : q.shape[1]], none, none, 0, batch)
        backend.close()
        return out  # type: ignore[no-any-return]


def _attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, facts: LayerFacts) -> torch.Tensor:
    new, heads, _ = q.shape
    total, kv_heads, _ = k.shape
    k, v = (x.double().repeat_interleave(heads // kv_heads, dim=1) for x in (k, v))
    scores = torch.einsum("ihd,jhd->hij", q.double(), k) * facts.scale
    if facts.softcap is not None:
        scores = facts.softcap * torch.tanh(scores / facts.softcap)
    i, j = torch.arange(total - new, total)[:, None], torch.arange(total)[None, :]
    seen = j <= i if facts.window is None else (j <= i) & (j >= i - facts.window + 1)
    return torch.einsum("hij,jhd->ihd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v)


@pytest.fixture(scope="session")
def paged() -> Callable[..., Paged]:
    return Paged
