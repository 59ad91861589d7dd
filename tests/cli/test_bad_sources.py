"""What is wrong before any model is read: standard input, prompt files, the config file, the choice of backends."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from minisgl_core.cli.app import main

Tiny = Callable[[str], Path]
SMALL = ("--num-page-override", "64", "--max-seq-len-override", "48")


pytestmark = pytest.mark.usefixtures("no_settings")


@pytest.mark.parametrize(
    ("piped", "says"),
    [(b"", "the prompt of standard input is empty"), (b"caf\xe9", "standard input is not utf-8 text")],
)
def test_standard_input_without_a_prompt_in_it(
    piped: bytes, says: str, tiny: Tiny, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(piped), encoding="utf-8"))
    assert main(["generate", "--model", str(tiny("q3-text")), *SMALL]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {says}")
    assert not piped or error.endswith("; give UTF-8 text\n")


@pytest.mark.parametrize("arguments", [[], ["--prompt-file", "-"]])
def test_a_closed_standard_input(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    assert main(["generate", *arguments]) == 2
    assert capsys.readouterr().err.startswith("error: standard input is closed; ")


@pytest.mark.parametrize("command", [["generate", "--prompt", "hi"], ["chat"], ["bench", "latency"]])
@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('[backends.options."graph:emulated"]\nstrct = true\n', "unknown option 'strct'"),
        ('[backends]\nkv = "nope"\n', "no plugin offers the kv backend 'nope'"),
    ],
)
def test_a_wrong_choice_is_refused_before_the_demo_model_is_fetched(
    command: list[str], text: str, says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("minisgl_core.demo_model.ensure_demo_model", None)
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    Path("minisgl.toml").write_text(text)
    assert main(command) == 2
    assert capsys.readouterr().err.startswith(f"error: {says}")


@pytest.mark.parametrize("command", [["explain", "--geometry", "qwen3-0.6b"], ["chat"]])
def test_every_command_names_the_file_of_options(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    Path("other.toml").write_text('[backends.options."kv:cpu"]\nx = 1\n')
    assert main([*command, "--config", "other.toml"]) == 2
    assert "takes no options (from other.toml); remove it" in capsys.readouterr().err


def test_a_prompt_file_that_is_no_text(tiny: Tiny, capsys: pytest.CaptureFixture[str]) -> None:
    Path("prompt.txt").write_bytes(b"caf\xe9")
    assert main(["generate", "--model", str(tiny("q3-text")), "--prompt-file", "prompt.txt", *SMALL]) == 2
    assert "'prompt.txt' is not UTF-8 text: byte 3 is 0xe9; give a UTF-8" in capsys.readouterr().err


def test_a_config_file_that_is_a_folder_is_not_passed_over(capsys: pytest.CaptureFixture[str]) -> None:
    Path("minisgl.toml").mkdir()
    assert main(["generate", "--prompt", "hi"]) == 2
    assert "config file minisgl.toml cannot be read: Is a directory; make it a file" in capsys.readouterr().err


def test_a_terminal_without_a_prompt_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stdin", terminal)
    assert main(["generate"]) == 2
    assert capsys.readouterr().err.startswith("error: no prompt is given; give --prompt TEXT")
