"""On a GPU: what was set aside is what graphs and passes take, and the end gives everything back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from minisgl_core.bench.model_folder import write_geometry
from minisgl_core.core import SamplingParams
from minisgl_core.llm import LLM
from minisgl_core.modelconfig.geometries import geometry

pytestmark = pytest.mark.gpu

MIB = 1 << 20
SAMPLED = SamplingParams(max_tokens=24, temperature=0.8, top_k=20, ignore_eos=True)
PROMPTS = [[(7 * i + row) % 5000 for i in range(40 + row)] for row in range(5)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_geometry(geometry("smollm2-135m"), tmp_path_factory.mktemp("smollm2"))


@pytest.fixture
def free() -> int:
    """Device memory before a test, once the context and the libraries have taken theirs."""
    torch.ones(64, 64, device="cuda") @ torch.ones(64, 64, device="cuda")
    return _free()


def _free() -> int:
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


def start(model: Path, **more: Any) -> LLM:
    settings = {"max_running_req": 32, "max_seq_len_override": 1024, "memory_ratio": 0.5, **more}
    return LLM(model, device="cuda", dummy_weights=True, progress=False, **settings)


def test_graphs_and_passes_take_what_was_set_aside(model: Path) -> None:
    with start(model) as llm:
        use = llm.engine.memory
        assert use.graphs is not None and use.free is not None
        assert use.graphs <= use.reserve.graphs + 64 * MIB, use
        assert use.reserve.graphs <= 2 * use.graphs + 64 * MIB, use
        before = _free()
        llm.generate([[5] * 1000] * 32, SAMPLED, progress=False)
        torch.cuda.synchronize()
        assert before - torch.cuda.mem_get_info()[0] <= use.reserve.passes + 64 * MIB, use


def test_two_engines_one_after_the_other_leave_nothing(model: Path, free: int) -> None:
    left = []
    for _ in range(3):
        llm = start(model)
        llm.generate(PROMPTS, SAMPLED, progress=False)
        llm.shutdown()
        left.append(_free())
        del llm
    assert free - left[0] < 256 * MIB  # kernels that were loaded stay loaded
    assert left[0] - left[2] < 8 * MIB, left


def test_a_start_that_finds_no_memory_gives_back_what_it_took(model: Path, free: int) -> None:
    with pytest.raises(Exception, match="lower `max_prefill_tokens`"):
        start(model, memory_ratio=1e-4)
    assert free - _free() < 256 * MIB
