"""A second executor may be right, wrong, or raise: what is served stays the same, and the report says what it was."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from minisgl_core.capsule.format import load_capsule
from minisgl_core.capsule.moe.capsule import MoECapsule
from minisgl_core.capsule.replay import check_capsule
from minisgl_core.core import SamplingParams
from minisgl_core.llm import LLM
from minisgl_core.registry import Choice
from support.settings import PAGED

PROMPTS = [[5, 6, 7, 8, 9], [10, 11, 12]]
PARAMS = SamplingParams(max_tokens=4, ignore_eos=True)
SETTINGS: dict[str, Any] = {
    **PAGED,
    "cuda_graph_max_bs": 0,
    "backends": {"attention": "torch", "moe": "torch", "graph": ["emulated", "eager"]},
}
RECORD: dict[str, Any] = {"record_role": "moe", "record_steps": "0,2"}


pytestmark = pytest.mark.usefixtures("own_cache")


def answer(path: Path, **settings: Any) -> tuple[list[list[int]], Any]:
    """The tokens, and the shadow's report."""
    with LLM(path, **{**SETTINGS, **settings}) as llm:
        tokens = [item["token_ids"] for item in llm.generate(PROMPTS, PARAMS, progress=False)]
    return tokens, llm.shadow_report


@pytest.fixture(scope="module")
def served(tiny: Callable[[str], Path]) -> list[list[int]]:
    """The answers of an unobserved engine."""
    return answer(tiny("moe"))[0]


def moe_capsule(path: Path) -> MoECapsule:
    capsule = load_capsule(path)
    assert isinstance(capsule, MoECapsule)
    return capsule


@pytest.fixture
def candidate(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[..., Any]], type]:
    """``candidate(spoil)``: the shadow is ``moe:torch``, its results go through ``spoil(out, layer, ids, weights)``."""
    from minisgl_cpu_sim.pure.moe import TorchMoE

    def use(spoil: Callable[..., Any], **facts: Any) -> type:
        class Candidate(TorchMoE):
            def forward(self, x: Any, topk_ids: Any, topk_weights: Any, weights: Any, layer_id: int) -> Any:
                out = super().forward(x, topk_ids, topk_weights, weights, layer_id)
                return spoil(out, layer_id, topk_ids, weights)

        module = ModuleType("moe_shadow_candidate")
        module.Candidate = Candidate  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, module.__name__, module)
        choice = Choice("moe", "new", "", "new-dist", "1", "moe_shadow_candidate:Candidate", **facts)
        monkeypatch.setattr("minisgl_core.capsule.candidate.alternate_choice", lambda *_: (choice, ()))
        return Candidate

    return use


def test_a_right_candidate_is_compared_on_every_nth_step(tiny: Callable[[str], Path], served: Any) -> None:
    tokens, report = answer(tiny("moe"), shadow={"moe": "cpu", "every": 2})
    assert tokens == served
    assert (report.backend, report.every, report.steps, report.layers) == ("cpu@minisgl-cpu-sim", 2, 2, 4)
    assert report.divergence is None and report.disabled == "" and 0 < report.worst_error < 1e-5


def test_the_first_divergence_names_step_layer_request_and_experts_and_leaves_a_capsule(
    tiny: Callable[[str], Path], served: Any, candidate: Any, tmp_path: Path
) -> None:
    def wrong(out: torch.Tensor, layer: int, ids: torch.Tensor, weights: Any) -> torch.Tensor:
        if len(out) == 2 and layer == 0:
            out[1, 17] += 0.5
        return out

    candidate(wrong)
    tokens, report = answer(tiny("moe"), shadow={"moe": "new"})
    assert tokens == served
    found = report.divergence
    assert (found.step, found.phase, found.layer, found.uid, found.row, found.head) == (1, "decode", 0, 1, 1, None)
    assert found.candidate_error > 0.05 > 1e-5 > found.serving_error and found.tolerance == 1e-4
    path = tmp_path / "cache" / "capsules" / "shadow-step-000001-decode-layer-0.safetensors"
    assert found.capsule == str(path)
    capsule = moe_capsule(path)
    assert list(found.experts) == capsule.layers[0].original_ids()[1].tolist() and len(found.experts) == 4
    assert f"request 1, row 1, new token 0, column 17 of experts {found.experts[0]}, " in report.disabled
    check_capsule(path, "moe:cpu", device="cpu")
    json.dumps(report.to_json())


def raises(*_: Any) -> Any:
    raise RuntimeError("no such kernel")


def spoils_its_weights(out: torch.Tensor, layer: int, ids: torch.Tensor, weights: Any) -> torch.Tensor:
    for tensor in (*weights, ids):
        tensor.zero_()
    return out


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (raises, "step 0 (prefill), layer 0: forward raised RuntimeError: no such kernel"),
        (lambda out, *_: torch.full_like(out, torch.nan), "it diverged at step 0 (prefill), layer 0, request 0"),
        (lambda out, *_: out[:1], "it returned a float32 tensor of shape (1, 128), expected a float32"),
        (lambda *_: None, "it returned a NoneType, expected"),
        (spoils_its_weights, "it diverged at step 1 (decode), layer 0"),
    ],
)
def test_whatever_the_candidate_does_the_answers_stay(
    tiny: Callable[[str], Path], served: Any, candidate: Any, spoil: Any, why: str
) -> None:
    candidate(spoil)
    tokens, report = answer(tiny("moe"), shadow={"moe": "new"})
    assert tokens == served and why in report.disabled


def test_a_lossy_candidate_is_compared_with_the_tolerance_that_it_states(
    tiny: Callable[[str], Path], candidate: Any
) -> None:
    """Each product may lose 5 % of the sum of its terms' sizes: more than 3 % of the result, less than 99 times it."""
    for factor, stated, right in ((1.03, 0.05, True), (1.03, 0.0, False), (100.0, 0.05, False)):
        candidate(lambda out, *_, factor=factor: out * factor, tolerance=stated)
        _, report = answer(tiny("moe"), shadow={"moe": "new"})
        assert (report.divergence is None) == right, (factor, stated, report.disabled)


def test_a_candidate_that_cannot_prepare_is_disabled(tiny: Callable[[str], Path], served: Any, candidate: Any) -> None:
    candidate(lambda out, *_: out).prepare_weights = raises
    tokens, report = answer(tiny("moe"), shadow={"moe": "new"})
    assert tokens == served
    assert (report.disabled, report.steps) == ("prepare_weights raised RuntimeError: no such kernel", 0)


def test_one_role_is_recorded_while_another_is_compared(
    tiny: Callable[[str], Path], served: Any, tmp_path: Path
) -> None:
    folder = tmp_path / "steps"
    tokens, report = answer(tiny("moe"), record=str(folder), shadow={"attention": "cpu"}, **RECORD)
    assert tokens == served and (report.steps, report.disabled) == (4, "")
    assert moe_capsule(folder / "step-000002-decode.safetensors").phase == "decode"
