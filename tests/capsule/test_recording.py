"""Recording in a whole engine: chosen steps only, eager, whole or not at all, and the answers stay the same."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from minisgl_core.capsule.format import load_capsule
from minisgl_core.capsule.instrumentation import Instrumentation
from minisgl_core.capsule.observer import StepObserver
from minisgl_core.capsule.replay import replay
from minisgl_core.capsule.steps import StepChoice
from minisgl_core.core import Batch, Req, SamplingParams
from minisgl_core.engine import Engine, EngineConfig
from minisgl_core.errors import ConfigError, UsageError
from minisgl_core.llm import LLM
from minisgl_core.testing import BackendUnderTest, DeviceFixture
from support.settings import PAGED

PROMPTS = [[5, 6, 7, 8, 9], [10, 11, 12]]
PARAMS = SamplingParams(max_tokens=5, ignore_eos=True)
SETTINGS: dict[str, Any] = {
    **PAGED,
    "backends": {"attention": "torch", "graph": ["emulated", "eager"]},
}


def answer(path: Path, **settings: Any) -> list[list[int]]:
    with LLM(path, **{**SETTINGS, **settings}) as llm:
        return [item["token_ids"] for item in llm.generate(PROMPTS, PARAMS, progress=False)]


def test_chosen_steps_are_recorded_and_any_backend_replays_them(
    tiny: Callable[[str], Path], tmp_path: Path, caplog: pytest.LogCaptureFixture, fixture: DeviceFixture
) -> None:
    path = tiny("q3")
    with caplog.at_level(logging.INFO, "minisgl_core"):
        tokens = answer(path, record=str(tmp_path), record_steps="0,2", cuda_graph_max_bs=4)
    assert tokens == answer(path, cuda_graph_max_bs=4)
    assert f"recording to {tmp_path}: all steps run eagerly, without graphs" in caplog.text
    names = sorted(item.name for item in tmp_path.iterdir())
    assert names == ["step-000000-prefill.safetensors", "step-000002-decode.safetensors"]
    first, third = (load_capsule(tmp_path / name) for name in names)
    assert (first.q_lens, first.kv_lens, first.uids, first.num_pages) == ((5, 3), (5, 3), (0, 1), 3)
    assert (third.q_lens, third.kv_lens, third.num_pages) == ((1, 1), (7, 5), 4)
    assert first.origin["plan"]["graph"] is False
    assert first.origin["backend"] == "torch@minisgl-cpu-sim" and first.origin["versions"]["torch"]
    for capsule in (first, third):
        assert len(capsule.layers) == 2
        for name in ("attention:torch", "attention:cpu"):
            report = replay(capsule, BackendUnderTest.of(name, fixture.facts), fixture, repeats=0)
            assert report.passed and report.worst is not None and report.worst.against_recorded < 1e-5


def test_without_a_folder_nothing_is_wrapped(tiny: Callable[[str], Path]) -> None:
    from minisgl_cpu_sim.pure.attention import TorchAttention

    with LLM(tiny("q3"), **SETTINGS) as llm:
        assert llm.engine.observer is None and llm.shadow_report is None
        for routes in llm.engine.attn_backend.routes.values():
            assert [type(route.backend) for route in routes] == [TorchAttention]


def test_a_step_that_is_too_large_is_skipped_and_named(
    tiny: Callable[[str], Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    long = [list(range(3, 53))]
    settings = {**SETTINGS, "page_size": 1, "record": str(tmp_path), "record_max_mb": 1, "record_steps": "first:2"}
    with LLM(tiny("q3"), **settings) as llm:
        llm.generate(long, SamplingParams(max_tokens=2, ignore_eos=True), progress=False)
        assert isinstance(llm.engine.observer, StepObserver) and llm.engine.observer.recorder is not None
        written = llm.engine.observer.recorder.written
    assert "step 0 is not recorded: prefill of 50 tokens take" in caplog.text
    assert "`record_max_mb` is 1" in caplog.text
    assert written == list(tmp_path.iterdir()) == [tmp_path / "step-000001-decode.safetensors"]
    assert load_capsule(written[0]).nbytes < 1e6


def test_a_folder_that_cannot_be_written_is_refused_before_the_weights_are_read(
    tiny: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Engine, "_load_weights", lambda self: pytest.fail("the weights were read"))
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"capsules cannot be written to '.*file': .*; name a folder") as caught:
        answer(tiny("q3"), record=str(tmp_path / "file"))
    assert caught.value.field == "record"
    monkeypatch.setenv("MINISGL_CACHE_DIR", str(tmp_path / "file"))
    with pytest.raises(UsageError, match=r"file.capsules': .*; set MINISGL_CACHE_DIR to a folder"):
        answer(tiny("q3"), shadow={"attention": "cpu"})


def test_a_folder_that_is_lost_ends_the_recording_not_the_answers(
    tiny: Callable[[str], Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, folder = tiny("q3"), tmp_path / "made" / "here"
    with LLM(path, **SETTINGS, record=folder) as llm:
        folder.rmdir()
        folder.write_text("")
        tokens = [item["token_ids"] for item in llm.generate(PROMPTS, PARAMS, progress=False)]
    assert tokens == answer(path)
    assert caplog.text.count("recording ends at step 0: capsule") == 1


def test_the_step_at_which_a_backend_raises_is_recorded(
    tiny: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fixture: DeviceFixture
) -> None:
    from minisgl_cpu_sim.pure.attention import TorchAttention

    right = TorchAttention.forward

    def forward(self: Any, q: Any, k: Any, v: Any, layer: int, batch: Any) -> torch.Tensor:
        if batch.phase == "decode" and layer == 1:
            raise RuntimeError("a kernel failed")
        return right(self, q, k, v, layer, batch)

    with monkeypatch.context() as patch:
        patch.setattr(TorchAttention, "forward", forward)
        with pytest.raises(RuntimeError, match="a kernel failed"):
            answer(tiny("q3"), record=str(tmp_path), record_steps="every:1")
    capsule = load_capsule(tmp_path / "step-000001-decode.safetensors")
    assert capsule.origin["raised"] == "RuntimeError: a kernel failed"
    assert [layer.layer_id for layer in capsule.layers] == [0, 1]
    assert capsule.layers[1].out.isnan().all()
    assert replay(capsule, BackendUnderTest.of("attention:torch", fixture.facts), fixture, repeats=0).passed


def test_padded_rows_of_a_batch_by_hand_are_recorded_as_padding(
    tiny: Callable[[str], Path], tmp_path: Path, fixture: DeviceFixture
) -> None:
    config = EngineConfig(str(tiny("q3")), observer=Instrumentation(record=str(tmp_path)), **SETTINGS)
    engine = Engine(config)
    engine.page_table[0, :64] = torch.arange(40, 104)
    req = Req(torch.tensor([5, 6, 7], dtype=torch.int32), 0, 0, 4, 9, SamplingParams(max_tokens=4), None)
    for phase, padded in (("prefill", 0), ("decode", 3)):
        batch = Batch(reqs=[req], phase=phase, padded_size=padded)  # type: ignore[arg-type]
        engine.attn_backend.prepare_metadata(batch)
        out = engine.forward_batch(batch, engine.sampler.prepare(batch))
        req.append_host(out.next_tokens_cpu[:1])
    engine.shutdown()
    capsule = load_capsule(tmp_path / "step-000001-decode.safetensors")
    assert (capsule.uids, capsule.q_lens, capsule.kv_lens, capsule.num_pages) == ((9,), (1, 1, 1), (4, 1, 1), 1)
    assert capsule.page_ids[:, 0].tolist() == [0, 1, 1], "padding lies on the dummy page"
    assert replay(capsule, BackendUnderTest.of("attention:cpu", fixture.facts), fixture, repeats=0).passed


@pytest.mark.parametrize(
    ("text", "taken"),
    [
        ("first:3", {0, 1, 2}),
        ("every:4", {0, 4, 8}),
        ("5", {5}),
        ("1, 9,1", {1, 9}),
    ],
)
def test_steps_are_chosen_by_a_word_or_by_number(text: str, taken: set[int]) -> None:
    choice = StepChoice.parse(text)
    assert {step for step in range(10) if step in choice} == taken


@pytest.mark.parametrize("text", ["", "first", "first:0", "every:x", "every:-1", "1,b", "last:3", "1:2", "1,,2"])
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="use such as first:8, every:100 or 0,5,7"):
        StepChoice.parse(text)
    with pytest.raises(ConfigError, match="`record_steps` is"):
        Instrumentation(record_steps=text)
