"""The checks of the layer operations of a spec."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from minisgl_core.plugin_api import OP_NAMES, Caps, SamplingMode

from .attention_checks import ANY_HEAD_DIMS, ANY_PAGES, DTYPES, HEAD_DIMS, MANY_SLOTS, PAGE_SIZES
from .backend_under_test import names_of
from .collect import collect
from .endurance import STEPS
from .ops import OpsCheck
from .ops_sample import SampleCheck
from .real_sizes import LARGEST_HIDDEN, LARGEST_INTERMEDIATE
from .values import inside, outside, usual

if TYPE_CHECKING:
    from .backend_under_test import BackendUnderTest
    from .check import Check
    from .device_fixture import DeviceFixture

__all__ = ["ops_checks"]

MODES: tuple[SamplingMode, ...] = ("greedy", "random", "filtered")


def ops_checks(under_test: BackendUnderTest, fixture: DeviceFixture, quick: bool) -> list[Check]:
    """The checks of every operation that a capability set offers, and values just outside."""
    offered = {op for caps in under_test.capability_sets(fixture.facts) for op in caps.ops}
    return collect(under_test, fixture, lambda caps: _of_caps(caps, quick), lambda caps: _beyond(caps, offered, quick))


def _of_caps(caps: Caps, quick: bool) -> Iterator[OpsCheck]:
    for op in OP_NAMES:
        if op in caps.ops:
            yield from _of_op(caps, op, quick)


def _first_dtype(caps: Caps) -> str:
    return (names_of(caps.dtypes, DTYPES) or DTYPES)[0]


def _of_op(caps: Caps, op: str, quick: bool) -> Iterator[OpsCheck]:
    dtypes = names_of(caps.dtypes, DTYPES)
    for place, dtype in enumerate(dtypes):
        thorough = place == 0 or not quick
        if op == "sample":
            yield from _sample(caps, dtype, thorough, quick)
            continue
        base = OpsCheck(name=f"{op}/{dtype}", op=op, dtype=dtype)
        if op == "qk_norm_rope_store":
            base = _stored(caps, base)
        yield _named(base, "usual")
        if thorough:
            vary = {"qk_norm_rope_store": _rope, "route": _route}.get(op, _rows)
            yield from vary(caps, base, quick)
            yield _named(base, "rewritten", how="rewritten")
            yield _named(base, "in_turn", how="in_turn")
            yield _named(base, "growth", how="growth")
            yield _named(base, "endurance", how="endurance", tokens=STEPS, width=64)
            if caps.graph != "never":
                yield _named(base, "replay", how="replay")


def _named(base: OpsCheck, what: str, **changes: Any) -> OpsCheck:
    return replace(base, name=f"{base.name}/{what}", **changes)


def _rows(caps: Caps, base: OpsCheck, quick: bool) -> Iterator[OpsCheck]:
    """For norms and the activation: row counts, widths, and for norms values at which eps and overflow matter."""
    for tokens in (1, 2, 130) if quick else (1, 2, 16, 130, 1025):
        yield _named(base, f"tokens={tokens}", tokens=tokens)
    largest = LARGEST_INTERMEDIATE if base.op == "act_and_mul" else LARGEST_HIDDEN
    for width in (8, 64, 1024, largest) if quick else (8, 64, 96, 896, 1024, 4096, 11008, largest):
        yield _named(base, f"width={width}", width=width)
    if base.op != "act_and_mul":
        yield _named(base, "tiny_values", x_scale=1e-3)
        yield _named(base, "large_values", x_scale=1000.0)
        yield _named(base, "large_eps", eps=0.5)


def _stored(caps: Caps, base: OpsCheck) -> OpsCheck:
    kv_dtypes = names_of(caps.kv_dtypes, DTYPES)
    dim = usual(caps.head_dims, 64, HEAD_DIMS) or 64
    return replace(
        base,
        kv_dtype="" if base.dtype in kv_dtypes or not kv_dtypes else kv_dtypes[0],
        head_dim=dim,
        rotary_dim=dim,
        page_size=usual(caps.page_sizes, 16, PAGE_SIZES) or 16,
    )


def _rope(caps: Caps, base: OpsCheck, quick: bool) -> Iterator[OpsCheck]:
    dim = base.head_dim
    yield _named(base, "no_norm", norms=False)
    yield _named(base, "half_rotary", rotary_dim=dim // 2)
    yield _named(base, "half_rotary,no_norm", rotary_dim=dim // 2, norms=False)
    yield _named(base, "large_eps", eps=0.5)
    for tokens in (1, 2, 130, 1100):
        yield _named(base, f"tokens={tokens}", tokens=tokens)
    yield _named(base, f"slots={MANY_SLOTS}", slots=MANY_SLOTS, q_heads=1, kv_heads=1)
    for q_heads, kv_heads in ((7, 1), (9, 3), (16, 8), (40, 8), (32, 32)):
        yield _named(base, f"heads={q_heads}/{kv_heads}", q_heads=q_heads, kv_heads=kv_heads)
    for other in inside(caps.head_dims, ANY_HEAD_DIMS[quick], quick):
        yield _named(base, f"head_dim={other}", head_dim=other, rotary_dim=other)
    for page in inside(caps.page_sizes, ANY_PAGES[quick], quick):
        yield _named(base, f"page_size={page}", page_size=page)
    for kv_dtype in names_of(caps.kv_dtypes, DTYPES):
        yield _named(base, f"kv_dtype={kv_dtype}", kv_dtype=kv_dtype)


def _route(caps: Caps, base: OpsCheck, quick: bool) -> Iterator[OpsCheck]:
    for experts, top_k in ((8, 1), (8, 2), (60, 4), (128, 8), (4, 4)):
        for renormalize in (False, True):
            what = f"experts={experts},top_k={top_k}" + (",renormalize" if renormalize else "")
            yield _named(base, what, width=experts, top_k=top_k, renormalize=renormalize)
    yield _named(base, "tokens=130", width=60, tokens=130)


def _sample(caps: Caps, dtype: str, thorough: bool, quick: bool) -> Iterator[SampleCheck]:
    for mode in MODES:
        base = SampleCheck(
            name=f"sample/{dtype}/{mode}", dtype=dtype, mode=mode, per_row_seed=caps.per_row_seed, tokens=40, width=513
        )
        yield base
        if not thorough:
            continue
        for vocab in (7, 4099) if quick else (7, 4099, 151_936):
            yield replace(base, name=f"{base.name}/vocab={vocab}", width=vocab)
        yield replace(base, name=f"{base.name}/flat", x_scale=0.1)
        yield replace(base, name=f"{base.name}/rewritten", how="rewritten")
        yield replace(base, name=f"{base.name}/in_turn", how="in_turn")
        yield replace(base, name=f"{base.name}/endurance", how="endurance", tokens=5, width=65)
        if mode != "greedy":
            yield replace(base, name=f"{base.name}/frequencies", scenario="frequencies", tokens=4000, width=4)
        if caps.graph != "never":
            yield replace(base, name=f"{base.name}/replay", how="replay")


def _beyond(caps: Caps, offered: set[str], quick: bool) -> Iterator[OpsCheck]:
    for op in OP_NAMES:
        if op not in offered:
            yield OpsCheck(name=f"outside/{op}", outside=True, op=op, dtype=_first_dtype(caps))
    dtypes = names_of(caps.dtypes, DTYPES)
    op = next((name for name in OP_NAMES if name in caps.ops), OP_NAMES[0])
    make = SampleCheck if op == "sample" else OpsCheck
    base = make(name=f"outside/{op}", op=op, outside=True, dtype=_first_dtype(caps))
    for dtype in DTYPES:
        if dtype not in dtypes:
            yield _named(base, f"dtype={dtype}", dtype=dtype)
    if caps.graph == "never":
        yield _named(base, "replay", how="replay")
    if "qk_norm_rope_store" in caps.ops:
        base = _stored(caps, OpsCheck(name="outside/qk_norm_rope_store", op="qk_norm_rope_store", outside=True))
        base = replace(base, dtype=_first_dtype(caps))
        for dim in outside(caps.head_dims, HEAD_DIMS, quick):
            yield _named(base, f"head_dim={dim}", head_dim=dim, rotary_dim=dim)
        for page in outside(caps.page_sizes, PAGE_SIZES, quick):
            yield _named(base, f"page_size={page}", page_size=page)
