"""Engines for checks: small pools, no progress bars, and plans that must name this device's backends."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch

from minisgl_core.core import SamplingParams
from minisgl_core.env import ENV
from minisgl_core.llm import LLM
from minisgl_core.registry import Plan

from .check import Context, expect

__all__ = ["answers", "overlap_set", "serve", "settings_for"]

GRAPHS: Final = {"cuda": 16, "cpu": 2}
"""Largest batch size of captured steps; an emulated graph takes longer to make."""
GPU_CHOICES: Final = {"kv": "cuda", "graph": "cuda", "moe": "fused"}


def settings_for(context: Context, *, pool_tokens: int = 4096, **settings: Any) -> dict[str, Any]:
    """Settings of an engine with a fixed pool: several engines share a GPU, so none may take all free memory."""
    page_size = settings.setdefault("page_size", 16)
    defaults = {
        "device": context.kind,
        "max_running_req": 64,
        "max_seq_len_override": 1024,
        "num_page_override": -(-pool_tokens // page_size),
        "cuda_graph_max_bs": GRAPHS[context.kind],
        "progress": False,
        "calibrated": False,  # the plan of a check must not depend on what was measured here before
        "backends": {"attention": "torch"},
    }
    return {**defaults, **settings}


@contextmanager
def overlap_set(on: bool) -> Iterator[None]:
    """Engines made inside run with overlap scheduling, or without."""
    switch = ENV.DISABLE_OVERLAP_SCHEDULING
    before = switch.value
    switch.value = not on
    try:
        yield
    finally:
        switch.value = before


@contextmanager
def serve(
    context: Context, model: Path, *, dtype: str = "float32", overlap: bool = True, **settings: Any
) -> Iterator[LLM]:
    """An LLM with attention:torch unless ``backends`` says otherwise; every other role as ``auto`` chooses, which on a
    GPU must be our kernels. float32 products are exact: no TF32.
    """
    torch.set_float32_matmul_precision("highest")
    with overlap_set(overlap):
        llm = LLM(model, dtype=dtype, **settings_for(context, **settings))
    try:
        if context.kind == "cuda":
            _require_gpu_backends(llm.plan, settings.get("backends", {}))
        yield llm
    finally:
        llm.shutdown()


def _require_gpu_backends(plan: Plan, named: Any) -> None:
    for role, wanted in GPU_CHOICES.items():
        if role in named or (role == "graph" and not plan.graph):
            continue
        for choice in plan.choices(role):  # type: ignore[arg-type]  # a role by its name
            expect(choice.name == wanted, f"the plan has {role}={choice.label}, expected {wanted}")


def answers(
    llm: LLM, prompts: Sequence[Sequence[int]], params: SamplingParams | Sequence[SamplingParams]
) -> list[list[int]]:
    """The token ids of each answer; all prompts are served together."""
    return [answer["token_ids"] for answer in llm.generate(list(prompts), params, progress=False)]
