"""Recording experts in a whole engine: what each step used, whatever becomes of the weights."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from minisgl_core.capsule.format import load_capsule
from minisgl_core.capsule.instrumentation import Instrumentation
from minisgl_core.capsule.moe.capsule import MoECapsule
from minisgl_core.capsule.record import Recorder
from minisgl_core.capsule.replay import replay
from minisgl_core.capsule.steps import StepChoice
from minisgl_core.cli.app import main
from minisgl_core.core import SamplingParams
from minisgl_core.errors import BackendError, ConfigError
from minisgl_core.llm import LLM
from minisgl_core.testing import BackendUnderTest, DeviceFixture
from support.settings import PAGED

PROMPTS = [[5, 6, 7, 8, 9], [10, 11, 12]]
PARAMS = SamplingParams(max_tokens=4, ignore_eos=True)
SETTINGS: dict[str, Any] = {
    **PAGED,
    "cuda_graph_max_bs": 0,
    "backends": {"attention": "torch", "moe": "torch", "graph": ["emulated", "eager"]},
}
RECORD: dict[str, Any] = {"record_role": "moe", "record_steps": "0,2"}


def answer(path: Path, **settings: Any) -> list[list[int]]:
    with LLM(path, **{**SETTINGS, **settings}) as llm:
        return [item["token_ids"] for item in llm.generate(PROMPTS, PARAMS, progress=False)]


def moe_capsule(path: Path) -> MoECapsule:
    capsule = load_capsule(path)
    assert isinstance(capsule, MoECapsule)
    return capsule


def assert_replays(capsule: MoECapsule, fixture: DeviceFixture) -> None:
    """On both executors, as recorded."""
    for name in ("moe:torch", "moe:cpu"):
        report = replay(capsule, BackendUnderTest.of(name, fixture.facts), fixture, repeats=0)
        assert report.passed and report.worst is not None, report.failure()
        assert max(layer.against_recorded for layer in report.layers) < 1e-5


def test_chosen_steps_are_recorded_with_the_experts_that_they_used(
    tiny: Callable[[str], Path], tmp_path: Path, caplog: pytest.LogCaptureFixture, fixture: DeviceFixture
) -> None:
    with caplog.at_level(logging.INFO, "minisgl_core"):
        tokens = answer(tiny("moe"), record=str(tmp_path / "steps"), cuda_graph_max_bs=4, **RECORD)
    assert tokens == answer(tiny("moe"))
    assert "moe is observed: the weights of all experts are kept in host memory once more" in caplog.text
    names = sorted(item.name for item in (tmp_path / "steps").iterdir())
    assert names == ["step-000000-prefill.safetensors", "step-000002-decode.safetensors"]
    first, third = (moe_capsule(tmp_path / "steps" / name) for name in names)
    assert (first.q_lens, first.uids, third.q_lens, third.uids) == ((5, 3), (0, 1), (1, 1), (0, 1))
    g = third.geometry
    assert (g.num_experts, g.top_k, g.hidden_size, g.intermediate_size) == (60, 4, 128, 96)
    assert [layer.tokens.tolist() for layer in third.layers] == [[0, 1]] * 2
    assert first.layers[0].tokens.tolist() == list(range(8))
    assert first.layers[1].tokens.tolist() in (list(range(8)), [4, 7]), "all, or the last of each row"
    for layer in third.layers:
        assert set(layer.experts) == set(layer.original_ids().flatten().tolist()) and len(layer.experts) <= 8
        assert (layer.w13.shape[1:], layer.w2.shape[1:]) == ((192, 128), (128, 96))
    assert third.origin["backend"] == "torch@minisgl-cpu-sim" and third.origin["plan"]["graph"] is False
    assert_replays(first, fixture)
    assert_replays(third, fixture)


@pytest.mark.parametrize("name", ["moe-mixed", "moe2"])
def test_dense_layers_and_shared_experts_are_left_out(
    tiny: Callable[[str], Path], tmp_path: Path, fixture: DeviceFixture, name: str
) -> None:
    answer(tiny(name), record=str(tmp_path / "steps"), record_role="moe", record_steps="1")
    capsule = moe_capsule(tmp_path / "steps" / "step-000001-decode.safetensors")
    assert [layer.layer_id for layer in capsule.layers] == ([0, 2] if name == "moe-mixed" else [0, 1])
    assert_replays(capsule, fixture)


def test_random_weights_and_repacking_in_place_are_no_obstacle(
    tiny: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fixture: DeviceFixture
) -> None:
    from minisgl_cpu_sim.pure.moe import TorchMoE

    def repack(self: Any, layer_id: int, w13: torch.Tensor, w2: torch.Tensor) -> Any:
        kept = w13.clone(), w2.clone()
        w13.fill_(torch.nan)
        w2.fill_(torch.nan)
        return kept

    with monkeypatch.context() as patch:
        patch.setattr(TorchMoE, "prepare_weights", repack)
        settings = {"record": str(tmp_path / "steps"), "dummy_weights": True, **RECORD}
        answer(tiny("moe"), **settings)
    assert_replays(moe_capsule(tmp_path / "steps" / "step-000002-decode.safetensors"), fixture)


def test_each_rank_records_its_own_width(tiny: Callable[[str], Path], tmp_path: Path, fixture: DeviceFixture) -> None:
    answer(tiny("moe"), tp_size=2, record=str(tmp_path / "steps"), record_role="moe", record_steps="1")
    names = [f"step-000001-decode-rank{rank}.safetensors" for rank in (0, 1)]
    parts = [moe_capsule(tmp_path / "steps" / name) for name in names]
    for capsule in parts:
        assert capsule.geometry.intermediate_size == 48 and capsule.layers[0].w2.shape[2] == 48
        assert_replays(capsule, fixture)
    mine, theirs = (capsule.layers[0] for capsule in parts)
    assert torch.equal(mine.x, theirs.x) and mine.experts == theirs.experts
    assert not torch.equal(mine.w13, theirs.w13)


def test_a_step_that_is_too_large_is_skipped_and_named(
    tiny: Callable[[str], Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An expert of this model takes 147 kB: two layers' eight or fewer do not fit into 1 MB, however few they are."""
    answer(tiny("moe"), record=str(tmp_path / "steps"), record_max_mb=1, record_role="moe", record_steps="first:2")
    assert "step 0 is not recorded: prefill of 8 tokens take" in caplog.text
    assert "step 1 is not recorded: decode of 2 tokens take" in caplog.text
    assert "MB or more, `record_max_mb` is 1" in caplog.text and not list((tmp_path / "steps").iterdir())


