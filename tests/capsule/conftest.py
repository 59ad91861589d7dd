"""Capsules made without an engine, and backends that are wrong in one known way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from minisgl_core.capsule.edits import compact
from minisgl_core.capsule.format import Capsule, RecordedLayer
from minisgl_core.capsule.format import Geometry as Told
from minisgl_core.plugin_api import ANY, BackendSpec, Caps, LayerFacts
from minisgl_core.testing import Rig, Subject
from minisgl_core.testing.attention_bench import AttentionBench, Geometry

pytest.importorskip("minisgl_cpu_sim")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def rig() -> Rig:
    return Rig("cpu")


@pytest.fixture(scope="session")
def make_capsule(rig: Rig) -> Callable[..., Capsule]:
    """``make_capsule(phase, rows of (new tokens, all tokens), layers, page_size)``; what was recorded is right."""

    def make(
        phase: str = "decode",
        rows: tuple[tuple[int, int], ...] = ((1, 33), (1, 5)),
        layers: tuple[LayerFacts, ...] = (LayerFacts(0.3), LayerFacts(0.4, window=6)),
        page_size: int = 4,
        kv_heads: int = 2,
        dtype: str = "float32",
    ) -> Capsule:
        geometry = Geometry(dtype, dtype, page_size, kv_heads, 2 * kv_heads, 8, layers)
        longest = max(total for _, total in rows)
        bench = AttentionBench(rig, geometry, len(rows), longest, seed=3)
        bench.fill([total for _, total in rows])
        batch, tokens = bench.eager(phase, rows), sum(new for new, _ in rows)
        recorded = []
        for place, facts in enumerate(layers):
            wide = bench.wide(tokens)
            bench.write_inputs(wide, rows, place)
            q, k, v = (x.clone() for x in bench.views(wide))
            out = bench.expected(q, rows, place).to(q.dtype)
            caches = bench.pool.k_cache(place).clone(), bench.pool.v_cache(place).clone()
            recorded.append(RecordedLayer(10 + place, facts, q, k, v, out, *caches))
        view = batch.view
        assert view.q_lens_host is not None and view.kv_lens_host is not None
        told = Told(dtype, dtype, "NHD", page_size, 2 * kv_heads, kv_heads, 8, 8, 64, longest)
        uids = tuple(range(100, 100 + len(rows)))
        capsule = Capsule(
            step=7,
            phase=batch.phase,
            geometry=told,
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
def make_subject(monkeypatch: pytest.MonkeyPatch, rig: Rig) -> Callable[..., Subject]:
    """``make_subject(change, **caps)``: ``attention:torch`` whose results go through ``change(backend, out, batch,
    layer)``.
    """
    import sys
    from types import ModuleType

    from minisgl_cpu_sim.pure.attention import TorchAttention

    def make(change: Callable[..., torch.Tensor] | None = None, **caps: Any) -> Subject:
        class Changed(TorchAttention):
            def forward(self, q: Any, k: Any, v: Any, layer_id: int, batch: Any) -> torch.Tensor:
                out = super().forward(q, k, v, layer_id, batch)
                return out if change is None else change(self, out, batch, layer_id)

        module = ModuleType("changed_attention")
        module.Changed = Changed  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, module.__name__, module)
        from dataclasses import replace

        spec = BackendSpec("attention", "changed", "changed_attention:Changed", caps=(replace(CAPS, **caps),))
        return Subject.of(spec, rig.facts)

    return make
