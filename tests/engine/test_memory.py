"""How the device's memory is divided: by hand, and on simulated GPUs that count every byte."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from minisgl_core.bench.model_folder import write_geometry
from minisgl_core.builtin.comm import TorchDistCommunicator
from minisgl_core.core import SamplingParams
from minisgl_core.engine import Engine, EngineConfig
from minisgl_core.engine.dispatch import AttentionDispatcher
from minisgl_core.engine.memory import MemoryUse, Reserve, count_pages
from minisgl_core.engine.memory_profile import estimate_graphs, longest_rows, spread
from minisgl_core.errors import EngineError
from minisgl_core.kvcache.pool import PagedKVPool
from minisgl_core.llm import LLM
from minisgl_core.modelconfig.geometries import geometry
from minisgl_core.plugin_api import CannotRun, Reason
from support.simulated_gpu import Meter, simulated_gpu, with_cuda_graphs

PAGE_BYTES = 16 * 2 * 2 * 2 * 32 * 4  # tokens * (k, v) * layers * kv heads * head_dim * float32
TOTAL = 8 << 20
SLACK = 200_000


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_geometry(geometry("tiny"), tmp_path_factory.mktemp("tiny")))


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def config_of(model: str, **changes: Any) -> EngineConfig:
    settings = {
        "dtype": torch.float32,
        "device": "cpu",
        "max_running_req": 8,
        "max_seq_len_override": 512,
        "max_prefill_tokens": 64,
        "page_size": 16,
        "memory_ratio": 1.0,
        "cuda_graph_max_bs": 4,
        "cuda_graph_modes": ("greedy",),
        "dummy_weights": True,
        "progress": False,
        "backends": {"attention": "torch", "kv": "torch"},
        **changes,
    }
    config = EngineConfig(model, **settings)
    return with_cuda_graphs(config) if config.cuda_graph_max_bs else config


# By hand.


@pytest.mark.parametrize(
    ("tokens", "rows", "longest", "lens"),
    [
        (8, 3, 100, (6, 1, 1)),
        (8, 3, 4, (4, 3, 1)),
        (8, 3, 2, (2, 2, 2)),
        (2, 5, 9, (1, 1)),
        (5, 1, 3, (3,)),
    ],
)
def test_the_longest_pass_has_both_extremes(tokens: int, rows: int, longest: int, lens: tuple[int, ...]) -> None:
    assert longest_rows(tokens, rows, longest) == lens


@pytest.mark.parametrize(
    ("free", "modes", "made", "total", "bytes_"),
    [
        # three modes of the largest size took 50, three of the next 9 more: 12 graphs take 50 + 9 * 3
        ([100, 60, 55, 50, 47, 44, 41], 3, 6, 12, 77),
        # one size only: the first graph took 40, each other mode 5
        ([100, 60, 55, 50], 3, 3, 3, 50),
        # one graph
        ([100, 60], 1, 1, 1, 40),
        # a runner that reported nothing: 6 graphs took 60
        ([100, 40], 3, 6, 12, 120),
        # another program freed memory in between
        ([100, 110, 110, 120, 130, 130, 130], 3, 6, 12, 0),
    ],
)
def test_graphs_by_hand(free: list[int], modes: int, made: int, total: int, bytes_: int) -> None:
    assert estimate_graphs(free, modes, made, total) == bytes_


def context(free: int, others: tuple[int, ...] = ()) -> Any:
    """Rank 0 of several: the ``others`` can hold that many pages."""

    def all_gather(mine: torch.Tensor) -> torch.Tensor:
        return torch.cat([mine, torch.tensor([others], dtype=torch.int64)], dim=-1) if others else mine

    platform = SimpleNamespace(free_bytes=lambda: free, total_bytes=lambda: 2 * free, peak_bytes=lambda work: 0)
    return SimpleNamespace(
        config=geometry("tiny"),
        max_seq_len=512,
        device=torch.device("cpu"),
        tp=SimpleNamespace(size=1 + len(others)),
        platform=platform,
        comm=SimpleNamespace(all_gather=all_gather),
    )


def pages(model: str, ctx: Any, reserve: Reserve, **changes: Any) -> int:
    config = config_of(model, cuda_graph_max_bs=None, **changes)
    return count_pages(config, ctx, 16, 2, torch.float32, reserve)


def test_the_pool_gets_what_the_others_leave(model: str) -> None:
    reserve = Reserve(tables=1 * PAGE_BYTES, passes=20 * PAGE_BYTES, graphs=9 * PAGE_BYTES, num_graphs=3)
    assert pages(model, context(200 * PAGE_BYTES), reserve) == 200 - 30 - 1  # the last one is the dummy page
    assert pages(model, context(200 * PAGE_BYTES), reserve, memory_ratio=0.5) == 100 - 30 - 1
    assert pages(model, context(10**12), reserve) == 8 * 512 // 16  # more could never be used
    assert pages(model, context(10 * PAGE_BYTES), reserve, num_page_override=7) == 7


def test_ranks_agree_on_the_smallest(model: str) -> None:
    assert pages(model, context(200 * PAGE_BYTES, others=(50, 300)), Reserve()) == 50
    with pytest.raises(EngineError, match="no memory is left for the KV pool"):
        pages(model, context(200 * PAGE_BYTES, others=(0, 300)), Reserve())


def test_no_room_names_the_numbers_and_what_to_lower(model: str) -> None:
    reserve = Reserve(tables=10_000_000, passes=1_500_000_000, graphs=700_000_000, num_graphs=105)
    with pytest.raises(EngineError) as caught:
        pages(model, context(2_000_000_000), reserve)
    text = str(caught.value)
    for part in ("2.00 GB free", "100% may be used", "64 tokens 1.50 GB", "105 graphs 0.70 GB", "buffers 10.00 MB"):
        assert part in text
    for setting in ("max_prefill_tokens", "max_running_req", "cuda_graph_max_bs", "memory_ratio"):
        assert f"`{setting}`" in text
    with pytest.raises(EngineError) as caught:
        pages(model, context(1000), Reserve())
    assert "graph" not in str(caught.value) and "come first" not in str(caught.value)


def test_a_shortage_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    MemoryUse(Reserve(passes=2 * 10**9), pool=1, graphs=0, free=3 * 10**9).warn_if_short()
    assert not caplog.records
    MemoryUse(Reserve(passes=2 * 10**9), pool=1, graphs=0, free=10**9).warn_if_short()
    assert "1.00 GB of device memory are left, a pass may need 2.00 GB" in caplog.text


# On simulated GPUs.


def test_a_started_engine_leaves_what_its_passes_take(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with simulated_gpu(monkeypatch, total=TOTAL, graph_bytes=50_000) as meter:
        engine = Engine(config_of(model, cuda_graph_modes=("greedy", "random", "filtered")))
        use = engine.memory
        assert 10 < engine.num_pages < 8 * 512 // 16  # the memory was the limit
        assert meter.graphs == 9 and use.reserve.num_graphs == 9  # sizes 1, 2, 4 in three modes
        assert use.graphs is not None and use.free is not None
        assert 9 * 50_000 <= use.graphs <= use.reserve.graphs <= use.graphs + SLACK
        assert use.reserve.passes <= use.free <= use.reserve.passes + PAGE_BYTES + SLACK
        assert use.pool == (engine.num_pages + 1) * PAGE_BYTES == engine.kv_cache.num_bytes
        engine.shutdown()


def test_work_of_any_kind_stays_within_what_was_left(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with simulated_gpu(monkeypatch, total=TOTAL, graph_bytes=50_000) as meter:
        llm = LLM(model, **_settings(config_of(model)))
        meter.peak = meter.used
        llm.generate([[7] * 500, *[[i] * 5 for i in range(7)]], SamplingParams(max_tokens=4), progress=False)
        assert meter.peak <= meter.total
        llm.shutdown()


def _settings(config: EngineConfig) -> dict[str, Any]:
    """As LLM takes them."""
    given = {field.name: getattr(config, field.name) for field in fields(config)}
    return {name: value for name, value in given.items() if name not in ("model_path", "tp_info")}


def test_the_pool_shrinks_by_what_graphs_take(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def num_pages(graph_bytes: int) -> int:
        with simulated_gpu(monkeypatch, total=TOTAL, graph_bytes=graph_bytes):
            engine = Engine(config_of(model))
            engine.shutdown()
            return engine.num_pages

    cheap, dear = num_pages(0), num_pages(PAGE_BYTES * 10)
    assert cheap - dear == 3 * 10


def test_a_device_too_small_for_a_pass_says_so(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3 GiB.\nDetails follow.")

    with simulated_gpu(monkeypatch, total=TOTAL) as meter:
        monkeypatch.setattr("minisgl_core.engine.step.Stepper.step", no_memory)
        with pytest.raises(EngineError, match=r"a pass of 64 tokens or graphs of 4 rows need more than the 7\.80 MB"):
            Engine(config_of(model))
        gc.collect()
        assert meter.used == 0 and meter.events == ["platform"]


def test_a_given_pool_is_not_profiled(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with simulated_gpu(monkeypatch, total=TOTAL) as meter:
        engine = Engine(config_of(model, num_page_override=5, cuda_graph_max_bs=1))
        assert engine.num_pages == 5 and engine.memory.reserve == Reserve() and meter.graphs == 1
        engine.shutdown()


# The end.


def test_everything_is_given_back_although_the_llm_is_kept(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with simulated_gpu(monkeypatch, total=TOTAL, graph_bytes=1000) as meter:
        for _ in range(2):
            llm = LLM(model, **_settings(config_of(model)))
            answer = llm.generate([[1, 2, 3]], SamplingParams(max_tokens=3), progress=False)
            assert answer[0]["finish_reason"] and meter.used > TOTAL // 2
            llm.shutdown()
            gc.collect()
            assert (meter.used, meter.graphs, meter.events[-1]) == (0, 0, "platform")


def test_graphs_go_before_backends(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with simulated_gpu(monkeypatch, total=TOTAL) as meter:
        for cls in (AttentionDispatcher, PagedKVPool, TorchDistCommunicator):
            _announce(monkeypatch, cls, meter)
        engine = Engine(config_of(model))
        meter.events.clear()  # of memory profiling
        engine.shutdown()
        assert meter.events == ["graph"] * 3 + [
            "PagedKVPool",
            "AttentionDispatcher",
            "TorchDistCommunicator",
            "platform",
        ]


def _announce(monkeypatch: pytest.MonkeyPatch, cls: Any, meter: Meter) -> None:
    close: Callable[[Any], None] = cls.close

    def closing(self: Any) -> None:
        meter.events.append(cls.__name__)
        close(self)

    monkeypatch.setattr(cls, "close", closing)


def test_an_output_that_is_kept_keeps_its_graphs_memory(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with simulated_gpu(monkeypatch, total=TOTAL) as meter:
        engine = Engine(config_of(model, num_page_override=5, cuda_graph_max_bs=1))
        batch = engine.stepper.make_capture_batch(1, "greedy")
        batch.reqs = []
        engine.stepper.prepare_replay = lambda batch: None  # type: ignore[method-assign]
        out = engine.graph_runner.replay(batch)
        want = out.logits.clone()
        engine.shutdown()
        assert meter.graphs == 1 and torch.equal(out.logits, want)
        del out
        assert meter.graphs == 0


@pytest.mark.parametrize("at", ["capture", "attention", "kv_pool", "weights"])
def test_a_start_that_fails_gives_everything_back(model: str, monkeypatch: pytest.MonkeyPatch, at: str) -> None:
    def fail(*_: object, **__: object) -> None:
        if at == "attention":
            raise CannotRun(Reason("test", "test", "this", "that"))
        raise RuntimeError("it broke")

    target = {
        "capture": "minisgl_cuda.graph.CudaGraphRunner.capture",
        "attention": "minisgl_core.engine.backend_factory.BackendFactory.build_attention",
        "kv_pool": "minisgl_core.engine.device_context.DecodeState",
        "weights": "minisgl_core.engine.engine.Engine._load_weights",
    }[at]
    with simulated_gpu(monkeypatch, total=TOTAL) as meter:
        config = config_of(model)
        broken = pytest.MonkeyPatch()
        broken.setattr(target, fail)
        with pytest.raises((RuntimeError, CannotRun)) as caught:
            Engine(config)
        del caught
        gc.collect()
        assert meter.used == 0 and meter.events == ["platform"]
        broken.undo()
        Engine(config).shutdown()  # and the next one starts
        gc.collect()
        assert meter.used == 0


def test_what_cannot_be_closed_does_not_keep_the_rest(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with simulated_gpu(monkeypatch, total=TOTAL) as meter:

        def broken(self: object) -> None:
            raise RuntimeError("cannot close")

        monkeypatch.setattr(AttentionDispatcher, "close", broken)
        engine = Engine(config_of(model, num_page_override=5))
        with pytest.raises(RuntimeError, match="cannot close"):
            engine.shutdown()
        gc.collect()
        assert meter.events[-1] == "platform" and meter.graphs == 0
        engine.shutdown()


@pytest.mark.parametrize(
    ("sizes", "chosen"),
    [((1,), (1,)), ((1, 2, 4), (1, 2, 4)), (tuple(range(1, 10)), (1, 3, 5, 7, 9)), ((), ())],
)
def test_profiled_sizes_are_spread(sizes: tuple[int, ...], chosen: tuple[int, ...]) -> None:
    assert spread(sizes, 5) == chosen
