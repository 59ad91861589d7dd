"""``minisgl replay`` and ``minisgl generate --record``, as typed."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from minisgl_core.capsule.attention.capsule import AttentionCapsule
from minisgl_core.capsule.format import load_capsule
from minisgl_core.cli.app import main
from minisgl_core.errors import ConfigError
from minisgl_core.settings.load import load_settings
from minisgl_core.testing import BackendUnderTest

pytestmark = pytest.mark.usefixtures("no_settings")


@pytest.fixture
def wrong(monkeypatch: pytest.MonkeyPatch, make_under_test: Any) -> None:
    """``attention:wrong`` is what cannot see more than 20 keys."""

    def forgetful(backend: Any, out: torch.Tensor, batch: Any, layer: int) -> torch.Tensor:
        out[batch.view.kv_lens_device > 20] += 1.0
        return out

    under_test, of = make_under_test(forgetful), BackendUnderTest.of
    monkeypatch.setattr(
        BackendUnderTest,
        "of",
        lambda what, device, **more: under_test if what == "attention:wrong" else of(what, device, **more),
    )


def test_a_right_backend_passes(make_capsule: Any, capsys: pytest.CaptureFixture[str]) -> None:
    make_capsule().save(Path("x.safetensors"))
    arguments = ["replay", "x.safetensors", "--backend", "attention:torch", "--device", "cpu", "--repeats", "1"]
    assert main([*arguments, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["passed"] is True and data["layer_us"] > 0 and data["shrunk"] is None
    assert [layer["layer"] for layer in data["layers"]] == [10, 11]
    assert main(arguments) == 0
    text = capsys.readouterr().out
    assert text.startswith("step 7, decode, 2 rows of 33, 5 tokens") and "recorded by by hand" in text
    assert "us a layer" in text and "PASSED: no error above 0.0001" in text


def test_a_wrong_backend_fails_and_its_smallest_capsule_is_a_test(
    make_capsule: Any, wrong: None, capsys: pytest.CaptureFixture[str]
) -> None:
    make_capsule().save(Path("x.safetensors"))
    arguments = ["replay", "x.safetensors", "--backend", "attention:wrong", "--device", "cpu", "--repeats", "0"]
    assert main(arguments) == 1
    assert "FAILED: layer 10: row 0, new token 0" in capsys.readouterr().out
    assert main([*arguments, "--shrink", "small-one.safetensors"]) == 1
    text = capsys.readouterr().out
    small = load_capsule("small-one.safetensors")
    assert (small.kv_lens, len(small.layers)) == ((21,), 1)
    assert f"the smallest that still fails: {small.summary()}, in small-one.safetensors" in text
    assert "def test_small_one():" in text and "check_capsule(Path(__file__).parent / 'small-one.safetensors'" in text
    assert main([*arguments, "--shrink", "again.safetensors", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["shrunk"]["file"] == "again.safetensors"


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["nothing", "--backend", "attention:torch"], 2, "there is no capsule 'nothing'"),
        (["x.safetensors"], 2, "Missing option '--backend'"),
        (["x.safetensors", "--backend", "attention:no-such"], 2, "no installed plugin offers 'attention:no-such'"),
        (["x.safetensors", "--backend", "kv:torch"], 2, "kv:torch@minisgl-cpu-sim is a backend of role kv"),
        (
            ["x.safetensors", "--backend", "attention:torch", "--repeats", "0", "--shrink", "y"],
            2,
            "computes this capsule right, so there is nothing to shrink",
        ),
        (["text", "--backend", "attention:torch"], 1, "capsule 'text' cannot be read"),
    ],
)
def test_wrong_calls_are_one_line(
    make_capsule: Any, capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, message: str
) -> None:
    make_capsule().save(Path("x.safetensors"))
    Path("text").write_text("some text")
    assert main(["replay", *arguments]) == code
    captured = capsys.readouterr()
    assert message in captured.err and captured.err.count("\n") == 1


def test_a_capsule_that_a_backend_does_not_declare_is_refused(
    make_capsule: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    capsule: AttentionCapsule = make_capsule()
    odd = replace(capsule, geometry=replace(capsule.geometry, kv_layout="HND"))
    odd.save(Path("x.safetensors"))
    assert main(["replay", "x.safetensors", "--backend", "attention:torch", "--device", "cpu"]) == 1
    assert "attention:torch@minisgl-cpu-sim cannot run this capsule" in capsys.readouterr().err


def test_generate_records_and_shadows(tiny: Callable[[str], Path], capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        "generate",
        "--model",
        str(tiny("q3")),
        "--prompt-ids",
        "5,6,7",
        "--max-tokens",
        "3",
        "--device",
        "cpu",
    ]
    chosen = ["--dtype", "float32", "--max-seq-len-override", "64", "--ignore-eos", "--json"]
    assert main([*arguments, *chosen]) == 0
    plain = json.loads(capsys.readouterr().out)["token_ids"]
    recording = ["--record", "steps", "--record-steps", "first:2", "--backend", "shadow.attention=torch"]
    assert main([*arguments, *chosen, *recording]) == 0
    assert json.loads(capsys.readouterr().out)["token_ids"] == plain
    assert sorted(path.name for path in Path("steps").iterdir()) == [
        "step-000000-prefill.safetensors",
        "step-000001-decode.safetensors",
    ]
    assert main([*arguments, *chosen, "--record-steps", "last:2"]) == 2
    assert "`record_steps` is 'last:2'" in capsys.readouterr().err


def test_settings_come_from_the_file_and_from_flags() -> None:
    Path("minisgl.toml").write_text(
        '[debug]\nrecord = "dir"\nrecord_steps = "every:5"\n[backends]\nattention = "torch"\n'
        '[backends.shadow]\nattention = "candidate"\nevery = 10\n'
    )
    settings = load_settings(environ={})
    assert (settings.debug.record, settings.debug.record_steps, settings.debug.record_max_mb) == ("dir", "every:5", 256)
    assert (settings.backends, settings.shadow) == ({"attention": "torch"}, {"attention": "candidate", "every": 10})
    flags = ["shadow.attention=other", "kv=torch"]
    settings = load_settings(flags={"debug.record": "else"}, backend_flags=flags, environ={})
    assert settings.debug.record == "else" and settings.shadow == {"attention": "other", "every": 10}
    assert settings.backends == {"attention": "torch", "kv": "torch"}
    assert load_settings(backend_flags=["shadow=other"], environ={}).shadow["attention"] == "other"
    Path("minisgl.toml").write_text('[backends]\nshadow = "candidate"\n')
    with pytest.raises(ConfigError, match=r"backends\.shadow in minisgl\.toml is 'candidate'; write a table"):
        load_settings(environ={})
