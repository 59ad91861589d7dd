"""What a backend sees of a batch: costly parts are derived once, at first use, and agree with the page table."""

from __future__ import annotations

import gc
import json
import weakref
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from minisgl_core.core import Batch, Req, SamplingParams
from minisgl_core.engine import Engine, EngineConfig
from minisgl_core.engine.inputs import DerivedView
from minisgl_core.plugin_api import BatchView

GEOMETRY = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 16, "intermediate_size": 16,
    "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 16, "vocab_size": 32,
    "max_position_embeddings": 64, "rope_theta": 10000.0, "rms_norm_eps": 1e-5, "hidden_act": "silu",
    "tie_word_embeddings": True, "torch_dtype": "float32",
}  # fmt: skip


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def test_functions_are_called_once_and_only_when_asked() -> None:
    calls: list[str] = []

    def derive(name: str, value: torch.Tensor) -> Callable[..., torch.Tensor]:
        def noted(*given: torch.Tensor) -> torch.Tensor:
            calls.append(name)
            assert [id(tensor) for tensor in given] == ([id(lens)] if name == "ids" else [])
            return value

        return noted

    lens, ids = ints(3, 1), ints(5, 6, 7, 8).view(2, 2)
    view = DerivedView((1, 1), (3, 1), 1, 3, ints(0, 1, 2), derive("lens", lens), derive("ids", ids), 2)
    assert calls == []
    assert view.kv_lens_device is lens
    assert calls == ["lens"]
    assert view.page_ids_device is ids
    assert view.page_ids_device is ids
    assert view.kv_lens_device is lens
    assert calls == ["lens", "ids"]
    other = replace(view, kv_lens_host=(1, 1))
    assert (other.kv_lens_host, view.kv_lens_host) == ((1, 1), (3, 1))
    assert other.page_ids_device is ids
    assert {item.name for item in fields(view)} == {item.name for item in fields(BatchView)}


def test_a_slot_table_follows_from_page_ids() -> None:
    view = BatchView(None, None, 1, 6, ints(0, 1, 2), ints(5, 2), ints(7, 3, 9, 0).view(2, 2), 4)
    table, rows = view.slot_table()
    assert rows.tolist() == [0, 1]
    assert table.tolist() == [[28, 29, 30, 31, 12, 13, 14, 15], [36, 37, 38, 39, 0, 1, 2, 3]]


@pytest.fixture(scope="module", params=[1, 4])
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder: Path = tmp_path_factory.mktemp("tiny")
    (folder / "config.json").write_text(json.dumps(GEOMETRY))
    size: int = request.param
    config = EngineConfig(
        str(folder), device="cpu", max_running_req=4, num_page_override=256 // size, page_size=size,
        max_seq_len_override=64, cuda_graph_max_bs=0, dummy_weights=True, progress=False,
    )  # fmt: skip
    built = Engine(config)
    yield built
    built.shutdown()


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_a_view_whose_pages_were_never_used_is_gone_with_its_batch(
    engine: Engine, phase: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    dispatcher = engine.attn_backend
    idle: Any = type("Idle", (), {"prepare_metadata": lambda self, batch: None})()
    monkeypatch.setitem(dispatcher.routes, phase, (replace(dispatcher.routes[phase][0], backend=idle),))
    batch = Batch([Req(torch.zeros(3, dtype=torch.int32), 0, 2, 4, 0, SamplingParams())], phase)
    gc.disable()
    try:
        dispatcher.prepare_metadata(batch)
        assert batch.view is not None
        lens = weakref.ref(batch.view.kv_lens_device)
        batch.view = None
        assert lens() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_the_engines_page_table_and_page_ids_agree(engine: Engine, phase: Any) -> None:
    order = np.random.default_rng(0).permutation(engine.num_pages).astype(np.int32)
    slots = (order[:, None] * engine.page_size + np.arange(engine.page_size, dtype=np.int32)).reshape(4, 64)
    reqs = []
    for row, length in ((3, 9), (1, 2), (0, 17)):
        engine.state.set_slots(row, 0, slots[row])
        cached = length - 1 if phase == "decode" else 0
        reqs.append(Req(torch.zeros(length, dtype=torch.int32), row, cached, 4, row, SamplingParams()))
    batch = Batch(reqs, phase, padded_size=4 if phase == "decode" else 0)
    engine.attn_backend.prepare_metadata(batch)
    view = batch.view
    assert view is not None
    table, rows = view.slot_table()
    assert table is engine.state.page_table, "nothing is copied"
    size, dummy = engine.page_size, engine.kv_cache.dummy_slot // engine.page_size
    lens = view.kv_lens_device.tolist()
    assert lens == ([9, 2, 17, 1] if phase == "decode" else [9, 2, 17])
    for row, length in enumerate(lens):
        found = table[rows[row], :length].tolist()
        live = reqs[row].table_idx if row < 3 else None
        assert found == (slots[live, :length].tolist() if live is not None else [engine.kv_cache.dummy_slot])
        pages = view.page_ids_device[row].tolist()
        assert [slot // size for slot in found[::size]] == pages[: -(-length // size)]
        assert set(pages[-(-length // size) :]) <= {dummy}


def test_a_host_plan_costs_no_device_work(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    dispatcher = engine.attn_backend
    (route,) = dispatcher.routes["decode"]
    seen: list[BatchView] = []
    backend: Any = type("Planner", (), {"prepare_for_replay": lambda self, batch: seen.append(batch.view)})()
    planned = replace(route, backend=backend, host_plan=True)
    monkeypatch.setitem(dispatcher.routes, "decode", (planned,))
    reqs = [Req(torch.zeros(n, dtype=torch.int32), row, n - 1, 4, row, SamplingParams()) for row, n in ((2, 5), (0, 3))]
    batch = Batch(reqs, "decode", padded_size=4)
    engine.state.upload_decode(batch)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        dispatcher.prepare_for_replay(batch)
    worked = {event.key for event in profile.key_averages() if event.key.startswith("aten::")}
    assert worked <= {"aten::slice", "aten::as_strided"}
    (view,) = seen
    assert (view.kv_lens_host, view.q_lens_host, view.max_kv) == ((5, 3, 1, 1), (1,) * 4, 5)
    assert view.kv_lens_device.tolist() == [5, 3, 1, 1]
    assert view.page_ids_device.shape == (4, -(-5 // engine.page_size))
