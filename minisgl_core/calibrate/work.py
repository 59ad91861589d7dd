"""One call to time, for every role: built from the conformance kit's checks at the model's own sizes.

The time should be that of a call inside a model: attention includes its share of the step's metadata, weights are not
in a cache from the call before, and the call is replayed from a graph where the engine would do so.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch

from minisgl_core.plugin_api import Caps, LayerFacts
from minisgl_core.registry.matching import kernel_page_size
from minisgl_core.testing import BackendUnderTest, DeviceFixture, KVCheck, LinearCheck, MoECheck, OpsCheck, SampleCheck
from minisgl_core.testing.attention_bench import AttentionBench, Geometry
from minisgl_core.testing.check_run import Draw
from minisgl_core.testing.device_fixture import dtype_named

if TYPE_CHECKING:
    from minisgl_core.modelconfig import ModelConfig
    from minisgl_core.registry import PlanQuery
    from minisgl_core.testing.check_run import CallCheck

    from .grid import Size

__all__ = ["Contender", "Job", "prepare"]

_LAYERS: Final = 8
"""The most calls of attention for one call of its metadata"""
_COLD_BYTES: Final = 2**26
_MOST_COPIES: Final = 8
_SHARE_OF_FREE_MEMORY: Final = 0.5


@dataclass(frozen=True, slots=True)
class Contender:
    """A backend that fits, the capability set that declares it, and the page size of the pool that it fits."""

    under_test: BackendUnderTest
    label: str
    caps: Caps
    page_size: int


@dataclass(frozen=True, slots=True)
class Job:
    """A call to time; it does the work ``times`` times."""

    call: Callable[[], object]
    times: int
    captured: bool
    close: Callable[[], object]


@dataclass(frozen=True, slots=True)
class _Site:
    query: PlanQuery
    model: ModelConfig
    heads: tuple[int, int]
    window: int | None
    fixture: DeviceFixture

    def captures(self, caps: Caps) -> bool:
        """Would the engine replay it? Only device graphs count: emulated ones show nothing about speed."""
        return self.query.graph and caps.graph != "never" and self.fixture.platform.can_capture()


def prepare(
    size: Size, one: Contender, query: PlanQuery, model: ModelConfig, scope: dict[str, Any], fixture: DeviceFixture
) -> Job:
    """Build a contender for a size. Exceptions of the backend pass through."""
    site = _Site(query, model, (scope["q_heads"], scope["kv_heads"]), scope["window"], fixture)
    if size.entry.role == "attention":
        return _attention(size, one, site)
    return _check_job(size, one, site)


def _attention(size: Size, one: Contender, site: _Site) -> Job:
    q, fixture, layers = site.query, site.fixture, min(_LAYERS, site.model.num_layers)
    facts = (LayerFacts(site.model.head_dim**-0.5, site.window),)
    kernel_page = kernel_page_size(one.caps.page_sizes, one.page_size) or one.page_size
    geometry = Geometry(
        q.dtype, q.pool_dtype, kernel_page, site.heads[1], site.heads[0], site.model.head_dim, facts, finite_tail=True
    )
    decode = size.entry.phase == "decode"
    lens = [(1 if decode else size.length, size.length)] * size.rows
    bench = AttentionBench(fixture, geometry, size.rows, size.length, seed=0)
    bench.fill([size.length] * size.rows)
    tokens = sum(new for new, _ in lens)
    backend = one.under_test.build(bench.setup(tokens), one.caps)
    backend.bind_kv(bench.pool)
    wide = bench.wide(tokens)
    bench.write_inputs(wide, lens, 0)
    given = bench.views(wide)
    if decode and site.captures(one.caps):
        return _captured_attention(size, one, bench, backend, given, layers, fixture)
    batch = bench.eager(str(size.entry.phase), lens)

    def step() -> None:
        batch.scratch.clear()
        backend.prepare_metadata(batch)
        backend.update_metadata(batch)
        for _ in range(layers):
            backend.forward(*given, 0, batch)

    return Job(step, layers, False, backend.close)


def _captured_attention(
    size: Size,
    one: Contender,
    bench: AttentionBench,
    backend: Any,
    given: tuple[torch.Tensor, ...],
    layers: int,
    fixture: DeviceFixture,
) -> Job:
    rows = torch.arange(size.rows, device=fixture.device)
    bench.lengths[: size.rows] = size.length - 1
    backend.init_capture_graph(size.length, (size.rows,))
    batch = bench.captured(rows)
    backend.prepare_for_capture(batch)

    def step() -> tuple[torch.Tensor, ...]:
        bench.derive(batch, rows, None)
        backend.update_metadata(batch)
        return tuple(backend.forward(*given, 0, batch) for _ in range(layers))

    graph = fixture.capture(step, batch)

    def replay_planned() -> None:
        planned = bench.eager("decode", [(1, size.length)] * size.rows)
        backend.prepare_for_replay(planned)
        graph.replay()

    def close() -> None:
        graph.close()
        backend.close()

    return Job(replay_planned if one.caps.host_plan else graph.replay, layers, True, close)


def _check_job(size: Size, one: Contender, site: _Site) -> Job:
    check, nbytes = _check_of(size, site)
    backend = check.build(one.under_test, site.fixture, one.caps)
    copies = min(_MOST_COPIES, max(1, -(-_COLD_BYTES // nbytes))) if nbytes else 1
    runs = [check.check_run(backend, site.fixture) for _ in range(copies)]
    inputs = runs[0].draw(Draw(site.fixture, 0))

    def step() -> tuple[torch.Tensor, ...]:
        return tuple(out for run in runs for out in run.call(inputs))

    if not site.captures(one.caps):
        return Job(step, copies, False, backend.close)
    graph = site.fixture.capture(step)

    def close() -> None:
        graph.close()
        backend.close()

    return Job(graph.replay, copies, True, close)


def _check_of(size: Size, site: _Site) -> tuple[CallCheck, int]:
    """The kit's check at this size, and how many bytes of weights a call reads (0 = negligible)."""
    entry, model, dtype = size.entry, site.model, site.query.dtype
    itemsize = dtype_named(dtype).itemsize
    if entry.role == "linear":
        assert entry.shape is not None
        n, k = entry.shape
        return LinearCheck(name=entry.label, dtype=dtype, m=size.rows, n=n, k=k), n * k * itemsize
    if entry.role == "kv":
        return _kv_check(size, site), 0
    if entry.role == "moe":
        assert model.moe is not None
        moe = model.moe
        width = moe.intermediate_size // site.query.tp_size
        # the kit's check has two layers, and a second copy of each for the backend to repack
        _require_memory(4 * 3 * moe.num_experts * width * model.hidden_size * itemsize, site.fixture)
        check = MoECheck(
            name=entry.label,
            dtype=dtype,
            tokens=size.rows,
            experts=moe.num_experts,
            top_k=moe.top_k,
            hidden=model.hidden_size,
            width=width,
        )
        return check, 0
    return _op_check(size, site), 0


