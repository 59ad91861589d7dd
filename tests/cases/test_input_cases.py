"""Cases 105, 110, 130 and 133: what a GGUF file says is used or refused by name; parts; what loading does; settings."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import gguf
import pytest

from minisgl_core.cli.app import COMMANDS, main
from minisgl_core.errors import CheckpointError, ConfigError
from minisgl_core.inputs import warn_once
from minisgl_core.llm import LLM
from support.driver import Driver, greedy
from support.edited_checkpoints import edited
from support.edited_gguf import copied, read, split, write

ROPE = {"factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 8.0, "beta_slow": 2.0}
SETTINGS = {"num_page_override": 64, "page_size": 16, "max_seq_len_override": 128}


def yarn_keys(arch: str, rope: dict[str, float]) -> dict[str, Any]:
    names = {
        "factor": "factor",
        "original_max_position_embeddings": "original_context_length",
        "beta_fast": "yarn_beta_fast",
        "beta_slow": "yarn_beta_slow",
        "attention_factor": "yarn_attn_factor",
    }
    found = {f"{arch}.rope.scaling.{names[key]}": value for key, value in rope.items()}
    return {f"{arch}.rope.scaling.type": "yarn", **found}


@pytest.mark.parametrize("more", [{}, {"attention_factor": 1.6}], ids=["betas", "attention"])
def test_case_105_yarn_settings_of_a_gguf_mean_what_transformers_means(
    more: dict[str, float], tiny: Callable[[str], Path], checkpoints: ModuleType, tmp_path: Path
) -> None:
    rope = {**ROPE, **more}
    parameters = {"rope_type": "yarn", "rope_theta": 100_000.0, **rope}
    folder = edited(tiny("s93"), tmp_path / "folder", config={"rope_parameters": parameters})
    reference = checkpoints.answer_of(checkpoints.load_model(folder))
    file = copied(tiny("s93-gguf") / "model.gguf", tmp_path / "m.gguf", yarn_keys("llama", rope))
    plain = {key: value for key, value in rope.items() if "beta" not in key and "attention" not in key}
    without = copied(tiny("s93-gguf") / "model.gguf", tmp_path / "plain.gguf", yarn_keys("llama", plain))
    for path, same in ((folder, True), (file, True), (without, False)):
        with Driver(path, **SETTINGS) as driver:
            found = driver.tokens(reference.prompts, greedy(checkpoints.NUM_STEPS))
        assert (found == reference.continuations) == same, path


@pytest.mark.parametrize(
    ("key", "value"), [("rope.scaling.yarn_ext_factor", 0.5), ("attention.scale", 0.5), ("logit_scale", 2.0)]
)
def test_case_105_what_cannot_be_computed_is_refused_by_name(
    key: str, value: float, tiny: Callable[[str], Path], tmp_path: Path
) -> None:
    more = {**yarn_keys("llama", ROPE), f"llama.{key}": value}
    file = copied(tiny("s93-gguf") / "model.gguf", tmp_path / "m.gguf", more)
    with pytest.raises(CheckpointError, match=re.escape(f"`llama.{key}`")):
        LLM(file, **SETTINGS)


def test_case_110_any_part_of_a_split_model_answers_as_the_whole(
    tiny: Callable[[str], Path], answers: Callable[[str], Any], tmp_path: Path
) -> None:
    reference = answers("s93-gguf")
    parts = split(tiny("s93-gguf") / "model.gguf", tmp_path / "parts", 3)
    for path in (parts[2], parts[0].parent):
        with Driver(path, **SETTINGS) as driver:
            assert driver.tokens(reference.prompts, greedy(16)) == reference.continuations
    parts[1].unlink()
    with pytest.raises(CheckpointError, match=rf"of which {parts[1].name} are missing"):
        LLM(parts[0], **SETTINGS)


def quantised(source: Path, target: Path) -> Path:
    """The same model with its matrices in Q8_0."""
    metadata, tensors = read(source)
    kind = gguf.GGMLQuantizationType.Q8_0
    packed = {name: gguf.quants.quantize(values, kind) for name, values in tensors.items() if values.ndim > 1}
    return write(target, metadata, {**tensors, **packed}, dict.fromkeys(packed, kind))


def test_case_130_loading_and_explain_say_that_weights_are_dequantised(
    tiny: Callable[[str], Path], tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    file = quantised(tiny("s93-gguf") / "model.gguf", tmp_path / "m.gguf")
    warn_once.cache_clear()
    with LLM(file, dtype="float32", **SETTINGS) as llm:
        loaded = sum(parameter.nbytes for parameter in _weights(llm))
    stored = file.stat().st_size
    line = f"quantised weights ({stored / 1e6:.0f} MB) are dequantised when they are loaded: {loaded / 1e6:.0f} MB"
    assert caplog.text.count(line) == 1
    assert stored < loaded / 2
    assert main(["explain", "--model", str(file), "--device", "cpu"]) == 0
    assert line in capsys.readouterr().out
    assert main(["explain", "--model", str(tiny("s93")), "--device", "cpu", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["weights"] == ""


def _weights(llm: LLM) -> list[Any]:
    """Each storage once: what the tied head shares counts once too."""
    targets = llm.engine.model.weight_targets("", frozenset())
    return list(
        {target.storage.data_ptr(): target.storage for target in targets if target.name != "lm_head.weight"}.values()
    )


@pytest.mark.parametrize("command", COMMANDS)
def test_case_133_every_command_refuses_an_unknown_variable(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MINISGL_PAGE_SISE", "16")
    assert main([command]) == 2
    said = capsys.readouterr().err
    assert "unknown environment variable MINISGL_PAGE_SISE; did you mean 'MINISGL_PAGE_SIZE'?" in said


def test_case_133_llm_refuses_an_unknown_variable(monkeypatch: pytest.MonkeyPatch, small: Path) -> None:
    monkeypatch.setenv("MINISGL_CHECK_INTEGRTY", "1")
    with pytest.raises(ConfigError, match="variable MINISGL_CHECK_INTEGRTY; did you mean 'MINISGL_CHECK_INTEGRITY'"):
        LLM(small, **SETTINGS)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("page_size = 16\n", r"key 'page_size' of minisgl\.toml is outside a table; write it below \[engine\]"),
        ("path = 'm'\n", r"key 'path' .*below \[model\]"),
        ("model = 'm'\n", r"model in minisgl\.toml is 'm'; write it as a table: \[model\] with path = "),
        ("attention = 'fa'\n", r"key 'attention' .*below \[backends\]"),
        ("deny = ['x']\n", r"key 'deny' .*below \[plugins\]"),
        ("page_sise = 16\n", r"unknown key 'page_sise' in minisgl\.toml; did you mean 'page_size', below \[engine\]\?"),
        ("[engine]\npage_size = '16'\n", r"engine\.page_size is '16' \(from minisgl\.toml\)"),
        ("[engine]\nseed = 1.0\n", r"engine\.seed is 1\.0 \(from minisgl\.toml\)"),
        ("[engine]\nmemory_ratio = '0.5'\n", r"engine\.memory_ratio is '0\.5'"),
        ("[engine]\ncalibrated = 1\n", r"engine\.calibrated is 1 "),
        ("[backends]\nattention = 3\n", r"backends\.attention in minisgl\.toml is 3"),
    ],
)
def test_case_133_a_wrong_file_says_what_to_write(
    text: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("minisgl.toml").write_text(text)
    assert main(["explain", "--geometry", "smollm2-135m", "--device", "cpu"]) == 2
    assert re.search(message, capsys.readouterr().err)


def test_case_133_the_readmes_own_file_is_read_without_a_note(tmp_path: Path) -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    (text,) = re.findall(r"```toml\n(.*?)```", readme, re.DOTALL)
    (tmp_path / "minisgl.toml").write_text(text.replace('path = "path/to/model"\n', ""))
    program = str(Path(sys.executable).with_name("minisgl"))
    call = [program, "explain", "--device", "cpu", "--geometry", "smollm2-135m", "--json"]
    environ = {key: value for key, value in os.environ.items() if not key.startswith("MINISGL_")}
    done = subprocess.run(call, cwd=tmp_path, capture_output=True, text=True, check=True, env=environ)
    assert "warning" not in done.stderr.lower()
    answer = json.loads(done.stdout)
    assert answer["remarks"] == [] == answer["plan"]["fallbacks"]


def test_case_105_all_ranks_together_warn_once(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    model = edited(tiny("q3"), tmp_path / "model", config={"zz_unheard_of": 1})
    call = f"""if True:
        from minisgl_core.llm import LLM
        LLM({str(model)!r}, tp_size=2, num_page_override=64, max_seq_len_override=64, device="cpu").shutdown()
    """
    done = subprocess.run([sys.executable, "-c", call], capture_output=True, text=True, check=True)
    assert done.stderr.count("`zz_unheard_of`") == 1
