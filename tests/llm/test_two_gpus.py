"""Tensor parallelism over two real GPUs: the answers of one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from minisgl_core.core import SamplingParams
from minisgl_core.llm import LLM

PROMPTS = [[5, 17, 42, 7, 99], [3, 8], [11] * 40]
EXACT = {"attention": "torch", "kv": "torch", "linear": "plain", "ops": "composed"}
"""float32: only the order of the all-reduce's sums differs between one rank and two."""


def answers(path: Path, tp_size: int, device: str) -> list[list[int]]:
    params = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)
    settings: dict[str, Any] = {"device": device, "max_running_req": 4, "num_page_override": 512, "progress": False}
    with LLM(path, torch.float32, tp_size, backends=EXACT, **settings) as llm:
        return [answer["token_ids"] for answer in llm.generate(PROMPTS, params, progress=False)]


@pytest.mark.multi_gpu
def test_two_gpus_answer_as_one(tiny: Callable[[str], Path]) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("this machine has fewer than two GPUs")
    assert answers(tiny("q3"), 2, "cuda") == answers(tiny("q3"), 1, "cuda")