def _require_memory(nbytes: int, fixture: DeviceFixture) -> None:
    free = fixture.platform.free_bytes()
    if nbytes > _SHARE_OF_FREE_MEMORY * free:
        raise MemoryError(f"its experts need {nbytes / 1e9:.1f} GB, {free / 1e9:.1f} GB are free")


def _kv_check(size: Size, site: _Site) -> KVCheck:
    query = site.query
    return KVCheck(
        name="kv",
        dtype=query.dtype,
        kv_dtype=query.pool_dtype,
        page_size=query.page_size if query.page_size != "auto" else 16,
        kv_heads=site.heads[1],
        head_dim=site.model.head_dim,
        tokens=size.rows,
    )


def _op_check(size: Size, site: _Site) -> OpsCheck:
    model, moe, op = site.model, site.model.moe, size.entry.op or ""
    inner = moe.intermediate_size if moe is not None else model.intermediate_size
    widths = {
        "act_and_mul": inner // site.query.tp_size,
        "route": moe.num_experts if moe is not None else 1,
        "sample": model.vocab_size,
    }
    common: dict[str, Any] = {
        "name": size.entry.label,
        "op": op,
        "dtype": site.query.dtype,
        "tokens": size.rows,
        "width": widths.get(op, model.hidden_size),
        "eps": model.rms_norm_eps,
    }
    if op == "sample":
        return SampleCheck(mode="random", **common)
    return OpsCheck(
        q_heads=site.heads[0],
        kv_heads=site.heads[1],
        head_dim=model.head_dim,
        rotary_dim=model.rope.rotary_dim,
        norms=model.qk_norm,
        kv_dtype=site.query.pool_dtype,
        top_k=moe.top_k if moe is not None else 1,
        **common,
    )
