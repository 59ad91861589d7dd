"""What penalties, biases and log-probabilities take of a simulated GPU that counts every byte."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from minisgl_core.bench.model_folder import write_geometry
from minisgl_core.builtin.ops import ComposedOps
from minisgl_core.core import Batch, Req, SamplingParams
from minisgl_core.engine import Engine, EngineConfig, logits_processors
from minisgl_core.engine.memory_profile import worst_case_params
from minisgl_core.llm import LLM
from minisgl_core.modelconfig.geometries import geometry
from minisgl_core.plugin_api import SampleArgs
from support.simulated_gpu import simulated_gpu

VOCAB, ROW = 60_000, 4 * 60_000
"""Tokens, and bytes of a row of float32 logits"""
TOTAL = 30 << 20


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_geometry(replace(geometry("tiny"), vocab_size=VOCAB), tmp_path_factory.mktemp("wide")))


@pytest.fixture(autouse=True)
def frugal_sampling(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a fused kernel samples: it makes no other tensor of the logits' size, so that all the rest shows."""
    torch.set_num_threads(1)

    def sample(self: ComposedOps, logits: torch.Tensor, args: SampleArgs, mode: str) -> torch.Tensor:
        return logits.argmax(dim=-1).to(torch.int32)

    monkeypatch.setattr(ComposedOps, "sample", sample)


def settings(rows: int) -> dict[str, Any]:
    return {
        "dtype": torch.bfloat16,
        "device": "cpu",
        "max_running_req": rows,
        "max_seq_len_override": 256,
        "max_prefill_tokens": 64,
        "page_size": 16,
        "memory_ratio": 1.0,
        "dummy_weights": True,
        "progress": False,
        "backends": {"attention": "torch", "kv": "torch", "ops": "composed"},
    }


def taken_by_postprocessing(model: str, rows: int) -> int:
    """The most bytes that changing and reading the logits of this many rows takes at once, without these logits."""
    with pytest.MonkeyPatch.context() as patch, simulated_gpu(patch, total=10 * TOTAL) as meter:
        engine = Engine(EngineConfig(model, **settings(rows), num_page_override=8))
        params = worst_case_params(VOCAB)
        reqs = [Req(torch.arange(40, dtype=torch.int32), row, 30, 4, row, params) for row in range(rows)]
        batch = Batch(reqs=reqs, phase="decode", padded_size=rows, rows=torch.arange(rows, dtype=torch.int32))
        batch.mode = engine.sampler.prepare(batch)
        logits, tokens = torch.randn(rows, VOCAB).bfloat16(), torch.zeros(rows, dtype=torch.int32)
        before = meter.peak = meter.used
        with torch.inference_mode():
            engine.stepper.postprocess_logits(logits, tokens, batch)
        taken = meter.peak - before
        engine.shutdown()
    return taken


def test_what_is_taken_does_not_grow_with_the_rows(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logits_processors, "PART_BYTES", 4 * ROW)
    few, many = taken_by_postprocessing(model, 4), taken_by_postprocessing(model, 64)
    assert 4 * ROW <= few <= many < few + ROW
    assert many < 4 * logits_processors.PART_BYTES < 64 * ROW // 2, "less than half of one copy of the whole"


def test_the_pool_leaves_room_for_whatever_is_asked_of_logits(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with simulated_gpu(monkeypatch, total=TOTAL) as meter:
        llm = LLM(model, **settings(rows=32))
        useful = 32 * 256 // 16
        assert 8 < llm.engine.num_pages < useful, "the memory was the limit"
        meter.peak = meter.used
        everything = replace(worst_case_params(VOCAB), max_tokens=3, grammar=None)
        answers = llm.generate([[7] * 5 for _ in range(32)], everything, progress=False)
        assert {len(answer["logprobs"]) for answer in answers} == {3}
        assert meter.used < meter.peak <= meter.total
        llm.generate([[7] * 5 for _ in range(32)], SamplingParams(max_tokens=3), progress=False)
        assert meter.peak <= meter.total
        llm.shutdown()
