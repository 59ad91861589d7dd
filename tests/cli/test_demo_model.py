from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from minisgl_core.cli import demo_model
from minisgl_core.cli.app import main
from minisgl_core.demo_model import DEMO_SHA256
from minisgl_core.errors import CheckpointError

CONTENT = b"GGUF but not really"


@pytest.fixture
def fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small file in place of the demo model; nothing is downloaded."""
    path = tmp_path / "demo.gguf"
    path.write_bytes(CONTENT)
    monkeypatch.setattr(demo_model, "ensure_demo_model", lambda: path)
    return path


def test_it_prints_only_the_path_and_reports_the_check_on_stderr(
    fetched: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    digest = hashlib.sha256(CONTENT).hexdigest()
    monkeypatch.setattr(demo_model, "DEMO_SHA256", digest)
    assert main(["demo-model"]) == 0
    captured = capsys.readouterr()
    assert captured.out == f"{fetched}\n"
    assert captured.err == f"0.0 MB, sha256 {digest} as expected\n"
    assert main(["demo-model", "--json"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out) == {"path": str(fetched), "size": len(CONTENT), "sha256": digest}
    assert captured.err == ""


def test_a_file_that_has_changed_is_refused(fetched: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo-model"]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"error: the demo model {str(fetched)!r} has sha256 ")
    assert captured.err.endswith(f"expected {DEMO_SHA256}; delete the file and run this again\n")


def test_a_failed_download_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> Path:
        raise CheckpointError("the demo model cannot be fetched: no network", remedy="give --model")

    monkeypatch.setattr(demo_model, "ensure_demo_model", fail)
    assert main(["demo-model"]) == 1
    assert capsys.readouterr().err == "error: the demo model cannot be fetched: no network; give --model\n"
