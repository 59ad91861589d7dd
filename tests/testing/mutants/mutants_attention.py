"""Attention in a page of torch, and ways to get it wrong: each class below :class:`Right` changes one thing."""

from __future__ import annotations

from typing import Any

import torch


class Right:
    """Reads the pool by slots; decode depends on device tensors only, so that it can be captured."""

    def __init__(self, setup: Any, options: object = None) -> None:
        self.setup = setup
        self.pool: Any = None

    def bind_kv(self, pool: Any) -> None:
        self.pool = pool

    def prepare_metadata(self, batch: Any) -> None: ...

    def update_metadata(self, batch: Any) -> None:
        batch.scratch["slots"] = self.slots(batch.view)

    def slots(self, view: Any) -> torch.Tensor:
        """(B, max_kv)"""
        size = view.page_size
        pages = view.page_ids_device.long()
        return (pages[:, :, None] * size + torch.arange(size)).flatten(1)[:, : view.max_kv]

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: int, batch: Any) -> torch.Tensor:
        view, facts = batch.view, self.facts(layer)
        slots = batch.scratch["slots"]
        keys, values = (cache.flatten(0, 1) for cache in self.caches(layer))
        if batch.phase == "decode":
            at = self.lens(batch)[:, None] - 1
            seen = self.seen(at, torch.arange(slots.shape[1]), facts, 1)
            return self.mix(q[:, None], keys[slots], values[slots], seen[:, None], facts)[:, 0].to(q.dtype)
        out, start = torch.empty(q.shape, dtype=q.dtype), 0
        for row, (new, total) in enumerate(zip(view.q_lens_host, view.kv_lens_host, strict=True)):
            own = slots[row : row + 1, :total]
            at = torch.arange(total - new, total)[:, None]
            seen = self.seen(at, torch.arange(total), facts, new)
            part = slice(start, start + new)
            out[part] = self.mix(q[None, part], keys[own], values[own], seen[None], facts)[0].to(q.dtype)
            start += new
        return out

    def mix(
        self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, seen: torch.Tensor, facts: Any
    ) -> torch.Tensor:
        """q (B, M, H, D), keys and values (B, N, K, D), seen (B, M, N) -> (B, M, H, D)"""
        dead = ~seen.any(1)[:, :, None, None]
        keys, values = (self.expand(x.float().masked_fill(dead, 0)) for x in (keys, values))
        scores = self.capped(torch.einsum("bmhd,bnhd->bhmn", q.float(), keys) * self.scale(facts), facts)
        weights = self.softmax(scores.masked_fill(~seen[:, None], -torch.inf))
        return torch.einsum("bhmn,bnhd->bmhd", weights, values)

    # What the mutants change.

    def facts(self, layer: int) -> Any:
        return self.setup.layers[layer]

    def caches(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.pool.k_cache(layer), self.pool.v_cache(layer)

    def lens(self, batch: Any) -> torch.Tensor:
        return batch.view.kv_lens_device

    def seen(self, at: torch.Tensor, key: torch.Tensor, facts: Any, new: int) -> torch.Tensor:
        """Which keys (N,) the queries at positions (M, 1) see; ``new``: how many of the row's tokens are new."""
        seen = key <= at
        return seen if facts.window is None else seen & (key > at - facts.window)

    def scale(self, facts: Any) -> float:
        return facts.scale

    def expand(self, x: torch.Tensor) -> torch.Tensor:
        """(B, N, K, D) -> (B, N, H, D)"""
        return x.repeat_interleave(self.setup.q_heads // self.setup.kv_heads, dim=2)

    def capped(self, scores: torch.Tensor, facts: Any) -> torch.Tensor:
        return scores if facts.softcap is None else torch.tanh(scores / facts.softcap) * facts.softcap

    def softmax(self, scores: torch.Tensor) -> torch.Tensor:
        return scores.softmax(-1)

    def init_capture_graph(self, max_seq_len: int, bs_list: tuple[int, ...]) -> None: ...

    def prepare_for_capture(self, batch: Any) -> None: ...

    def prepare_for_replay(self, batch: Any) -> None: ...

    def close(self) -> None:
        self.pool = None


class MaskMissesTheQueryItself(Right):
    def seen(self, at, key, facts, new):
        return super().seen(at, key, facts, new) & ((key < at) | (key == 0))


class IgnoresTheWindow(Right):
    def seen(self, at, key, facts, new):
        return key <= at


class WindowOffByOne(Right):
    def seen(self, at, key, facts, new):
        seen = key <= at
        return seen if facts.window is None else seen & (key >= at - facts.window)


class ScalesByHeadDim(Right):
    def scale(self, facts):
        return 1.0 / self.setup.head_dim


class WritesPaddingIntoALivePage(Right):
    def forward(self, q, k, v, layer, batch):
        out = super().forward(q, k, v, layer, batch)
        self.pool.k_cache(layer)[batch.view.page_ids_device[:1, 0].long()] = 0.0
        return out


class LengthsOfTheCaptureAtReplay(Right):
    def prepare_for_capture(self, batch):
        self.stale = batch.view.kv_lens_device.clone()

    def lens(self, batch):
        return self.stale if batch.captured else super().lens(batch)


class HeadsInterleaved(Right):
    def expand(self, x):
        return x.repeat(1, 1, self.setup.q_heads // self.setup.kv_heads, 1)


class ReadsPastTheEnd(Right):
    def seen(self, at, key, facts, new):
        return super().seen(at + (new == 1), key, facts, new)


class PageZeroForTheLastPartialPage(Right):
    def slots(self, view):
        size, slots = view.page_size, super().slots(view)
        whole = (view.kv_lens_device // size * size)[:, None]
        place = torch.arange(slots.shape[1])
        return torch.where(place < whole, slots, place % size)


class IgnoresThePrefix(Right):
    def seen(self, at, key, facts, new):
        seen = super().seen(at, key, facts, new)
        return seen if new == 1 else seen & (key > at.max() - new)


class PrefillSeesTheFuture(Right):
    def seen(self, at, key, facts, new):
        return super().seen(at.max().expand_as(at) if new > 1 else at, key, facts, new)


class IgnoresTheSoftcap(Right):
    def capped(self, scores, facts):
        return scores


class ScalesQInPlace(Right):
    def forward(self, q, k, v, layer, batch):
        q.mul_(self.setup.layers[layer].scale)
        return super().forward(q, k, v, layer, batch)

    def scale(self, facts):
        return 1.0


class AnswersIntoQ(Right):
    def forward(self, q, k, v, layer, batch):
        return q.copy_(super().forward(q, k, v, layer, batch))


class OneBufferForAllResults(Right):
    buffer = None

    def forward(self, q, k, v, layer, batch):
        out = super().forward(q, k, v, layer, batch)
        if self.buffer is None or self.buffer.shape != out.shape:
            self.buffer = torch.empty_like(out)
        return self.buffer.copy_(out)


class ReadsALengthOnTheHost(Right):
    def update_metadata(self, batch):
        super().update_metadata(batch)
        batch.scratch["slots"] = batch.scratch["slots"][:, : int(batch.view.kv_lens_device.max())]


class KeepsEveryStepsMetadata(Right):
    def update_metadata(self, batch):
        super().update_metadata(batch)
        self.kept = [*getattr(self, "kept", []), batch.scratch["slots"]]


class AllocatesAtReplay(Right):
    """Declares a host plan."""

    def prepare_for_replay(self, batch):
        self.kept = [*getattr(self, "kept", []), torch.zeros(1000)]


class IgnoresTheHostPlanOfAReplay(Right):
    """Declares a host plan, makes it at capture, and never again."""

    def prepare_for_capture(self, batch):
        self.plan = batch.view.kv_lens_device.clone()

    def lens(self, batch):
        return self.plan if batch.captured else super().lens(batch)


class TakesQToBeContiguous(Right):
    def forward(self, q, k, v, layer, batch):
        dense = (q.shape[1] * q.shape[2], q.shape[2], 1)
        return super().forward(q.as_strided(q.shape, dense), k, v, layer, batch)


class FactsOfLayerZero(Right):
    def facts(self, layer):
        return self.setup.layers[0]


class CacheOfLayerZero(Right):
    def caches(self, layer):
        return super().caches(0)


class SoftmaxOverflows(Right):
    def softmax(self, scores):
        weights = scores.exp()
        return weights / weights.sum(-1, keepdim=True)


class ComputesInHalfPrecision(Right):
    def softmax(self, scores):
        return super().softmax(scores.to(torch.bfloat16).float())


class TakesPagesToBeAdjacent(Right):
    def slots(self, view):
        slots = super().slots(view)
        return (slots[:, :1] + torch.arange(slots.shape[1])).clamp(max=self.pool.num_pages * view.page_size)


class PagesOfRowZero(Right):
    def slots(self, view):
        slots = super().slots(view)
        return slots[:1].expand_as(slots)


class MultipliesTheTailByZero(Right):
    """Does not declare ``finite_tail``."""

    def mix(self, q, keys, values, seen, facts):
        scores = torch.einsum("bmhd,bnhd->bhmn", q.float(), self.expand(keys.float())) * facts.scale
        weights = self.capped(scores, facts).masked_fill(~seen[:, None], -torch.inf).softmax(-1)
        return torch.einsum("bhmn,bnhd->bmhd", weights, self.expand(values.float()))


class EditsTheView(Right):
    def forward(self, q, k, v, layer, batch):
        out = super().forward(q, k, v, layer, batch)
        batch.view.kv_lens_device.add_(1)
        return out


class CannotDoHeadDim80(Right):
    """Declares every head_dim."""

    def __init__(self, setup: Any, options: object = None) -> None:
        if setup.head_dim == 80:
            raise ValueError("unsupported head_dim 80")
        super().__init__(setup, options)


class LeavesOutTheLastTileOfLongPrompts(Right):
    """Tiles of 64 queries, beyond 512 of them."""

    def forward(self, q, k, v, layer, batch):
        out, start = super().forward(q, k, v, layer, batch), 0
        for new in batch.view.q_lens_host or ():
            if new > 512:
                out[start + new // 64 * 64 : start + new] = 0
            start += new
        return out
