"""What is measured: every backend that would fit, at every size, with a timer whose answers the tests choose."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from minisgl_core.builtin.linear import PlainLinear
from minisgl_core.calibrate.grid import sizes_of, weights_of
from minisgl_core.calibrate.measure import calibrate
from minisgl_core.llm import LLM
from minisgl_core.modelconfig import MoEConfig, read_model_config
from minisgl_core.modelconfig.geometries import geometry
from minisgl_core.plugin_api import ANY, BackendSpec, Caps, OneOf
from minisgl_core.registry import Candidate, DeviceFacts, PlanQuery, PluginRecord, Registry, discover
from minisgl_core.testing import DeviceFixture

pytest.importorskip("minisgl_cpu_sim")

CPU = DeviceFacts("cpu")
SMALL = replace(
    geometry("smollm2-135m"),
    num_layers=2,
    vocab_size=300,
    hidden_size=64,
    intermediate_size=96,
    windows=(None, None),
    num_q_heads=4,
    num_kv_heads=2,
    head_dim=16,
    rope=replace(geometry("smollm2-135m").rope, rotary_dim=16),
)
MIXED = replace(SMALL, architecture="Qwen3MoeForCausalLM", moe=MoEConfig(4, 2, 32, True, (0, 1)))


def query(model: Any = SMALL, **fields: Any) -> PlanQuery:
    return PlanQuery(model, CPU, "float32", max_running_req=8, max_seq_len=64, **fields)


def count_of(call: Callable[[], object], fixture: DeviceFixture) -> float:
    """A timer: it runs the call, and says 1."""
    call()
    return 1.0


def only_cpu_sim() -> Registry:
    return discover(allow=["minisgl-cpu-sim"])


@pytest.mark.parametrize("model", [SMALL, MIXED], ids=["dense", "moe"])
def test_every_fitting_backend_is_timed_at_every_size(model: Any) -> None:
    found = calibrate(
        query(model), model, only_cpu_sim(), DeviceFixture(CPU), max_prefill_tokens=64, quick=True, timer=count_of
    )
    assert found.notes == ()
    by_entry: dict[str, set[str]] = {}
    for point in found.points:
        by_entry.setdefault(point.entry, set()).add(point.backend)
    assert by_entry["attention.decode"] == by_entry["attention.prefill"] == by_entry["kv"]
    assert by_entry["kv"] == {"cpu@minisgl-cpu-sim", "torch@minisgl-cpu-sim"}
    assert by_entry["ops.sample"] == {"cpu@minisgl-cpu-sim", "composed@minisgl-core"}
    assert by_entry["linear.300x64"] == {"cpu@minisgl-cpu-sim", "plain@minisgl-core"}
    assert ("moe" in by_entry) == ("ops.route" in by_entry) == (model is MIXED)
    assert "linear.192x64" in by_entry if model is SMALL else "linear.4x64" in by_entry
    expected = {(size.entry.label, size.rows, size.length) for size in sizes_of(query(model), model, 64, True)}
    assert {(point.entry, point.rows, point.length) for point in found.points} == expected
    decode = [point for point in found.points if point.entry == "attention.decode"]
    assert {(point.rows, point.length, point.microseconds) for point in decode} == {(1, 64, 5e5), (8, 64, 5e5)}, (
        "a call is of two layers, so half a second is one's"
    )
    assert not any(point.captured for point in found.points), "a CPU has no graphs of its own"


def test_names_in_the_config_do_not_keep_others_from_being_timed() -> None:
    named = query(backends={"attention": "torch", "linear": "plain"})
    found = calibrate(
        named, SMALL, only_cpu_sim(), DeviceFixture(CPU), max_prefill_tokens=16, quick=True, timer=count_of
    )
    assert {point.backend for point in found.points if point.entry == "attention.decode"} == {
        "cpu@minisgl-cpu-sim",
        "torch@minisgl-cpu-sim",
    }


def with_backend(monkeypatch: pytest.MonkeyPatch, cls: type, **caps: Any) -> Registry:
    """The installed plugins and one more attention backend."""
    module = ModuleType("odd_attention")
    module.Odd = cls  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    wide = {"head_dims": ANY, "gqa_ratios": ANY, "page_sizes": ANY, "kv_layouts": ("NHD",), "phases": ("decode",)}
    caps = Caps(devices=("cpu",), dtypes=("float32",), kv_dtypes=("float32",), **{**wide, **caps})
    spec = BackendSpec("attention", "odd", "odd_attention:Odd", caps=(caps,))
    base = only_cpu_sim()
    record = PluginRecord("odd-dist", "x = y", "3.1", candidates=(Candidate(spec, "odd-dist", "3.1"),))
    return Registry((*base.plugins, record), base.notes)


def test_a_backend_that_raises_is_noted_and_the_others_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    from minisgl_cpu_sim.pure.attention import TorchAttention

    class Fails(TorchAttention):
        def forward(self, *_: Any) -> Any:
            raise RuntimeError("no such\n  kernel\n")

    registry = with_backend(monkeypatch, Fails)
    found = calibrate(query(), SMALL, registry, DeviceFixture(CPU), max_prefill_tokens=16, quick=True, timer=count_of)
    assert found.notes == (
        "attention.decode: odd@odd-dist failed at 1 rows of 64 tokens: RuntimeError: no such kernel",
        "attention.decode: odd@odd-dist failed at 8 rows of 64 tokens: RuntimeError: no such kernel",
    )
    assert "odd@odd-dist" not in {point.backend for point in found.points}
    assert any(point.entry == "attention.prefill" for point in found.points)


def test_a_backend_of_other_pages_is_timed_on_pages_that_suit_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from minisgl_cpu_sim.pure.attention import TorchAttention

    class Coarse(TorchAttention):
        def __init__(self, setup: Any, options: Any = None) -> None:
            assert setup.page_size == 48
            super().__init__(setup, options)

    registry = with_backend(monkeypatch, Coarse, page_sizes=OneOf(48))
    found = calibrate(query(), SMALL, registry, DeviceFixture(CPU), max_prefill_tokens=16, quick=True, timer=count_of)
    pages = {point.backend: point.page_size for point in found.points if point.entry == "attention.decode"}
    assert pages == {"cpu@minisgl-cpu-sim": 1, "torch@minisgl-cpu-sim": 1, "odd@odd-dist": 48}
    assert {point.version for point in found.points if point.backend == "odd@odd-dist"} == {"3.1"}


def test_progress_counts_every_job() -> None:
    reported: list[int] = []

    def progress(title: str, total: int) -> Callable[[], None]:
        reported.append(-total)
        return lambda: reported.append(1)

    small = replace(SMALL, vocab_size=32)
    found = calibrate(
        query(small),
        small,
        only_cpu_sim(),
        DeviceFixture(CPU),
        max_prefill_tokens=16,
        quick=True,
        timer=count_of,
        progress=progress,
    )
    assert sum(reported) == 0 and len(reported) == 1 + len(found.points)


@pytest.mark.parametrize("name", ["q3", "llama-bias", "moe", "moe2", "moe-mixed"])
def test_the_weights_are_those_that_the_model_has(
    name: str, tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes = set()
    prepare = PlainLinear.prepare_weights

    def seen(self: Any, weight: torch.Tensor) -> torch.Tensor:
        shapes.add(tuple(weight.shape))
        return prepare(self, weight)

    monkeypatch.setattr(PlainLinear, "prepare_weights", seen)
    path = tiny(name)
    with LLM(
        path,
        device="cpu",
        dummy_weights=True,
        max_running_req=1,
        num_page_override=8,
        max_seq_len_override=16,
        progress=False,
        backends={"linear": "plain"},
    ):
        pass
    model = read_model_config(str(path))
    assert set(weights_of(PlanQuery(model, CPU, model.dtype), model)) - shapes <= {(1, model.hidden_size)}
    assert shapes - set(weights_of(PlanQuery(model, CPU, model.dtype), model)) <= {(1, model.hidden_size)}, (
        "but for the one row of the shared expert's gate"
    )


def test_sizes_stay_within_what_the_engine_would_see() -> None:
    for quick in (False, True):
        sizes = sizes_of(replace(query(), max_seq_len=200, max_running_req=20), SMALL, 100, quick)
        for size in sizes:
            limit = {"attention": 20}.get(size.entry.role, 20 if size.entry.op == "sample" else 100)
            assert 1 <= size.rows <= limit and size.length <= 200
            if size.entry.phase == "prefill":
                assert size.rows * size.length <= 100
    rows = {size.rows for size in sizes_of(query(), SMALL, 64, False) if size.entry.phase == "decode"}
    assert rows == {1, 4, 8}, "the largest batch itself is one of them"


def test_a_rank_has_its_part_of_each_weight() -> None:
    assert weights_of(query(tp_size=2), SMALL) == [(64, 64), (64, 32), (96, 64), (64, 48), (150, 64)]


@pytest.mark.parametrize("host_plan", [False, True])
def test_where_the_device_captures_calls_are_replayed(host_plan: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The emulated graph stands in for a device's own. A backend with a host plan is asked before each replay."""
    from minisgl_cpu_sim.pure.attention import TorchAttention

    planned: list[Any] = []

    class Planned(TorchAttention):
        def prepare_for_replay(self, batch: Any) -> None:
            planned.append(batch.view.kv_lens_host)

    monkeypatch.setattr("minisgl_core.calibrate.work._Site.captures", lambda self, caps: caps.graph != "never")
    registry = with_backend(monkeypatch, Planned, graph="decode", host_plan=host_plan)

    def twice(call: Callable[[], object], fixture: DeviceFixture) -> float:
        call()
        call()
        return 1.0

    asked = replace(query(replace(SMALL, vocab_size=32), graph=True), max_running_req=2)
    found = calibrate(asked, asked.model, registry, DeviceFixture(CPU), max_prefill_tokens=8, quick=True, timer=twice)
    assert found.notes == ()
    captured = {point.entry.partition(".")[0] for point in found.points if point.captured}
    assert captured == {"attention", "kv", "ops", "linear"}
    assert not any(point.captured for point in found.points if point.entry == "attention.prefill")
    sizes = len([size for size in sizes_of(asked, asked.model, 8, True) if size.entry.phase == "decode"])
    assert len(planned) == (2 * sizes if host_plan else 0), "two replays of each size"
    assert all(lens in ((64,), (64, 64)) for lens in planned)
