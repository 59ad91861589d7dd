"""Whole engines on moe:fused and ops:fused_route, their kernels in the interpreter: equal to transformers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from support.driver import make_engine, make_req
from support.make_checkpoints import ensure_checkpoint, reference

pytest.importorskip("triton", reason="the kernels need triton")

from minisgl_core.core import Batch
from minisgl_core.engine import EngineConfig
from minisgl_core.engine.plan_resolution import make_plan
from minisgl_core.modelconfig import read_model_config
from minisgl_core.registry import Plan
from minisgl_moe.executor import FusedMoE
from minisgl_moe.plugin import minisgl_layer_ops, minisgl_moe_executors

FUSED = {("moe", None): minisgl_moe_executors()[0], ("ops", "route"): minisgl_layer_ops()[0]}


def with_fused(path: Path) -> dict[str, Any]:
    """The plan that resolving gives on a CPU, its experts and routing replaced: the specs claim GPUs only."""
    config = EngineConfig(str(path), dtype=torch.float32, device="cpu", page_size=1)
    plan = make_plan(config, read_model_config(str(path)))
    buckets = []
    for bucket in plan.buckets:
        spec = FUSED.get((bucket.entry.role, bucket.entry.op))
        if spec is not None:
            names = {"name": spec.name, "factory": spec.factory, "distribution": "minisgl-moe"}
            ops = spec.caps[0].ops
            bucket = replace(
                bucket, choice=replace(bucket.choice, options_model=spec.options, ops=ops, variant="", **names)
            )
        buckets.append(bucket)
    changed: Plan = replace(plan, buckets=tuple(buckets))
    return changed.to_json()


@pytest.mark.parametrize(("name", "prompt", "steps"), [("moe", 1, 1), ("moe2", 0, 2)])
def test_case_74_logits_are_those_of_transformers(name: str, prompt: int, steps: int) -> None:
    """17 tokens go through sorted blocks, 5 and then one token pair by pair. moe2 adds shared experts and keeps the
    softmax as it is.
    """
    path, answer = ensure_checkpoint(name), reference(name)
    engine = make_engine(path, max_prefill_tokens=64, plan=with_fused(path))
    try:
        assert isinstance(engine.ctx.moe, FusedMoE)
        ids, expected = answer.prompts[prompt], torch.from_numpy(answer.logits[prompt])
        for step in range(steps):
            tokens = ids + answer.continuations[prompt][:step]
            req = make_req(tokens, row=0, cached_len=len(tokens) - 1 if step else 0)
            batch = Batch(reqs=[req], phase="decode" if step else "prefill")
            engine.graph_runner.pad_batch(batch)
            logits = engine.forward_batch(batch, engine.sampler.prepare(batch)).logits
            torch.testing.assert_close(logits[0].float(), expected[step], atol=1e-4, rtol=1e-4)
    finally:
        engine.shutdown()
