"""The attention checks of a spec: every claim at its limits, and values just outside."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from minisgl_core.plugin_api import AnyValue, Caps, LayerFacts, Phase
from minisgl_core.registry.matching import kernel_page_size

from .attention import AttentionCheck
from .backend_under_test import names_of
from .collect import collect
from .real_sizes import real_heads
from .values import claims, inside, outside, usual

if TYPE_CHECKING:
    from .backend_under_test import BackendUnderTest
    from .check import Check
    from .device_fixture import DeviceFixture

__all__ = ["attention_checks"]

DTYPES: Final = ("float32", "bfloat16", "float16")
HEAD_DIMS: Final = (16, 32, 64, 80, 96, 112, 128, 160, 192, 256)
GQA_RATIOS: Final = tuple(range(1, 17))
PAGE_SIZES: Final = (1, 2, 3, 8, 16, 32, 64, 128, 256)
ANY_HEAD_DIMS: Final = {True: (64, 80, 256, 576), False: (*HEAD_DIMS, 576)}
ANY_GQA: Final = {True: (1, 3, 8), False: (1, 2, 3, 4, 5, 6, 7, 8, 16)}
ANY_PAGES: Final = {True: (1, 3, 16, 64, 512), False: (1, 3, 16, 64, 256, 512)}
LONG: Final = 4097
LAYERS: Final = 41
MANY_SLOTS: Final = 70_000
"""More slots than 16 bits can index."""


class _StressSize(NamedTuple):
    """Captured steps of real sizes: with few rows, or few keys, kernels divide the work differently."""

    rows: int
    longest: int
    kv_heads: int


GPU_STRESS: Final = _StressSize(264, LONG, 8)
CPU_STRESS: Final = _StressSize(40, 1100, 2)


def attention_checks(under_test: BackendUnderTest, fixture: DeviceFixture, quick: bool) -> list[Check]:
    """All checks, with unique names, in a fixed order; those inside the caps come first."""
    on_gpu = not fixture.facts.about.on_host
    return collect(under_test, fixture, lambda caps: _of_caps(caps, quick, on_gpu), lambda caps: _beyond(caps, quick))


def _of_caps(caps: Caps, quick: bool, on_gpu: bool) -> Iterator[AttentionCheck]:
    for phase in caps.phases:
        yield from _of_phase(caps, phase, quick, on_gpu)


def _base(caps: Caps, phase: Phase, dtype: str) -> AttentionCheck:
    kv_dtypes = names_of(caps.kv_dtypes, DTYPES)
    page = usual(caps.page_sizes, 16, PAGE_SIZES) or 16
    dim = usual(caps.head_dims, 64, HEAD_DIMS) or 64
    return AttentionCheck(
        name=f"{phase}/{dtype}",
        phase=phase,
        dtype=dtype,
        kv_dtype="" if dtype in kv_dtypes or not kv_dtypes else kv_dtypes[0],
        page_size=page,
        gqa_ratio=usual(caps.gqa_ratios, 2, GQA_RATIOS) or 2,
        head_dim=dim,
        rows=_ragged(phase, page),
        layers=(LayerFacts(_scale(dim)),),
    )


def _scale(head_dim: int) -> float:
    """A larger scale than usual, so that an extra or a missing key shows in 16-bit results too."""
    return float(f"{2.0 * head_dim**-0.5:.4g}")


def _ragged(phase: Phase, page: int) -> tuple[tuple[int, int], ...]:
    """Lengths around one page, 16 and 17; prefill with and without a cached prefix."""
    around = tuple(n for n in sorted({1, 2, 15, 16, 17, page - 1, page, page + 1, 2 * page + 3}) if 0 < n < 600)
    if phase == "decode":
        return tuple((1, n) for n in around)
    return (*((n, n) for n in around), (1, 17), (16, 33), (2, page + 2), (page + 1, 2 * page + 1), (70, 130))


def _of_phase(caps: Caps, phase: Phase, quick: bool, on_gpu: bool) -> Iterator[AttentionCheck]:
    dtypes = names_of(caps.dtypes, DTYPES)
    for dtype in dtypes:
        yield _named(_base(caps, phase, dtype), "ragged")
    for place, dtype in enumerate(dtypes):
        if place and quick:
            break
        base = _base(caps, phase, dtype)
        yield from _varied(caps, base, quick)
        yield from _special(caps, base, quick)
    if phase == "decode" and caps.graph != "never":
        yield from _replays(caps, dtypes, quick, GPU_STRESS if on_gpu else CPU_STRESS)


def _named(base: AttentionCheck, what: str, **changes: Any) -> AttentionCheck:
    return replace(base, name=f"{base.name}/{what}", **changes)


def _varied(caps: Caps, base: AttentionCheck, quick: bool) -> Iterator[AttentionCheck]:
    """Vary one declared field at a time, on fewer rows."""
    rows = _few(base)
    small = replace(base, rows=rows)
    for dim in inside(caps.head_dims, ANY_HEAD_DIMS[quick], quick):
        yield _named(small, f"head_dim={dim}", head_dim=dim, layers=(LayerFacts(_scale(dim)),))
    for ratio in inside(caps.gqa_ratios, ANY_GQA[quick], quick):
        yield _named(small, f"gqa_ratio={ratio}", gqa_ratio=ratio)
    for page in inside(caps.page_sizes, ANY_PAGES[quick], quick):
        yield _named(base, f"page_size={page}", page_size=page, rows=_ragged(base.phase, page))
    for kv_dtype in names_of(caps.kv_dtypes, DTYPES):
        if kv_dtype != (base.kv_dtype or base.dtype):
            yield _named(small, f"kv_dtype={kv_dtype}", kv_dtype=kv_dtype)
    for heads in (1, 3, 17) if quick else (1, 3, 8, 17, 32):
        yield _named(small, f"kv_heads={heads}", kv_heads=heads)
    for name, _, kv_heads, dim, ratio in ((*heads, heads.gqa_ratio) for heads in real_heads()):
        if claims(caps.gqa_ratios, ratio) and claims(caps.head_dims, dim):
            shape = {"gqa_ratio": ratio, "kv_heads": kv_heads, "head_dim": dim, "layers": (LayerFacts(_scale(dim)),)}
            yield _named(small, f"heads_of={name}", **shape)
    smallest = {"page_size": min(pages), "kv_heads": 1} if (pages := inside(caps.page_sizes, (1,), True)) else {}
    yield _named(small, f"slots={MANY_SLOTS}", slots=MANY_SLOTS, **smallest)


def _few(base: AttentionCheck) -> tuple[tuple[int, int], ...]:
    if base.phase == "decode":
        return ((1, 1), (1, 40), (1, 129))
    return ((33, 33), (1, 18), (40, 129))


def _special(caps: Caps, base: AttentionCheck, quick: bool) -> Iterator[AttentionCheck]:
    scale = base.layers[0].scale
    rows = _few(base)
    features = caps.features
    windowed = isinstance(features, AnyValue) or "window" in features
    capped = isinstance(features, AnyValue) or "softcap" in features
    if windowed:
        for window in (1, 16, 100):
            yield _named(base, f"window={window}", rows=rows, layers=(LayerFacts(scale, window=window),))
        wide = ((1, 1501), (1, 2000)) if base.phase == "decode" else ((3, 1502), (40, 2000))
        yield _named(base, "window=1500", rows=wide, kv_heads=1, layers=(LayerFacts(scale, window=1500),))
    if capped:
        yield _named(base, "softcap=2", rows=rows, layers=(LayerFacts(scale, softcap=2.0),))
    if windowed and capped:
        yield _named(base, "window=20,softcap=5", rows=rows, layers=(LayerFacts(scale, window=20, softcap=5.0),))
    others = (LayerFacts(scale / 3), LayerFacts(scale, window=9 if windowed else None), LayerFacts(scale))
    yield _named(base, "layers", rows=rows, layers=others)
    many = tuple(LayerFacts(scale / (1 + layer % 7)) for layer in range(LAYERS))
    yield _named(base, f"layers={LAYERS}", rows=rows[-2:], kv_heads=1, layers=many)
    yield _named(base, "one_row", rows=rows[-1:])
    yield _named(base, "huge_scores", rows=rows, layers=(LayerFacts(30.0 * scale),))
    yield _named(
        base, "batch=33", rows=tuple((1, 1 + 3 * n) for n in range(33)) if base.phase == "decode" else rows * 11
    )
    small_rows = tuple((1, 1 + n) for n in range(130)) if base.phase == "decode" else ((1, 18), (2, 3)) * 65
    yield _named(base, "batch=130", kv_heads=1, rows=small_rows)
    long = ((1, LONG), (1, 700)) if base.phase == "decode" else ((300, 300), (9 if quick else 300, LONG))
    yield _named(base, f"length={LONG}", rows=long, kv_heads=1)
    if base.phase == "prefill":
        for prompt in (129, 577) if quick else (65, 129, 257, 577, 1025):  # just beyond every usual tile of queries
            yield _named(base, f"prompt={prompt}", rows=((prompt, prompt),), kv_heads=1)
            yield _named(base, f"prompt={prompt},cached=40", rows=((prompt, prompt + 40),), kv_heads=1)
    yield _named(base, "in_flight", scenario="in_flight", rows=rows)
    yield _named(base, "moved", scenario="moved", rows=rows)
    yield _named(base, "in_turn", scenario="in_turn", rows=rows)
    yield _named(base, "growth", scenario="growth", rows=rows)
    repeated = ((1, 17), (1, 40)) if base.phase == "decode" else ((5, 17), (1, 20))
    yield _named(base, "endurance", scenario="endurance", kv_heads=1, rows=((repeated[0][0], 1), *repeated))


def _replays(caps: Caps, dtypes: tuple[str, ...], quick: bool, stress: _StressSize) -> Iterator[AttentionCheck]:
    for dtype in dtypes[:1] if quick else dtypes:
        base = replace(_base(caps, "decode", dtype), scenario="replay", rows=((1, 1),))
        yield _named(base, "replay")
        yield _named(base, "replay_in_turn", scenario="replay_in_turn")
        for ratio in dict.fromkeys((base.gqa_ratio, usual(caps.gqa_ratios, 5, GQA_RATIOS) or base.gqa_ratio)):
            shape = replace(base, scenario="stress", kv_heads=stress.kv_heads, gqa_ratio=ratio)
            yield _named(shape, f"replay,rows={stress.rows},gqa_ratio={ratio}", capture_rows=stress.rows)
            yield _named(shape, f"replay,length={stress.longest},gqa_ratio={ratio}", longest=stress.longest)
        for page in inside(caps.page_sizes, (1, 16, 64), quick):
            if page != base.page_size:
                yield _named(base, f"replay,page_size={page}", page_size=page)
        if isinstance(caps.features, AnyValue) or "window" in caps.features:
            scale = base.layers[0].scale
            yield _named(base, "replay,window=20", layers=(LayerFacts(scale, window=20), LayerFacts(scale)))


def _beyond(caps: Caps, quick: bool) -> Iterator[AttentionCheck]:
    """Values one step outside in one field; callers drop those that another capability set claims."""
    phase, dtypes = (caps.phases or ("decode",))[0], names_of(caps.dtypes, DTYPES)
    base = _base(caps, phase, (dtypes or DTYPES)[0])
    base = replace(base, name="outside", outside=True, rows=_few(base))
    for dim in outside(caps.head_dims, HEAD_DIMS, quick):
        yield _named(base, f"head_dim={dim}", head_dim=dim, layers=(LayerFacts(_scale(dim)),))
    for ratio in outside(caps.gqa_ratios, GQA_RATIOS, quick):
        yield _named(base, f"gqa_ratio={ratio}", gqa_ratio=ratio)
    pages = [page for page in PAGE_SIZES if kernel_page_size(caps.page_sizes, page) is None]
    for page in pages[-1:] if quick else pages:
        yield _named(base, f"page_size={page}", page_size=page)
    for dtype in DTYPES:
        if dtype not in dtypes:
            yield _named(base, f"dtype={dtype}", dtype=dtype, kv_dtype=dtype)
    if not isinstance(caps.features, AnyValue):
        scale = base.layers[0].scale
        if "window" not in caps.features:
            yield _named(base, "window", layers=(LayerFacts(scale, window=8),))
        if "softcap" not in caps.features:
            yield _named(base, "softcap", layers=(LayerFacts(scale, softcap=2.0),))
    for other in ("prefill", "decode"):
        if other not in caps.phases:
            check = replace(base, phase=other)
            yield _named(check, other, rows=_few(check))
    if caps.graph == "never" and "decode" in caps.phases:
        yield _named(base, "replay", scenario="replay", phase="decode", rows=((1, 1),))
