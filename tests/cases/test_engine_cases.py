"""Cases of the engine: driven by hand, pages that may hold NaN, captured operations, stored weights, pauses."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from driver import Driver, greedy

from minisgl_core.builtin.ops import ComposedOps
from minisgl_core.core import Batch, Req, SamplingParams
from minisgl_core.distributed import DistributedInfo
from minisgl_core.engine import Engine, EngineConfig
from minisgl_core.errors import ConfigError

Fields = Callable[[Engine, Batch, int, int], None]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run_outline(folder: Path, prompt: list[int], N: int, fields: Fields, graphs: int, **more: Any) -> list[int]:
    """The outline by hand, one line after the other; ``fields`` sets the Batch's inputs."""
    ids = torch.tensor(prompt, dtype=torch.int32)
    P, rank, size = free_port(), 0, 1
    engine = Engine(EngineConfig(model_path=str(folder), tp_info=DistributedInfo(rank, size), dtype=torch.float32,
                    max_running_req=2, num_page_override=256, max_seq_len_override=128, distributed_port=P,
                    device="cpu", page_size=1, cuda_graph_max_bs=graphs, progress=False, **more))  # fmt: skip
    try:
        engine.page_table[0, :128] = torch.arange(128)
        req = Req(input_ids=ids, table_idx=0, cached_len=0, output_len=N, uid=0,
                  sampling_params=SamplingParams(max_tokens=N), cache_handle=None)  # fmt: skip
        for step in range(N):
            batch = Batch(reqs=[req], phase="decode" if step else "prefill")
            engine.graph_runner.pad_batch(batch)
            fields(engine, batch, req.cached_len, req.device_len)
            engine.attn_backend.prepare_metadata(batch)
            out = engine.forward_batch(batch, engine.sampler.prepare(batch))
            req.append_host(out.next_tokens_cpu[:1])
        return req.input_ids[len(prompt) :].tolist()
    finally:
        engine.shutdown()


def as_in_the_outline(engine: Engine, batch: Batch, a: int, b: int) -> None:
    batch.positions = torch.arange(a, b, dtype=torch.int32)
    batch.input_ids = batch.reqs[0].input_ids[a:b]
    batch.out_loc = engine.page_table[0, a:b]


def views_of_device_state(engine: Engine, batch: Batch, a: int, b: int) -> None:
    """Every field is a view of a tensor that the engine itself writes."""
    if b - a == 1:
        batch.positions, batch.input_ids = engine.state.lengths[:1], engine.state.last_token[:1]
    else:
        engine.page_table[1, :128] = engine.page_table[0, :128]
        batch.positions = engine.page_table[1, a:b]  # slot i is i
    engine.page_table[0, :] = engine.page_table[0, :]
    batch.out_loc = engine.page_table[0, a:b]


def overlapping_views(engine: Engine, batch: Batch, a: int, b: int) -> None:
    """Positions and slots are one and the same memory, as slot i is i here; and longer than the pass."""
    batch.positions = batch.out_loc = engine.page_table[0, a : b + 1]


@pytest.mark.parametrize("graphs", [0, 2], ids=["eager", "graphs"])
@pytest.mark.parametrize("fields", [as_in_the_outline, views_of_device_state, overlapping_views])
def test_case_101_the_outline_by_hand(fields: Fields, graphs: int, small: Path, answers: Callable[[str], Any]) -> None:
    if graphs:
        pytest.importorskip("minisgl_cpu_sim")
    reference = answers("mistral-full")
    prompt, expected = reference.prompts[1], reference.continuations[1]
    options = {"backend_options": {"graph:emulated": {"strict": True}}} if graphs else {}
    assert run_outline(small, prompt, len(expected), fields, graphs, **options) == expected


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_case_101_views_hold_what_they_held_when_the_batch_was_prepared(phase: str, small: Path) -> None:
    """Between the preparation and the pass the caller goes on to write the tensors whose views it gave."""

    def logits(disturb: bool) -> torch.Tensor:
        def change(engine: Engine, batch: Batch, a: int, b: int) -> None:
            as_in_the_outline(engine, batch, a, b)
            if disturb and batch.phase == phase:
                inputs = torch.stack([batch.positions, batch.input_ids, batch.out_loc])
                batch.positions, batch.input_ids, batch.out_loc = inputs
                prepare = engine.attn_backend.prepare_metadata

                def prepare_then_overwrite(prepared: Batch) -> None:
                    prepare(prepared)
                    inputs.fill_(0)

                engine.attn_backend.prepare_metadata = prepare_then_overwrite  # type: ignore[method-assign]

        return torch.tensor(run_outline(small, list(range(3, 20)), 4, change, 0))

    assert torch.equal(logits(True), logits(False))


@pytest.mark.parametrize("name", ["positions", "input_ids", "out_loc"])
@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_case_101_a_field_of_too_few_tokens_is_named(phase: str, name: str, small: Path) -> None:
    def too_short(engine: Engine, batch: Batch, a: int, b: int) -> None:
        as_in_the_outline(engine, batch, a, b)
        if batch.phase == phase:
            setattr(batch, name, getattr(batch, name)[:0])

    with pytest.raises(ConfigError, match=f"Batch.{name}"):
        run_outline(small, [5, 6, 7], 2, too_short, 0)


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_case_101_slots_set_by_hand_are_where_attention_looks(
    phase: str, small: Path, answers: Callable[[str], Any]
) -> None:
    """``out_loc`` names slots that the page table did not: this pass and later ones find the keys there."""
    reference = answers("mistral-full")
    prompt, expected = reference.prompts[0], reference.continuations[0]

    def elsewhere(engine: Engine, batch: Batch, a: int, b: int) -> None:
        batch.out_loc = engine.page_table[0, a:b] + (100 if batch.phase == phase else 0)

    assert run_outline(small, prompt, len(expected), elsewhere, 0) == expected


# ---- 106: operations of other authors in strict graphs --------------------------------------------------------------


@pytest.mark.parametrize("device_types", [None, "cpu"])
def test_case_106_a_strict_engine_captures_a_custom_op(
    device_types: str | None, small: Path, answers: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("minisgl_cpu_sim")
    op = torch.library.custom_op(
        f"engine_cases::act_for_{device_types}", _silu_and_mul, mutates_args=(), device_types=device_types
    )
    monkeypatch.setattr(ComposedOps, "act_and_mul", lambda self, x: op(x))
    reference = answers("mistral-full")
    settings = {"backends": {"ops": "composed"}, "backend_options": {"graph:emulated": {"strict": True}}}
    with Driver(small, cuda_graph_max_bs=2, **settings) as driver:
        assert driver.tokens(reference.prompts[:1], greedy(6)) == [reference.continuations[0][:6]]
        assert driver.replays


def _silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up
