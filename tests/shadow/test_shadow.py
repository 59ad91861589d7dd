"""A shadow may be right, wrong, or raise: what is served stays the same, and the report says what it was."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from minisgl_core.capsule.format import load_capsule
from minisgl_core.capsule.instrumentation import Instrumentation
from minisgl_core.capsule.replay import check_capsule
from minisgl_core.core import SamplingParams
from minisgl_core.errors import BackendError, ConfigError
from minisgl_core.llm import LLM
from minisgl_core.registry import Choice
from support.settings import PAGED

pytest.importorskip("minisgl_cpu_sim")

PROMPTS = [[5, 6, 7, 8, 9], [10, 11, 12]]
PARAMS = SamplingParams(max_tokens=5, ignore_eos=True)
SETTINGS: dict[str, Any] = {
    **PAGED,
    "backends": {"attention": "cpu"},
}


pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.fixture
def run(tiny: Callable[[str], Path]) -> Callable[..., tuple[list[list[int]], Any]]:
    """``run(**settings)`` -> the tokens and the report."""

    def run(**settings: Any) -> tuple[list[list[int]], Any]:
        with LLM(tiny("q3"), **{**SETTINGS, **settings}) as llm:
            tokens = [item["token_ids"] for item in llm.generate(PROMPTS, PARAMS, progress=False)]
        return tokens, llm.shadow_report

    return run


@pytest.fixture(scope="module")
def served(tiny: Callable[[str], Path]) -> list[list[int]]:
    """What is answered without a shadow."""
    with LLM(tiny("q3"), **SETTINGS) as llm:
        return [item["token_ids"] for item in llm.generate(PROMPTS, PARAMS, progress=False)]


def test_a_right_candidate_is_compared_on_every_nth_step(run: Any, served: Any) -> None:
    tokens, report = run(shadow={"attention": "torch", "every": 2})
    assert tokens == served
    # steps 0 (prefill), 2 and 4 of 5, on two layers each
    assert (report.backend, report.every, report.steps, report.layers) == ("torch@minisgl-cpu-sim", 2, 3, 6)
    assert report.divergence is None and report.disabled == ""
    assert 0 < report.worst_error < 1e-5
    json.dumps(report.to_json())


def test_steps_in_graphs_are_not_compared(run: Any) -> None:
    backends = {"attention": "cpu", "graph": "emulated"}
    _, report = run(shadow={"attention": "torch"}, cuda_graph_max_bs=4, backends=backends)
    assert (report.steps, report.layers) == (1, 2), "the prefill"


@pytest.fixture
def candidate(monkeypatch: pytest.MonkeyPatch) -> Callable[[type], None]:
    """``candidate(Class)``: the shadow is of this class, in the chosen phases."""

    def use(cls: type, phases: tuple[str, ...] = ("prefill", "decode"), **facts: Any) -> None:
        module = ModuleType("shadow_candidate")
        module.Candidate = cls  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, module.__name__, module)
        choice = Choice("attention", "new", "", "new-dist", "1", "shadow_candidate:Candidate", **facts)

        def alternate(plan: Any, query: Any, entry: Any, name: str) -> tuple[Choice | None, tuple[str, ...]]:
            return (choice, ()) if entry.phase in phases else (None, ("it cannot",))

        monkeypatch.setattr("minisgl_core.capsule.candidate.alternate_choice", alternate)

    return use


def spoiled(spoil: Callable[..., Any]) -> type:
    """``attention:torch`` whose results go through ``spoil(backend, out, layer, batch)``."""
    from minisgl_cpu_sim.pure.attention import TorchAttention

    class Spoiled(TorchAttention):
        def forward(self, q: Any, k: Any, v: Any, layer_id: int, batch: Any) -> Any:
            return spoil(self, super().forward(q, k, v, layer_id, batch), layer_id, batch)

    return Spoiled


def late_and_wrong(backend: Any, out: torch.Tensor, layer: int, batch: Any) -> torch.Tensor:
    """Wrong in layer 1 of the second decode step, for the second request only."""
    if batch.phase == "decode" and layer == 1 and batch.view.kv_lens_host == (7, 5):
        out[1, 3] += 0.25
    return out


def test_the_first_divergence_names_step_layer_and_request_and_leaves_a_capsule(
    run: Any, served: Any, candidate: Any, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    candidate(spoiled(late_and_wrong))
    with caplog.at_level(logging.WARNING):
        tokens, report = run(shadow={"attention": "new"})
    assert tokens == served
    found = report.divergence
    assert (found.step, found.phase, found.layer, found.uid, found.row, found.head) == (2, "decode", 1, 1, 1, 3)
    assert found.error == pytest.approx(0.25, rel=0.2) and found.tolerance == 1e-4
    assert found.candidate_error > 0.1 > 1e-5 > found.serving_error
    assert (report.steps, report.layers) == (3, 6), "nothing is compared after it"
    assert caplog.text.count("the shadow backend new@new-dist is disabled, serving goes on: it diverged at step 2") == 1
    path = tmp_path / "cache" / "capsules" / "shadow-step-000002-decode-layer-1.safetensors"
    assert found.capsule == str(path)
    capsule = load_capsule(path)
    assert [layer.layer_id for layer in capsule.layers] == [1] and capsule.origin["backend"] == "cpu@minisgl-cpu-sim"
    check_capsule(path, "attention:cpu", device="cpu")


def test_the_capsule_lies_in_the_folder_of_the_recording(run: Any, candidate: Any, tmp_path: Path) -> None:
    candidate(spoiled(late_and_wrong))
    _, report = run(shadow={"attention": "new"}, record=str(tmp_path / "mine"), record_steps="2")
    assert Path(report.divergence.capsule).parent == tmp_path / "mine"
    assert len(list((tmp_path / "mine").iterdir())) == 2


def raises(*_: Any) -> Any:
    raise RuntimeError("no such kernel")


def writes_the_pool(backend: Any, out: torch.Tensor, layer: int, batch: Any) -> torch.Tensor:
    for cache in backend._caches[layer]:
        cache[batch.out_loc.long()] = 7.0
    return out


def writes_inputs_and_view(backend: Any, out: torch.Tensor, layer: int, batch: Any) -> torch.Tensor:
    batch.view.page_ids_device.zero_()
    batch.view.kv_lens_device.zero_()
    batch.positions.zero_()
    batch.out_loc.zero_()
    return out


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (raises, "step 0 (prefill), layer 0: forward raised RuntimeError: no such kernel"),
        (lambda _, out, *__: torch.full_like(out, torch.nan), "it diverged at step 0 (prefill), layer 0, request 0"),
        (lambda _, out, *__: out * 1e30, "it diverged at step 0 (prefill), layer 0, request"),
        (lambda _, out, *__: out[:1], "it returned a float32 tensor of shape (1, 16, 128), expected a float32"),
        (lambda _, out, *__: out.double(), "it returned a float64 tensor"),
        (lambda *_: None, "it returned a NoneType, expected"),
        (writes_the_pool, "it wrote to the KV pool, which a backend must never do; the pages are put back"),
    ],
)
def test_whatever_the_candidate_does_the_answers_stay(
    run: Any, served: Any, candidate: Any, spoil: Any, why: str
) -> None:
    candidate(spoiled(spoil))
    tokens, report = run(shadow={"attention": "new"})
    assert tokens == served
    assert why in report.disabled and report.steps == 1


def test_what_the_candidate_is_given_is_its_own(run: Any, served: Any, candidate: Any) -> None:
    candidate(spoiled(writes_inputs_and_view))
    tokens, report = run(shadow={"attention": "new"})
    assert tokens == served and report.steps >= 1


@pytest.mark.parametrize("method", ["bind_kv", "prepare_metadata", "update_metadata", "close"])
def test_a_candidate_that_raises_elsewhere_is_disabled_too(
    run: Any, served: Any, candidate: Any, method: str, caplog: pytest.LogCaptureFixture
) -> None:
    cls = spoiled(lambda _, out, *__: out)
    setattr(cls, method, raises)
    candidate(cls)
    tokens, report = run(shadow={"attention": "new"})
    assert tokens == served
    assert "RuntimeError: no such kernel" in caplog.text or "cannot be closed: no such kernel" in caplog.text
    assert bool(report.disabled) == (method != "close")


def test_a_candidate_of_one_phase_is_compared_in_that(
    run: Any, candidate: Any, caplog: pytest.LogCaptureFixture
) -> None:
    candidate(spoiled(lambda _, out, *__: out), phases=("decode",))
    _, report = run(shadow={"attention": "new"})
    assert (report.steps, report.disabled) == (4, "")
    assert "does not serve prefill" in caplog.text


def test_a_candidate_has_its_own_page_size(run: Any, candidate: Any) -> None:
    sizes = []

    def look(backend: Any, out: torch.Tensor, layer: int, batch: Any) -> torch.Tensor:
        sizes.append(batch.view.page_size)
        return out

    candidate(spoiled(look), page_size=2)
    _, report = run(shadow={"attention": "new"})
    assert set(sizes) == {2} and report.divergence is None and report.layers == 10


def test_an_unknown_or_unfit_candidate_stops_the_start(run: Any) -> None:
    with pytest.raises(BackendError, match="no plugin offers the attention backend 'no-such'"):
        run(shadow={"attention": "no-such"})
    with pytest.raises(BackendError, match=r"the shadow attention backend 'fa' cannot run with this plan: prefill: "):
        run(shadow={"attention": "fa"})


@pytest.mark.parametrize(
    ("shadow", "message"),
    [
        ({"attention": "torch", "evry": 2}, "unknown key 'evry' in `shadow`; did you mean 'every'?"),
        ({"every": 2}, "`shadow.attention` is None; name the backend to compare"),
        ({"attention": "auto"}, "`shadow.attention` is 'auto'"),
        ({"attention": "torch", "every": 0}, "`shadow.every` is 0; give an integer of at least 1"),
        ({"attention": "torch", "every": "often"}, "`shadow.every` is 'often'"),
    ],
)
def test_wrong_settings_are_named(shadow: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Instrumentation(shadow=shadow)
    assert message in str(caught.value)


def test_a_lossy_candidate_is_compared_with_the_tolerance_that_it_states(run: Any, candidate: Any) -> None:
    """Of |P V| at most 5 %: a result that is 3 % too large is within it, one that is 10 % too large is not."""
    near, far = (spoiled(lambda _, out, *__, factor=factor: out * factor) for factor in (1.03, 1.1))
    candidate(near, tolerance=0.05)
    _, report = run(shadow={"attention": "new"})
    assert report.divergence is None and (report.steps, report.layers) == (5, 10)
    candidate(far, tolerance=0.05)
    assert run(shadow={"attention": "new"})[1].divergence is not None
    candidate(near)
    assert run(shadow={"attention": "new"})[1].divergence is not None, "no tolerance is stated"


@pytest.mark.parametrize(
    ("dtype", "near", "far"),
    [(torch.float32, 3e-5, 3e-4), (torch.bfloat16, 0.004, 0.1)],
    ids=["float32", "bfloat16"],
)
def test_what_is_a_divergence_is_a_few_roundings(
    run: Any, candidate: Any, dtype: torch.dtype, near: float, far: float
) -> None:
    """A bfloat16 rounding is 2**-8 = 0.004; sums of up to 64 float32 products err by 64 * 2**-24 = 4e-6 at most."""
    candidate(spoiled(lambda _, out, layer, batch: out + near))
    _, report = run(shadow={"attention": "new"}, dtype=dtype)
    assert report.divergence is None and report.worst_error > near / 2
    candidate(spoiled(lambda _, out, layer, batch: out + far))
    _, report = run(shadow={"attention": "new"}, dtype=dtype)
    assert report.divergence is not None and report.divergence.error > far / 2