def test_the_size_is_found_while_the_experts_are_seen(caplog: pytest.LogCaptureFixture) -> None:
    """The least that a step can take fits, what it does take does not."""
    maker: Any = SimpleNamespace(least_bytes=lambda step: 0, layer=lambda call, out: call, capsule=None)
    step: Any = SimpleNamespace(number=3, phase="decode", real_tokens=8)
    recorder = Recorder(Path("nowhere"), StepChoice.parse("first:9"), 1, maker, {})
    call: Any = SimpleNamespace(nbytes=900_000, backend="torch")
    assert recorder.begin(step)
    for _ in range(3):
        recorder.layer(step, call, None, "")
    recorder.end(step, completed=True)
    assert caplog.text.count("step 3 is not recorded: decode of 8 tokens take 2 MB or more") == 1
    assert recorder.written == []


@pytest.mark.parametrize("role", ["moe", "attention"])
def test_a_step_is_written_if_what_is_recorded_raised_and_dropped_if_something_else_did(
    tiny: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fixture: DeviceFixture, role: str
) -> None:
    from minisgl_cpu_sim.pure.moe import TorchMoE

    right = TorchMoE.forward

    def forward(self: Any, x: Any, ids: Any, weights: Any, prepared: Any, layer: int) -> torch.Tensor:
        if len(x) == 2 and layer == 0:
            raise RuntimeError("a kernel failed")
        return right(self, x, ids, weights, prepared, layer)

    with monkeypatch.context() as patch:
        patch.setattr(TorchMoE, "forward", forward)
        with pytest.raises(RuntimeError, match="a kernel failed"):
            answer(tiny("moe"), record=str(tmp_path / "steps"), record_role=role, record_steps="every:1")
    names = sorted(item.name for item in (tmp_path / "steps").iterdir())
    if role == "attention":
        assert names == ["step-000000-prefill.safetensors"]
        return
    assert names == ["step-000000-prefill.safetensors", "step-000001-decode.safetensors"]
    capsule = moe_capsule(tmp_path / "steps" / names[1])
    assert capsule.origin["raised"] == "RuntimeError: a kernel failed"
    assert [layer.layer_id for layer in capsule.layers] == [0] and capsule.layers[0].out.isnan().all()
    assert replay(capsule, BackendUnderTest.of("moe:torch", fixture.facts), fixture, repeats=0).passed


def test_unobserved_experts_are_not_wrapped(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    from minisgl_cpu_sim.pure.moe import TorchMoE

    with LLM(tiny("moe"), **SETTINGS) as llm:
        assert llm.engine.observer is None
        assert type(llm.engine.ctx.moe) is TorchMoE and llm.engine.stepper.model is llm.engine.model
    with LLM(tiny("moe"), record=str(tmp_path), **SETTINGS) as llm:
        assert type(llm.engine.ctx.moe) is TorchMoE


# Settings.


def test_a_model_without_experts_is_refused(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"`record_role` needs experts, and Qwen3ForCausalLM has none"):
        answer(tiny("q3"), record=str(tmp_path), record_role="moe", backends={})
    with pytest.raises(ConfigError, match=r"`shadow\.moe` needs experts"):
        answer(tiny("q3"), shadow={"moe": "torch"}, backends={})
    with pytest.raises(BackendError, match="no plugin offers the moe backend 'no-such'"):
        answer(tiny("moe"), shadow={"moe": "no-such"})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"record_role": "kv"}, "`record_role` is 'kv'; use attention or moe"),
        ({"shadow": {"moe": "auto"}}, "`shadow.moe` is 'auto'; name the backend to compare"),
        ({"shadow": {"moe": "a", "attention": "b"}}, "names a backend for each of attention and moe; compare one"),
        ({"shadow": {"mow": "a"}}, "unknown key 'mow' in `shadow`; did you mean 'moe'?"),
    ],
)
def test_wrong_settings_are_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Instrumentation(**settings)
    assert message in str(caught.value)


def test_as_typed(
    tiny: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = ["generate", "--model", str(tiny("moe")), "--prompt-ids", "5,6,7", "--max-tokens", "2"]
    arguments += ["--device", "cpu", "--dtype", "float32", "--max-seq-len-override", "64", "--ignore-eos"]
    recording = ["--record", "steps", "--record-role", "moe", "--backend", "shadow.moe=torch"]
    assert main([*arguments, *recording]) == 0
    capsys.readouterr()
    assert main(["replay", "steps/step-000001-decode.safetensors", "--backend", "moe:cpu", "--repeats", "1"]) == 0
    text = capsys.readouterr().out
    assert "top 4 of 60 experts" in text and "\nmoe " in text and "us a layer" in text
    assert "PASSED: no error above 0.0001" in text and "metadata" not in text
    assert main(["replay", "steps/step-000001-decode.safetensors", "--backend", "attention:cpu"]) == 2
    assert "write moe:NAME" in capsys.readouterr().err
