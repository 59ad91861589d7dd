"""What could never fit is refused before it is allocated, and the setting at fault is named."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from minisgl_core.bench.model_folder import write_geometry
from minisgl_core.distributed import DistributedInfo
from minisgl_core.engine import Engine, EngineConfig
from minisgl_core.engine.capacity import check_pool, check_tables, check_weights, explain_shortage
from minisgl_core.errors import EngineError
from minisgl_core.layers.base import Layer, OpList
from minisgl_core.llm import LLM
from minisgl_core.modelconfig import num_parameters
from minisgl_core.modelconfig.geometries import geometry
from minisgl_core.models import DecoderForCausalLM
from support.driver import make_engine
from support.simulated_gpu import simulated_gpu

GB = 10**9


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


# What a model takes.


def tensors(layer: Layer) -> Iterator[torch.Tensor]:
    """All that a layer and those below it hold, shared ones as often as they are met."""
    for name, value in vars(layer).items():
        if isinstance(value, torch.Tensor) and name != "_cos_sin":
            yield value
        elif isinstance(value, Layer):
            yield from tensors(value)
    if isinstance(layer, OpList):
        for one in layer.op_list:
            yield from tensors(one)


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("s93", (1,)),
        ("q25", (1, 2)),
        ("q3", (1, 8)),
        ("q3-untied", (1,)),
        ("q3-8q1kv", (2, 4)),
        ("moe", (1, 2)),
        ("moe2", (1, 2)),
        ("moe-mixed", (1, 2)),
        ("llama-bias", (1, 2)),
    ],
)
def test_parameters_are_counted_as_they_are_allocated(
    name: str, sizes: tuple[int, ...], tiny: Callable[[str], Path]
) -> None:
    engine = make_engine(tiny(name), rows=1)
    for size in sizes:
        model = DecoderForCausalLM(replace(engine.ctx, tp=DistributedInfo(0, size)))
        held = {tensor.data_ptr(): tensor.numel() for tensor in tensors(model)}
        assert num_parameters(engine.model_config, size) == sum(held.values()), size
    engine.shutdown()


def test_parameters_of_a_model_that_people_know() -> None:
    assert num_parameters(geometry("llama3-8b")) == num_parameters(geometry("llama-3.1-8b")) == 8_030_261_248
    assert num_parameters(geometry("qwen2.5-7b")) == 7_615_616_512
    assert num_parameters(geometry("qwen3-4b")) == 4_022_468_096
    assert num_parameters(geometry("qwen3-0.6b")) == 596_049_920
    assert num_parameters(geometry("qwen3-30b-a3b")) == 30_532_122_624


# By hand.


def context(total: int, tp_size: int = 1, gpu: bool = False, free: int = 0, **changes: Any) -> Any:
    platform = SimpleNamespace(total_bytes=lambda: total, free_bytes=lambda: free)
    if gpu:
        platform.peak_bytes = lambda work: 0
    config = replace(geometry("tiny"), **changes)
    return SimpleNamespace(
        config=config,
        dtype=torch.float32,
        device=torch.device("cuda" if gpu else "cpu"),
        tp=DistributedInfo(0, tp_size),
        platform=platform,
        max_seq_len=config.max_position_embeddings,
    )


def test_weights_of_all_ranks_share_a_cpu() -> None:
    ctx = context(0, hidden_size=4096)
    one = 4 * num_parameters(ctx.config)
    check_weights(context(one, hidden_size=4096))
    with pytest.raises(EngineError, match=r"the weights need .* in float32, the device has .*; choose a smaller model"):
        check_weights(context(one - 1, hidden_size=4096))
    half = 4 * num_parameters(ctx.config, 2)
    assert one // 2 < half < one
    check_weights(context(2 * half, tp_size=2, hidden_size=4096))
    with pytest.raises(EngineError, match=r"the weights need .* on each of 2 ranks in float32"):
        check_weights(context(2 * half - 1, tp_size=2, hidden_size=4096))


def test_a_gpu_counts_what_is_free_and_advice_is_given_where_it_helps() -> None:
    needed = 4 * num_parameters(geometry("tiny"), 2)
    check_weights(context(100 * GB, tp_size=2, gpu=True, free=needed))
    with pytest.raises(EngineError, match=r"the device has .* free; .* or the `dtype` bfloat16, or .* `tp_size`$"):
        check_weights(context(100 * GB, tp_size=2, gpu=True, free=needed - 1))
    with pytest.raises(EngineError) as caught:
        check_weights(context(100 * GB, tp_size=2, gpu=True, free=needed // 2 - 1))
    assert "bfloat16" not in str(caught.value)


@pytest.mark.parametrize(
    ("given", "model", "culprit"),
    [
        ({"max_running_req": 10**9}, {}, "max_running_req"),
        ({"max_running_req": 10**9, "max_seq_len_override": 4096}, {}, "max_running_req"),
        ({"max_prefill_tokens": 10**10}, {}, "max_prefill_tokens"),
        ({"page_size": 10**9}, {}, "page_size"),
        ({"max_seq_len_override": 10**9}, {}, "max_seq_len_override"),
        ({"max_seq_len_override": 10**9, "max_running_req": 10**9}, {}, "max_running_req"),
        ({"max_running_req": 4}, {"max_position_embeddings": 10**9}, "max_position_embeddings"),
        ({}, {"rope": replace(geometry("tiny").rope, rotary_dim=10**8)}, "head_dim"),
    ],
)
def test_tables_name_the_setting_that_is_too_large(given: dict[str, Any], model: dict[str, Any], culprit: str) -> None:
    config, ctx = EngineConfig("model", **given), context(64 * GB, **model)
    ctx.max_seq_len = config.max_seq_len_override or ctx.max_seq_len
    page_size = 1 if config.page_size == "auto" else config.page_size
    with pytest.raises(
        EngineError, match=rf"^`{culprit}` 10+ needs [\d.]+ GB for the page table, .* has 64.0 GB; "
    ) as caught:
        check_tables(config, ctx, page_size)
    assert caught.value.field == culprit
    if culprit == "max_position_embeddings":
        assert caught.value.remedy == "give a smaller `max_seq_len_override`"


def test_tables_that_fit_pass_and_a_long_context_is_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    check_tables(EngineConfig("model"), context(GB), 16)
    assert not caplog.records
    ctx = context(GB)
    ctx.max_seq_len = 5000
    with caplog.at_level(logging.WARNING):
        check_tables(EngineConfig("model", max_seq_len_override=5000), ctx, 16)
    assert "max_seq_len_override 5000 is beyond the 4096 tokens the model knows" in caplog.text


def test_places_and_slots_beyond_int32_are_refused_however_large_the_memory() -> None:
    ctx = context(10**6 * GB, max_position_embeddings=2**20)
    check_tables(EngineConfig("model", max_running_req=2047), ctx, 16)
    with pytest.raises(EngineError, match=r"`max_running_req` is 2048 and .* 1048576 places: .*; give at most 2047$"):
        check_tables(EngineConfig("model", max_running_req=2048), ctx, 16)
    check_pool(2**27 - 1, ctx, 16, 2, torch.float32)
    with pytest.raises(EngineError, match=r"`num_page_override` is .* 16 slots: .*; give at most 134217727$"):
        check_pool(2**27, ctx, 16, 2, torch.float32)


def test_the_pool_names_pages_or_their_size() -> None:
    check_pool(1000, context(GB), 16, 2, torch.float32)
    for pages, page_size, culprit in ((10**9, 16, "num_page_override"), (64, 10**9, "page_size")):
        with pytest.raises(EngineError, match=rf"`{culprit}` 1000000000 needs .* GB for the KV pool"):
            check_pool(pages, context(GB), page_size, 2, torch.float32)


def test_an_allocators_complaint_is_put_into_words() -> None:
    ctx = context(0, free=3 * GB)
    with (
        pytest.raises(EngineError, match=r"the weights do not fit, with 3.00 GB free .*can't allocate memory"),
        explain_shortage(ctx),
    ):
        torch.empty(1 << 50)
    with pytest.raises(EngineError, match=r"the weights do not fit, .*: CUDA out of memory"), explain_shortage(ctx):
        raise torch.OutOfMemoryError("CUDA out of memory")
    with pytest.raises(EngineError, match=r"the weights do not fit, .*: out of memory"), explain_shortage(ctx):
        raise MemoryError
    with pytest.raises(RuntimeError, match=r"^another$"), explain_shortage(ctx):
        raise RuntimeError("another")


# Whole engines.


@pytest.mark.parametrize("change", [{"hidden_size": 10**9}, {"vocab_size": 10**12}, {"intermediate_size": 10**12}])
def test_a_model_beyond_the_machine_is_refused_by_its_config(change: dict[str, int], tmp_path: Path) -> None:
    folder = write_geometry(geometry("tiny"), tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(EngineError, match=r"the weights need \d+\.\d\d GB in float32, the device has \d+\.\d\d GB"):
        LLM(folder, device="cpu", progress=False)  # there are no weights: nothing looked for them


def test_a_model_beyond_what_a_gpu_has_left_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_geometry(geometry("tiny"), tmp_path)
    with simulated_gpu(monkeypatch, total=300_000) as meter:
        with pytest.raises(EngineError, match=r"the weights need 0.53 MB in float32, the device has 0.30 MB free"):
            Engine(EngineConfig(str(folder), device="cpu", dummy_weights=True, progress=False))
        assert meter.used == 0 and meter.events == ["platform"]
