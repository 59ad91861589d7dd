"""Cases of the role ``kv``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, Self
from unittest import SkipTest

import numpy as np
import torch

from minisgl_core.plugin_api import Caps, KVSetup
from minisgl_core.registry.query import Need

from .attention_cases import ANY_HEAD_DIMS, ANY_PAGES, DTYPES, HEAD_DIMS, PAGE_SIZES
from .case import Finding, collect
from .compare import expect, same
from .rig import dtype_named
from .subject import names_of
from .trial import Draw, Tensors, Trial, TrialCase
from .values import inside, outside, usual

if TYPE_CHECKING:
    from .rig import Rig
    from .subject import Subject

__all__ = ["KVCase", "kv_cases"]

POOL_ELEMENTS = 70_000
"""Of one cache, at least: more than 16 bits can count."""
LARGE_BYTES = 20 * 2**30


@dataclass(frozen=True, kw_only=True, repr=False)
class KVCase(TrialCase):
    """``store``: rows of k and v (views of wider rows) into a pool; ``index``: rows of a part of a vocabulary table;
    ``match_len``: common prefixes on the host; ``large``: a store beyond 2**31 elements.
    """

    check: Literal["store", "index", "match_len", "large"] = "store"
    kv_dtype: str = ""
    """Empty = dtype"""
    page_size: int = 16
    kv_heads: int = 2
    head_dim: int = 64
    tokens: int = 17
    start: int = 0
    """``index``: the first row of this rank's part"""

    def siblings(self) -> tuple[Self, ...]:
        return (*super().siblings(), replace(self, kv_heads=self.kv_heads + 1))

    def need(self, rig: Rig) -> Need:
        return Need(
            device=rig.facts,
            dtype=self.dtype,
            kv_dtype=self.kv_dtype or self.dtype,
            head_dim=self.head_dim,
            page_size=self.page_size,
            kv_layout="NHD",
            capture=self.how == "replay",
        )

    def build(self, subject: Subject, rig: Rig, box: Caps | None) -> Any:
        kv_dtype = dtype_named(self.kv_dtype or self.dtype)
        setup = KVSetup(
            rig.device, dtype_named(self.dtype), kv_dtype, self.page_size, self.kv_heads, self.head_dim, rig.platform
        )
        return subject.build(setup, box)

    def trial(self, backend: Any, rig: Rig) -> Trial:
        return _Store(self, backend, rig) if self.check == "store" else _Index(self, backend)

    def run(self, subject: Subject, rig: Rig) -> Finding:
        if self.check in ("store", "index"):
            return super().run(subject, rig)
        if self.check == "large" and (rig.device.type == "cpu" or rig.platform.free_bytes() < LARGE_BYTES):
            raise SkipTest(f"needs a GPU with {LARGE_BYTES >> 30} GiB free")
        backend = self.build(subject, rig, None)
        if self.check == "match_len":
            _check_match_len(backend)
        else:
            _check_large(self, backend, rig)
        backend.close()
        return Finding()


