"""The workloads that are timed: for each role the calls that dominate the time of a model, and their least work.

Shapes as in the modules of the roles.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

from minisgl_core.plugin_api import LayerFacts, Role

from .attention_bench import AttentionBench, Geometry
from .attention_checks import DTYPES, GQA_RATIOS, HEAD_DIMS, PAGE_SIZES
from .backend_under_test import names_of
from .check_run import CallCheck, Draw
from .device_fixture import dtype_named
from .kv import KVCheck
from .linear import LinearCheck
from .moe import MoECheck
from .ops import OpsCheck
from .ops_sample import SampleCheck
from .values import usual

if TYPE_CHECKING:
    from minisgl_core.plugin_api import Caps

    from .backend_under_test import BackendUnderTest
    from .device_fixture import DeviceFixture

__all__ = ["WORKLOADS", "Kind", "Workload"]

Kind = Literal["GB/s", "TFLOP/s"]


@dataclass(frozen=True, slots=True)
class Workload:
    """A call to time. ``amount``: the bytes that it must move, or its floating-point operations."""

    label: str
    kind: Kind
    amount: float
    dtype: str
    call: Callable[[], object]
    close: Callable[[], object]


Maker = Callable[["BackendUnderTest", "DeviceFixture", "Caps", bool], Iterator[Workload]]


def _is_large(fixture: DeviceFixture, quick: bool) -> bool:
    return fixture.device.type != "cpu" and not quick


def _dtype(fixture: DeviceFixture, caps: Caps) -> str:
    """The dtype that models use: 16 bits on a GPU if claimed."""
    claimed = names_of(caps.dtypes, DTYPES)
    return next(
        (name for name in ("bfloat16", "float16") if name in claimed and fixture.device.type != "cpu"), claimed[0]
    )


def _timed(
    under_test: BackendUnderTest, fixture: DeviceFixture, caps: Caps, check: CallCheck, kind: Kind, amount: float
) -> Workload:
    backend = check.build(under_test, fixture, caps)
    check_run = check.check_run(backend, fixture)
    inputs = check_run.draw(Draw(fixture, 0))
    return Workload(check.name, kind, amount, check.dtype, lambda: check_run.call(inputs), backend.close)


def _attention(under_test: BackendUnderTest, fixture: DeviceFixture, caps: Caps, quick: bool) -> Iterator[Workload]:
    """Decode must read every key and value once; prefill must do 4 * D operations per pair of positions that see each
    other and head.
    """
    large, dtype = _is_large(fixture, quick), _dtype(fixture, caps)
    dim, ratio = usual(caps.head_dims, 128, HEAD_DIMS) or 128, usual(caps.gqa_ratios, 4, GQA_RATIOS) or 4
    page, kv_heads = usual(caps.page_sizes, 16, PAGE_SIZES) or 16, 8 if large else 2
    layers = (LayerFacts(dim**-0.5),)
    geometry = Geometry(dtype, dtype, page, kv_heads, kv_heads * ratio, dim, layers, caps.finite_tail)
    for phase in caps.phases:
        count, length = (64, 4096) if large else (4, 512)
        if phase == "prefill":
            count = 4 if large else 1
        lens = [(1 if phase == "decode" else length, length)] * count
        call, close = _attention_call(under_test, fixture, geometry, phase, lens)
        if phase == "decode":
            amount = 2.0 * count * length * kv_heads * dim * dtype_named(dtype).itemsize
            yield Workload(f"decode, {count} rows of {length}", "GB/s", amount, dtype, call, close)
        else:
            amount = 4.0 * dim * kv_heads * ratio * count * length * (length + 1) / 2
            yield Workload(f"prefill, {count} rows of {length}", "TFLOP/s", amount, dtype, call, close)


def _attention_call(
    under_test: BackendUnderTest,
    fixture: DeviceFixture,
    geometry: Geometry,
    phase: str,
    lens: Sequence[tuple[int, int]],
) -> tuple[Callable[[], object], Callable[[], object]]:
    bench = AttentionBench(fixture, geometry, len(lens), max(total for _, total in lens), seed=0)
    bench.fill([total for _, total in lens])
    backend = under_test.build(bench.setup(sum(new for new, _ in lens)))
    backend.bind_kv(bench.pool)
    wide = bench.wide(sum(new for new, _ in lens))
    bench.write_inputs(wide, lens, 0)
    batch = bench.eager(phase, lens)
    backend.prepare_metadata(batch)
    backend.update_metadata(batch)
    inputs = bench.views(wide)
    return lambda: backend.forward(*inputs, 0, batch), backend.close


def _kv(under_test: BackendUnderTest, fixture: DeviceFixture, caps: Caps, quick: bool) -> Iterator[Workload]:
    """A store and a look-up read and write their rows."""
    tokens, dtype = 8192 if _is_large(fixture, quick) else 512, _dtype(fixture, caps)
    size = dtype_named(dtype).itemsize
    base = KVCheck(
        name=f"store of {tokens} rows",
        dtype=dtype,
        page_size=usual(caps.page_sizes, 16, PAGE_SIZES) or 16,
        kv_heads=8,
        head_dim=usual(caps.head_dims, 128, HEAD_DIMS) or 128,
        tokens=tokens,
    )
    yield _timed(under_test, fixture, caps, base, "GB/s", 4.0 * tokens * 8 * base.head_dim * size)


def _moe(under_test: BackendUnderTest, fixture: DeviceFixture, caps: Caps, quick: bool) -> Iterator[Workload]:
    """With few tokens the weights of the used experts are read; with many the arithmetic dominates."""
    large, dtype = _is_large(fixture, quick), _dtype(fixture, caps)
    experts, top_k, hidden, width = (64, 8, 2048, 768) if large else (8, 2, 256, 128)
    for tokens in (32, 4096) if large else (8, 128):
        check = MoECheck(
            name=f"{tokens} tokens, {top_k} of {experts} experts, {hidden} x {width}",
            dtype=dtype,
            tokens=tokens,
            experts=experts,
            top_k=top_k,
            hidden=hidden,
            width=width,
        )
        if tokens <= 32:
            # (1 - k/E)^T of the experts are expected to get no token
            used = experts * (1 - (1 - top_k / experts) ** tokens)
            yield _timed(
                under_test, fixture, caps, check, "GB/s", used * 3 * hidden * width * dtype_named(dtype).itemsize
            )
        else:
            yield _timed(under_test, fixture, caps, check, "TFLOP/s", 6.0 * tokens * top_k * hidden * width)


def _ops(under_test: BackendUnderTest, fixture: DeviceFixture, caps: Caps, quick: bool) -> Iterator[Workload]:
    """Every operation except routing is bound by memory."""
    large, dtype = _is_large(fixture, quick), _dtype(fixture, caps)
    tokens, width = (8192, 4096) if large else (256, 512)
    size = dtype_named(dtype).itemsize
    passes = {"rms_norm": 2, "add_rms_norm": 4, "act_and_mul": 3}
    for op, times in passes.items():
        if op in caps.ops:
            check = OpsCheck(name=f"{op} of {tokens} x {width}", op=op, dtype=dtype, tokens=tokens, width=width)
            yield _timed(under_test, fixture, caps, check, "GB/s", float(times * tokens * width * size))
    if "qk_norm_rope_store" in caps.ops:
        dim = usual(caps.head_dims, 128, HEAD_DIMS) or 128
        page = usual(caps.page_sizes, 16, PAGE_SIZES) or 16
        q_heads, kv_heads = (32, 8) if large else (4, 2)
        op = "qk_norm_rope_store"
        name = f"{op} of {tokens} tokens, heads {q_heads}/{kv_heads} x {dim}"
        check = OpsCheck(
            name=name,
            op=op,
            dtype=dtype,
            tokens=tokens,
            head_dim=dim,
            rotary_dim=dim,
            page_size=page,
            q_heads=q_heads,
            kv_heads=kv_heads,
        )
        rows = 2 * q_heads + 6 * kv_heads
        yield _timed(under_test, fixture, caps, check, "GB/s", float(tokens * rows * dim * size))
    if "sample" in caps.ops:
        rows, vocab = (256, 151_936) if large else (8, 4096)
        for mode in ("greedy", "random"):
            name = f"sample, {mode}, {rows} rows of {vocab}"
            drawn = SampleCheck(name=name, dtype=dtype, mode=mode, tokens=rows, width=vocab)
            yield _timed(under_test, fixture, caps, drawn, "GB/s", float(rows * vocab * size))


def _linear(under_test: BackendUnderTest, fixture: DeviceFixture, caps: Caps, quick: bool) -> Iterator[Workload]:
    """With few rows the weight is read; with many the arithmetic dominates."""
    large, dtype = _is_large(fixture, quick), _dtype(fixture, caps)
    n, k = (8192, 4096) if large else (512, 512)
    for m in (1, 16, 4096) if large else (1, 16, 256):
        check = LinearCheck(name=f"{m} x {k} x {n}", dtype=dtype, m=m, n=n, k=k)
        if m <= 16:
            yield _timed(under_test, fixture, caps, check, "GB/s", float(n * k * dtype_named(dtype).itemsize))
        else:
            yield _timed(under_test, fixture, caps, check, "TFLOP/s", 2.0 * m * n * k)


WORKLOADS: Final[dict[Role, Maker]] = {
    "attention": _attention,
    "kv": _kv,
    "moe": _moe,
    "ops": _ops,
    "linear": _linear,
}
"""Graph runners and communicators are timed by ``minisgl bench``, in a whole engine."""
