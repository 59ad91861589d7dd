"""Capsules made without an engine, and backends that are wrong in one known way."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from minisgl_core.capsule.attention.capsule import AttentionCapsule, AttentionGeometry, AttentionLayer
from minisgl_core.capsule.attention.cuts import compact
from minisgl_core.capsule.moe.capsule import MoECapsule
from minisgl_core.capsule.moe.make import MoEMaker
from minisgl_core.capsule.moe.observer import MoECall
from minisgl_core.capsule.role_observer import ObservedStep
from minisgl_core.core import Batch, Req, SamplingParams
from minisgl_core.plugin_api import ANY, BackendSpec, Caps, LayerFacts, MoESetup
from minisgl_core.testing import BackendUnderTest, DeviceFixture, reference
from minisgl_core.testing.attention_bench import AttentionBench, Geometry

pytest.importorskip("minisgl_cpu_sim")

PARAMS = SamplingParams(max_tokens=1)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def fixture() -> DeviceFixture:
    return DeviceFixture("cpu")


@pytest.fixture(scope="session")
def make_capsule(fixture: DeviceFixture) -> Callable[..., AttentionCapsule]:
    """``make_capsule(phase, rows of (new tokens, all tokens), layers, page_size)``; what was recorded is right."""

    def make(
        phase: str = "decode",
        rows: tuple[tuple[int, int], ...] = ((1, 33), (1, 5)),
        layers: tuple[LayerFacts, ...] = (LayerFacts(0.3), LayerFacts(0.4, window=6)),
        page_size: int = 4,
        kv_heads: int = 2,
        dtype: str = "float32",
    ) -> AttentionCapsule:
        geometry = Geometry(dtype, dtype, page_size, kv_heads, 2 * kv_heads, 8, layers)
        longest = max(total for _, total in rows)
        bench = AttentionBench(fixture, geometry, len(rows), longest, seed=3)
        bench.fill([total for _, total in rows])
        batch, tokens = bench.eager(phase, rows), sum(new for new, _ in rows)
        recorded = []
        for place, facts in enumerate(layers):
            wide = bench.wide(tokens)
            bench.write_inputs(wide, rows, place)
            q, k, v = (x.clone() for x in bench.views(wide))
            out = bench.expected(q, rows, place).to(q.dtype)
            caches = bench.pool.k_cache(place).clone(), bench.pool.v_cache(place).clone()
            recorded.append(AttentionLayer(10 + place, out, facts, q, k, v, *caches))
        view = batch.view
        assert view.q_lens_host is not None and view.kv_lens_host is not None
        recorded_geometry = AttentionGeometry(dtype, dtype, "NHD", page_size, 2 * kv_heads, kv_heads, 8, 8, 64, longest)
        uids = tuple(range(100, 100 + len(rows)))
        capsule = AttentionCapsule(
            step=7,
            phase=batch.phase,
            geometry=recorded_geometry,
            q_lens=view.q_lens_host,
            kv_lens=view.kv_lens_host,
            uids=uids,
            page_ids=view.page_ids_device,
            positions=batch.positions,
            out_loc=batch.out_loc,
            layers=tuple(recorded),
            origin={"backend": "by hand"},
        )
        return compact(capsule)

    return make


@pytest.fixture(scope="session")
def make_moe_capsule() -> Callable[..., MoECapsule]:
    """``make_moe_capsule(q_lens, padded rows, layers, ...)`` of 8 experts; what was recorded is right, and a choice of
    the first token is padding. ``last_rows``: the last layer has the last token of each row only.
    """

    def make(
        q_lens: tuple[int, ...] = (3, 1, 4),
        padded: int = 0,
        layers: int = 2,
        top_k: int = 2,
        dtype: str = "float32",
        phase: Any = "prefill",
        last_rows: bool = False,
    ) -> MoECapsule:
        setup = MoESetup(torch.device("cpu"), getattr(torch, dtype), 8, top_k, 16, 12, 20, 64)
        maker, random = MoEMaker(setup, layers), torch.Generator().manual_seed(0)
        tokens = sum(q_lens) + padded
        reqs = [Req(torch.zeros(9, dtype=torch.int32), row, 0, 1, 100 + row, PARAMS) for row in range(len(q_lens))]
        view: Any = SimpleNamespace(q_lens_host=(*q_lens, *(1,) * padded))
        step = ObservedStep(7, Batch(reqs=reqs, phase=phase, view=view))

        def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
            return (torch.randn(shape, generator=random) * scale).to(setup.dtype)

        made = []
        for layer_id in range(10, 10 + layers):
            weights = normal(8, 24, 16, scale=0.25), normal(8, 16, 12, scale=0.3)
            ids = torch.stack([torch.randperm(8, generator=random)[:top_k] for _ in range(tokens)]).to(torch.int32)
            ids[0, 0] = -1
            chosen = torch.rand(tokens, top_k, generator=random) + 0.1
            here = torch.arange(tokens)
            if last_rows and layer_id == 9 + layers:
                here = torch.tensor(q_lens).cumsum(0) - 1
            x, ids, chosen = normal(tokens, 16)[here], ids[here], chosen[here]
            real = min(len(here), sum(q_lens))
            call = MoECall("by hand", layer_id, real, here, x, ids, chosen, weights)
            out = reference.experts(x, ids, chosen, *weights).to(setup.dtype)
            made.append(maker.layer(call, out))
        return maker.capsule(step, made, {"backend": "by hand"})

    return make


@pytest.fixture
def make_moe_under_test(monkeypatch: pytest.MonkeyPatch, fixture: DeviceFixture) -> Callable[..., BackendUnderTest]:
    """``make_moe_under_test(change, **caps)``: ``moe:torch`` whose results go through ``change(out, x, ids, weights)``,
    the weights being (w13, w2).
    """
    from minisgl_cpu_sim.pure.moe import TorchMoE

    def make(change: Callable[..., torch.Tensor] | None = None, **caps: Any) -> BackendUnderTest:
        class Changed(TorchMoE):
            def forward(self, x: Any, topk_ids: Any, topk_weights: Any, weights: Any, layer_id: int) -> torch.Tensor:
                out = super().forward(x, topk_ids, topk_weights, weights, layer_id)
                return out if change is None else change(out, x, topk_ids, weights)

        module = ModuleType("changed_experts")
        module.Changed = Changed  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, module.__name__, module)
        declared = {"devices": ("cpu",), "dtypes": ("float32", "bfloat16"), **caps}
        spec = BackendSpec("moe", "changed", "changed_experts:Changed", caps=(Caps(**declared),))
        return BackendUnderTest.of(spec, fixture.facts)

    return make


CAPS = Caps(
    devices=("cpu",),
    dtypes=("float32", "bfloat16"),
    kv_dtypes=("float32", "bfloat16"),
    head_dims=ANY,
    gqa_ratios=ANY,
    page_sizes=ANY,
    kv_layouts=("NHD",),
    phases=("prefill", "decode"),
    features=frozenset({"window", "softcap"}),
)


@pytest.fixture
def make_under_test(monkeypatch: pytest.MonkeyPatch, fixture: DeviceFixture) -> Callable[..., BackendUnderTest]:
    """``make_under_test(change, **caps)``: ``attention:torch`` whose results go through ``change(backend, out, batch,
    layer)``.
    """
    from minisgl_cpu_sim.pure.attention import TorchAttention

    def make(change: Callable[..., torch.Tensor] | None = None, **caps: Any) -> BackendUnderTest:
        class Changed(TorchAttention):
            def forward(self, q: Any, k: Any, v: Any, layer_id: int, batch: Any) -> torch.Tensor:
                out = super().forward(q, k, v, layer_id, batch)
                return out if change is None else change(self, out, batch, layer_id)

        module = ModuleType("changed_attention")
        module.Changed = Changed  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, module.__name__, module)
        spec = BackendSpec("attention", "changed", "changed_attention:Changed", caps=(replace(CAPS, **caps),))
        return BackendUnderTest.of(spec, fixture.facts)

    return make
