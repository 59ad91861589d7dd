"""Checks of the role ``kv``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, Self
from unittest import SkipTest

import numpy as np
import torch

from minisgl_core.plugin_api import Caps, KVSetup
from minisgl_core.registry.query import Requirement

from .attention_checks import ANY_HEAD_DIMS, ANY_PAGES, DTYPES, HEAD_DIMS, MANY_SLOTS, PAGE_SIZES
from .backend_under_test import names_of
from .check import Result
from .check_run import CallCheck, CheckRun, Draw, Tensors
from .collect import collect
from .compare import expect, same
from .device_fixture import dtype_named
from .endurance import STEPS
from .values import inside, outside, usual

if TYPE_CHECKING:
    from .backend_under_test import BackendUnderTest
    from .check import Check
    from .device_fixture import DeviceFixture

__all__ = ["KVCheck", "kv_checks"]

POOL_ELEMENTS = 70_000
"""Least number of elements of one cache: more than 16 bits can count."""
LARGE_BYTES = 20 * 2**30


@dataclass(frozen=True, kw_only=True, repr=False)
class KVCheck(CallCheck):
    """``store``: rows of k and v (views of wider rows) into a pool; ``index``: rows of a part of a vocabulary table;
    ``match_len``: common prefixes on the host; ``large``: a store beyond 2**31 elements.
    """

    scenario: Literal["store", "index", "match_len", "large"] = "store"
    kv_dtype: str = ""
    """Empty means ``dtype``."""
    page_size: int = 16
    kv_heads: int = 2
    head_dim: int = 64
    tokens: int = 17
    slots: int = 0
    """``store``: the least number of slots of the pool, which then has one layer instead of three."""
    start: int = 0
    """``index``: the first row of this rank's part."""

    def siblings(self) -> tuple[Self, ...]:
        return (*super().siblings(), replace(self, kv_heads=self.kv_heads + 1))

    def requirement(self, fixture: DeviceFixture) -> Requirement:
        return Requirement(
            device=fixture.facts,
            dtype=self.dtype,
            kv_dtype=self.kv_dtype or self.dtype,
            head_dim=self.head_dim,
            page_size=self.page_size,
            kv_layout="NHD",
            capture=self.how == "replay",
        )

    def build(self, under_test: BackendUnderTest, fixture: DeviceFixture, caps: Caps | None) -> Any:
        kv_dtype = dtype_named(self.kv_dtype or self.dtype)
        setup = KVSetup(
            fixture.device,
            dtype_named(self.dtype),
            kv_dtype,
            self.page_size,
            self.kv_heads,
            self.head_dim,
            fixture.platform,
        )
        return under_test.build(setup, caps)

    def check_run(self, backend: Any, fixture: DeviceFixture) -> CheckRun:
        return _Store(self, backend, fixture) if self.scenario == "store" else _Index(self, backend)

    def run(self, under_test: BackendUnderTest, fixture: DeviceFixture) -> Result:
        if self.scenario in ("store", "index"):
            return super().run(under_test, fixture)
        if self.scenario == "large" and (fixture.device.type == "cpu" or fixture.platform.free_bytes() < LARGE_BYTES):
            raise SkipTest(f"needs a GPU with {LARGE_BYTES >> 30} GiB free")
        backend = self.build(under_test, fixture, None)
        if self.scenario == "match_len":
            _check_match_len(backend)
        else:
            _check_large(self, backend, fixture)
        backend.close()
        return Result()


