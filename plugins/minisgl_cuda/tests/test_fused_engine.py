"""A whole engine on this plugin's fused products and operations, in Triton's interpreter: torch's tokens."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="the skinny products need triton")
pytest.importorskip("minisgl_cpu_sim", reason="the other roles run on the CPU's stand-ins")
if torch.cuda.is_available():
    pytest.skip("the interpreter replaces the GPU", allow_module_level=True)

from minisgl_core.core import SamplingParams
from minisgl_core.engine import EngineConfig
from minisgl_core.engine.plan_resolution import make_plan
from minisgl_core.llm import LLM
from minisgl_core.modelconfig import read_model_config
from minisgl_core.plugin_api import FUSABLE_OPS, OP_NAMES
from minisgl_core.registry import Bucket, Plan
from minisgl_cuda.linear import FUSED_PARTS, SkinnyLinear
from minisgl_cuda.tiles import TileTable
from support.model_configs import write_tiny_config

HIDDEN, INNER, HEADS, KV_HEADS, DIM = 64, 96, 4, 2, 16
SHAPES = {"norm": ((HEADS + 2 * KV_HEADS) * DIM, HIDDEN), "act": (2 * INNER, HIDDEN), "norm+act": (2 * INNER, HIDDEN)}
PROMPTS = ([3, 1, 4, 1, 5, 9, 2, 6], [5, 3, 5])
SETTINGS: dict[str, Any] = {
    "dtype": torch.bfloat16,
    "device": "cpu",
    "dummy_weights": True,
    "max_running_req": 2,
    "num_page_override": 64,
    "max_seq_len_override": 32,
    "progress": False,
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A tiny Qwen3 without weights, with biases in attention."""
    return write_tiny_config(
        tmp_path,
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=DIM,
        attention_bias=True,
        vocab_size=48,
        torch_dtype="bfloat16",
    )


def ours(bucket: Bucket) -> Bucket:
    """Products and operations by this plugin's Triton kernels, whose caps speak of GPUs only."""
    choice = bucket.choice
    if bucket.entry.role == "linear":
        choice = replace(choice, name="skinny", factory="minisgl_cuda.linear:SkinnyLinear", ops=FUSABLE_OPS)
    elif bucket.entry.role == "ops" and bucket.entry.op != "sample":
        operations = ("rms_norm", "add_rms_norm", "allreduce_add_rms_norm", "qk_norm_rope_store", "act_and_mul")
        choice = replace(choice, name="cuda", factory="minisgl_cuda.ops:CudaOps", ops=operations)
    else:
        return bucket
    return replace(bucket, choice=replace(choice, distribution="minisgl-cuda"))


def each_op(plan: Plan) -> Plan:
    """A plan entry for every operation, where the plan has one for several."""
    buckets = []
    for bucket in plan.buckets:
        whole = bucket.entry.role == "ops" and bucket.entry.op is None
        entries = [bucket.entry._replace(op=op) for op in OP_NAMES if op != "route"] if whole else [bucket.entry]
        buckets += [replace(bucket, entry=entry) for entry in entries]
    return replace(plan, buckets=tuple(buckets))


def logits_of(model: Path, plan: Plan) -> torch.Tensor:
    """Of every row of every step of two answers, the second alone in its last steps: (rows, vocabulary)."""
    seen: list[torch.Tensor] = []
    with LLM(str(model), plan=plan.to_json(), **SETTINGS) as llm:
        engine, draw = llm.engine, torch.Generator().manual_seed(6)  # no logits near enough to change a token
        for target in engine.model.weight_targets("", frozenset()):
            # Norm weights near 1, products that keep their input's size: every layer then matters to the logits.
            fan = target.storage.shape[-1]
            is_norm = "norm" in target.name
            target.storage.normal_(float(is_norm), 0.3 if is_norm else fan**-0.5, generator=draw)
        launch = engine.launch

        def listen(batch: Any, mode: Any) -> Any:
            out = launch(batch, mode)
            seen.append(out.logits.float().clone())
            return out

        engine.launch = listen  # type: ignore[method-assign]
        lengths = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (2, 4)]
        llm.generate([list(prompt) for prompt in PROMPTS], lengths, progress=False)
    return torch.cat(seen)


def test_the_same_logits(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One row is fused with norms, two rows with the activation, as in the shipped tables for other shapes."""
    tables = {
        form: TileTable({"x".join(map(str, SHAPES[part])): [(16, [16, 64, 4, 2])]})
        for form, part in FUSED_PARTS.items()
    }
    calls: dict[tuple[int, bool, bool], int] = {}
    inner = SkinnyLinear.forward_fused

    def count(self: Any, x: torch.Tensor, weights: Any, bias: Any, norm: Any, act: bool) -> Any:
        form = (x.shape[0], norm is not None, act)
        calls[form] = calls.get(form, 0) + 1
        return inner(self, x, weights, bias, norm, act)

    monkeypatch.setattr(SkinnyLinear, "forward_fused", count)
    backends = {"attention": "torch", "kv": "torch", "ops": "composed", "linear": "plain", "graph": "eager"}
    plan = make_plan(EngineConfig(str(model), backends=backends, **SETTINGS), read_model_config(str(model)))
    wanted = logits_of(model, plan)
    mine = replace(plan, buckets=tuple(map(ours, each_op(plan).buckets)))
    assert mine.fused(mine.choice("linear")) == set(FUSABLE_OPS)
    unfused = logits_of(model, mine)
    assert not calls, "nothing is measured for these shapes"

    real = SkinnyLinear.__init__

    def measured(self: Any, *arguments: Any) -> None:
        real(self, *arguments)
        self._fused = tables

    monkeypatch.setattr(SkinnyLinear, "__init__", measured)
    fused = logits_of(model, mine)
    assert {form for form in calls if form[0] == 1} >= {(1, True, False), (1, True, True)}
    assert {form for form in calls if form[0] == 2} == {(2, False, True)}
    span = wanted.amax() - wanted.amin()
    assert wanted.shape == fused.shape
    for got in (unfused, fused):
        assert float((got - wanted).abs().max() / span) < 3e-2