class _Store(Trial):
    """Into the middle layer of a pool of three; the last tokens are padding that shares a slot of the dummy page."""

    is_new = False

    def __init__(self, case: KVCase, backend: Any, rig: Rig) -> None:
        self._c, self._backend = case, backend
        slots = max(POOL_ELEMENTS // (case.kv_heads * case.head_dim), 2 * case.tokens)
        self.pages = slots // case.page_size + 2
        shape = (2, 3, self.pages + 1, case.page_size, case.kv_heads, case.head_dim)
        kv_dtype = dtype_named(case.kv_dtype or case.dtype)
        self._before = Draw(rig, case.seed + 1).normal(*shape).to(kv_dtype)
        self._pool = self._before.clone()

    def draw(self, draw: Draw) -> Tensors:
        c = self._c
        self._pool.copy_(self._before)
        slots = self.pages * c.page_size
        # The far end is always among them.
        out_loc = torch.cat((torch.full((1,), slots - 1, device=draw.device), draw.order(slots - 1)))[: c.tokens]
        out_loc[self.live :] = slots
        wide = draw.normal(c.tokens, 4 * c.kv_heads * c.head_dim, dtype=dtype_named(c.dtype))
        return {"qkv": wide, "out_loc": out_loc.to(torch.int32)}

    @property
    def live(self) -> int:
        """Tokens that are no padding."""
        return self._c.tokens - (2 if self._c.tokens > 4 else 0)

    def _rows(self, wide: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        c = self._c
        heads = wide.view(c.tokens, 4, c.kv_heads, c.head_dim)
        return heads[:, 2], heads[:, 3]

    def call(self, inputs: Tensors) -> tuple[torch.Tensor, ...]:
        k, v = self._rows(inputs["qkv"])
        self._backend.store(self._pool[0, 1], self._pool[1, 1], k, v, inputs["out_loc"])
        return (self._pool,)

    def judge(self, inputs: Tensors, outputs: Sequence[torch.Tensor]) -> float:
        want = self._before.clone()
        slots = inputs["out_loc"][: self.live].long()
        for cache, rows in zip(want[:, 1], self._rows(inputs["qkv"]), strict=True):
            cache.flatten(0, 1)[slots] = rows[: self.live].to(cache.dtype)
        # What the dummy page holds is nobody's concern, in the layer that was written.
        live = outputs[0].clone()
        live[:, 1, -1] = want[:, 1, -1]
        same(live.flatten(2, 3), want.flatten(2, 3), "the pool (k and v, layer, slot, head, dim)")
        return 0.0


class _Index(Trial):
    """A table part whose neighbours are NaN and whose own ends hold infinities: multiplying by zero would show."""

    ROWS = 50

    def __init__(self, case: KVCase, backend: Any) -> None:
        self._c, self._backend = case, backend

    def draw(self, draw: Draw) -> Tensors:
        table = draw.normal(self.ROWS + 3, self._c.head_dim, dtype=dtype_named(self._c.dtype))
        table[self.ROWS :] = torch.nan
        table[0, ::2], table[self.ROWS - 1, ::2] = torch.inf, -torch.inf
        start = self._c.start
        ids = draw.integers(max(0, start - 20), start + self.ROWS + 20, self._c.tokens)
        edges = [max(0, start - 1), start, start + self.ROWS - 1, start + self.ROWS, start + self.ROWS + 1]
        ids[: len(edges)] = torch.tensor(edges, dtype=torch.int32, device=ids.device)[: len(ids)]
        return {"table": table, "ids": ids}

    def call(self, inputs: Tensors) -> tuple[torch.Tensor, ...]:
        return (self._backend.index(inputs["table"], inputs["ids"], self._c.start, self.ROWS),)

    def judge(self, inputs: Tensors, outputs: Sequence[torch.Tensor]) -> float:
        table, start = inputs["table"], self._c.start
        want = torch.zeros(len(inputs["ids"]), table.shape[1], dtype=table.dtype, device=table.device)
        for row, token in enumerate(inputs["ids"].tolist()):
            if start <= token < start + self.ROWS:
                want[row] = table[token - start]
        same(outputs[0], want, f"index of ids {inputs['ids'].tolist()[:6]}.. from {start}")
        return 0.0


def _check_match_len(backend: Any) -> None:
    a = np.arange(300, dtype=np.int32)
    for length, other, want in ((300, 300, 300), (0, 300, 0), (300, 17, 17), (1, 1, 1), (299, 300, 299)):
        got = backend.match_len(a[:length].copy(), a[:other].copy())
        expect(got == want, f"match_len of equal arrays of {length} and {other} is {got}, expected {want}")
    for place in (0, 1, 7, 8, 15, 16, 31, 32, 255, 299):
        b = a.copy()
        b[place] = -1
        got = backend.match_len(a, b)
        expect(got == place, f"match_len of arrays that differ first at {place} is {got}")


def _check_large(case: KVCase, backend: Any, rig: Rig) -> None:
    """Slots beyond 2**31 elements: an offset kept in 32 bits would land elsewhere."""
    dtype, draw = dtype_named(case.kv_dtype or case.dtype), Draw(rig, case.seed)
    row = case.kv_heads * case.head_dim
    pages = (2**31 + 2**24) // (row * case.page_size) + 1
    shape = (pages + 1, case.page_size, case.kv_heads, case.head_dim)
    caches = [torch.zeros(shape, dtype=dtype, device=rig.device) for _ in range(2)]
    slots = torch.tensor([0, 1, 2**30 // row, 2**31 // row, 2**31 // row + 5, pages * case.page_size - 1])
    k, v = (draw.normal(len(slots), case.kv_heads, case.head_dim, dtype=dtype_named(case.dtype)) for _ in range(2))
    backend.store(*caches, k, v, slots.to(rig.device, torch.int32))
    for cache, rows in zip(caches, (k, v), strict=True):
        same(cache.flatten(0, 1)[slots.to(rig.device)], rows.to(dtype), "rows at slots beyond 2**31 elements")
        written = sum(int(part.count_nonzero()) for part in cache.split(max(1, pages // 16)))
        expect(written == int(rows.to(dtype).count_nonzero()), f"{written} elements of a large pool were written")


def kv_cases(subject: Subject, rig: Rig, quick: bool) -> list[KVCase]:
    """Every claim at its ends, and what lies just beyond."""
    return collect(subject, rig, lambda box: _of_box(box, quick), lambda box: _beyond(box, quick))


def _base(box: Caps, dtype: str) -> KVCase:
    kv_dtypes = names_of(box.kv_dtypes, DTYPES)
    return KVCase(
        name=dtype,
        dtype=dtype,
        kv_dtype="" if dtype in kv_dtypes or not kv_dtypes else kv_dtypes[0],
        page_size=usual(box.page_sizes, 16, PAGE_SIZES) or 16,
        head_dim=usual(box.head_dims, 64, HEAD_DIMS) or 64,
    )


def _of_box(box: Caps, quick: bool) -> Iterator[KVCase]:
    dtypes = names_of(box.dtypes, DTYPES)
    for dtype in dtypes:
        base = _base(box, dtype)

        def case(what: str, base: KVCase = base, **changes: Any) -> KVCase:
            return replace(base, name=f"{base.dtype}/{what}", **changes)

        yield case("store")
        yield case("index", check="index", tokens=23, start=100)
        yield case("index,first", check="index", tokens=23)
        if quick and dtype != dtypes[0]:
            continue
        for tokens in (1, 2, 130, 1025):
            yield case(f"store,tokens={tokens}", tokens=tokens)
            yield case(f"index,tokens={tokens}", check="index", tokens=tokens, start=7)
        for dim in inside(box.head_dims, ANY_HEAD_DIMS[quick], quick):
            yield case(f"store,head_dim={dim}", head_dim=dim, kv_heads=3)
        for page in inside(box.page_sizes, ANY_PAGES[quick], quick):
            yield case(f"store,page_size={page}", page_size=page)
        for kv_dtype in names_of(box.kv_dtypes, DTYPES):
            yield case(f"store,kv_dtype={kv_dtype}", kv_dtype=kv_dtype)
        yield case("index,width=577", check="index", head_dim=usual(box.head_dims, 577, (577,)) or 64, start=3)
        yield case("store,rewritten", how="rewritten")
        yield case("index,rewritten", how="rewritten", check="index", tokens=23, start=100)
        yield case("store,in_turn", how="in_turn")
        yield case("growth", how="growth")
        yield case("match_len", check="match_len")
        yield case("large", check="large", kv_heads=8)
        if box.graph != "never":
            yield case("store,replay", how="replay")
            yield case("index,replay", how="replay", check="index", start=100)


def _beyond(box: Caps, quick: bool) -> Iterator[KVCase]:
    dtypes = names_of(box.dtypes, DTYPES)
    base = replace(_base(box, (dtypes or DTYPES)[0]), outside=True)
    for dim in outside(box.head_dims, HEAD_DIMS, quick):
        yield replace(base, name=f"outside/head_dim={dim}", head_dim=dim)
    for page in outside(box.page_sizes, PAGE_SIZES, quick):
        yield replace(base, name=f"outside/page_size={page}", page_size=page)
    for dtype in DTYPES:
        if dtype not in dtypes:
            yield replace(base, name=f"outside/dtype={dtype}", dtype=dtype, kv_dtype=dtype)
    if box.graph == "never":
        yield replace(base, name="outside/replay", how="replay")