class _Store(CheckRun):
    """Store into the middle of three layers; the last tokens are padding that shares a slot of the dummy page."""

    is_new = False
    is_repeatable = False

    def __init__(self, check: KVCheck, backend: Any, fixture: DeviceFixture) -> None:
        self._c, self._backend = check, backend
        slots = max(POOL_ELEMENTS // (check.kv_heads * check.head_dim), 2 * check.tokens, check.slots)
        self._layer, layers = (0, 1) if check.slots else (1, 3)
        self.pages = slots // check.page_size + 2
        shape = (2, layers, self.pages + 1, check.page_size, check.kv_heads, check.head_dim)
        kv_dtype = dtype_named(check.kv_dtype or check.dtype)
        self._before = Draw(fixture, check.seed + 1).normal(*shape).to(kv_dtype)
        self._pool = self._before.clone()

    def resize(self, rows: int) -> None:
        self._c = replace(self._c, tokens=rows)

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
        """Number of tokens that are not padding."""
        return self._c.tokens - (2 if self._c.tokens > 4 else 0)

    def _rows(self, wide: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        c = self._c
        heads = wide.view(c.tokens, 4, c.kv_heads, c.head_dim)
        return heads[:, 2], heads[:, 3]

    def call(self, inputs: Tensors) -> tuple[torch.Tensor, ...]:
        k, v = self._rows(inputs["qkv"])
        self._backend.store(self._pool[0, self._layer], self._pool[1, self._layer], k, v, inputs["out_loc"])
        return (self._pool,)

    def judge(self, inputs: Tensors, outputs: Sequence[torch.Tensor]) -> float:
        want = self._before.clone()
        slots = inputs["out_loc"][: self.live].long()
        for cache, rows in zip(want[:, self._layer], self._rows(inputs["qkv"]), strict=True):
            cache.flatten(0, 1)[slots] = rows[: self.live].to(cache.dtype)
        # Nothing reads the dummy page: in the layer that was written it may hold anything.
        live = outputs[0].clone()
        live[:, self._layer, -1] = want[:, self._layer, -1]
        same(live.flatten(2, 3), want.flatten(2, 3), "the pool (k and v, layer, slot, head, dim)")
        return 0.0


class _Index(CheckRun):
    """A part of a table with NaN around it and infinities at its own ends, so that multiplication by
    zero is detected.
    """

    ROWS = 50

    def __init__(self, check: KVCheck, backend: Any) -> None:
        self._c, self._backend = check, backend

    def resize(self, rows: int) -> None:
        self._c = replace(self._c, tokens=rows)

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


def _check_large(check: KVCheck, backend: Any, fixture: DeviceFixture) -> None:
    """Slots beyond 2**31 elements, which a 32-bit offset would miss."""
    dtype, draw = dtype_named(check.kv_dtype or check.dtype), Draw(fixture, check.seed)
    row = check.kv_heads * check.head_dim
    pages = (2**31 + 2**24) // (row * check.page_size) + 1
    shape = (pages + 1, check.page_size, check.kv_heads, check.head_dim)
    caches = [torch.zeros(shape, dtype=dtype, device=fixture.device) for _ in range(2)]
    slots = torch.tensor([0, 1, 2**30 // row, 2**31 // row, 2**31 // row + 5, pages * check.page_size - 1])
    k, v = (draw.normal(len(slots), check.kv_heads, check.head_dim, dtype=dtype_named(check.dtype)) for _ in range(2))
    backend.store(*caches, k, v, slots.to(fixture.device, torch.int32))
    for cache, rows in zip(caches, (k, v), strict=True):
        same(cache.flatten(0, 1)[slots.to(fixture.device)], rows.to(dtype), "rows at slots beyond 2**31 elements")
        written = sum(int(part.count_nonzero()) for part in cache.split(max(1, pages // 16)))
        expect(written == int(rows.to(dtype).count_nonzero()), f"{written} elements of a large pool were written")


def kv_checks(under_test: BackendUnderTest, fixture: DeviceFixture, quick: bool) -> list[Check]:
    """Every claim at its limits, and values just outside."""
    return collect(under_test, fixture, lambda caps: _of_caps(caps, quick), lambda caps: _beyond(caps, quick))


def _base(caps: Caps, dtype: str) -> KVCheck:
    kv_dtypes = names_of(caps.kv_dtypes, DTYPES)
    return KVCheck(
        name=dtype,
        dtype=dtype,
        kv_dtype="" if dtype in kv_dtypes or not kv_dtypes else kv_dtypes[0],
        page_size=usual(caps.page_sizes, 16, PAGE_SIZES) or 16,
        head_dim=usual(caps.head_dims, 64, HEAD_DIMS) or 64,
    )


def _of_caps(caps: Caps, quick: bool) -> Iterator[KVCheck]:
    dtypes = names_of(caps.dtypes, DTYPES)
    for dtype in dtypes:
        base = _base(caps, dtype)

        def check(what: str, base: KVCheck = base, **changes: Any) -> KVCheck:
            return replace(base, name=f"{base.dtype}/{what}", **changes)

        yield check("store")
        yield check("index", scenario="index", tokens=23, start=100)
        yield check("index,first", scenario="index", tokens=23)
        if quick and dtype != dtypes[0]:
            continue
        for heads in (1, 17):
            yield check(f"store,kv_heads={heads}", kv_heads=heads)
        yield check(f"store,slots={MANY_SLOTS}", slots=MANY_SLOTS, kv_heads=1)
        for tokens in (1, 2, 130, 1100, 4200):
            yield check(f"store,tokens={tokens}", tokens=tokens)
            yield check(f"index,tokens={tokens}", scenario="index", tokens=tokens, start=7)
        for dim in inside(caps.head_dims, ANY_HEAD_DIMS[quick], quick):
            yield check(f"store,head_dim={dim}", head_dim=dim, kv_heads=3)
        for page in inside(caps.page_sizes, ANY_PAGES[quick], quick):
            yield check(f"store,page_size={page}", page_size=page)
        for kv_dtype in names_of(caps.kv_dtypes, DTYPES):
            yield check(f"store,kv_dtype={kv_dtype}", kv_dtype=kv_dtype)
        yield check("index,width=577", scenario="index", head_dim=usual(caps.head_dims, 577, (577,)) or 64, start=3)
        yield check("store,rewritten", how="rewritten")
        yield check("index,rewritten", how="rewritten", scenario="index", tokens=23, start=100)
        yield check("store,in_turn", how="in_turn")
        yield check("growth", how="growth")
        yield check("endurance", how="endurance", tokens=STEPS)
        yield check("index,endurance", scenario="index", how="endurance", tokens=STEPS, start=7)
        yield check("match_len", scenario="match_len")
        yield check("large", scenario="large", kv_heads=8)
        if caps.graph != "never":
            yield check("store,replay", how="replay")
            yield check("index,replay", how="replay", scenario="index", start=100)


def _beyond(caps: Caps, quick: bool) -> Iterator[KVCheck]:
    dtypes = names_of(caps.dtypes, DTYPES)
    base = replace(_base(caps, (dtypes or DTYPES)[0]), outside=True)
    for dim in outside(caps.head_dims, HEAD_DIMS, quick):
        yield replace(base, name=f"outside/head_dim={dim}", head_dim=dim)
    for page in outside(caps.page_sizes, PAGE_SIZES, quick):
        yield replace(base, name=f"outside/page_size={page}", page_size=page)
    for dtype in DTYPES:
        if dtype not in dtypes:
            yield replace(base, name=f"outside/dtype={dtype}", dtype=dtype, kv_dtype=dtype)
    if caps.graph == "never":
        yield replace(base, name="outside/replay", how="replay")
