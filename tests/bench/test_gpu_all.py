"""The script that measures everything, on a geometry that a CPU can run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu_all.py"


def script(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *arguments]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=environment)


@pytest.mark.slow
def test_every_mode_is_measured_kept_and_can_be_divided(tmp_path: Path) -> None:
    done = script(
        *("--geometries", "tiny", "--modes", "latency", "prefill", "--requests", "1", "--repeat", "2"),
        *("--seconds", "200", "--out", str(tmp_path)),
    )
    assert done.returncode == 0, done.stderr
    (combined,) = tmp_path.iterdir()
    content = json.loads(combined.read_text())
    names = [f"{content['device']}_tiny-{mode}.json" for mode in ("latency", "prefill")]
    assert list(content["results"]) == names and content["errors"] == {} and content["starts_s"]["tiny"] > 0
    for result in content["results"].values():
        assert len(result["runs"]) == 2 and result["plan"]["format"] == 1 and result["memory"]["pool"] > 0
        assert result["commit"] == content["commit"] and result["command"].startswith("gpu_all.py --geometries tiny")
    assert content["results"][names[0]]["workload"] == {"seed": 0, "requests": 1, "tokens_in": 128, "tokens_out": 512}
    divided = tmp_path / "divided"
    assert script("--split", str(combined), "--out", str(divided)).returncode == 0
    assert json.loads((divided / names[1]).read_text()) == content["results"][names[1]]


def test_what_cannot_be_measured_is_named_in_the_file(tmp_path: Path) -> None:
    done = script(
        *("--geometries", "tiny", "--modes", "prefill", "--requests", "9000", "--seconds", "1", "--out", str(tmp_path))
    )
    (combined,) = tmp_path.iterdir()
    content = json.loads(combined.read_text())
    assert done.returncode == 1 and "tiny" in content["errors"] and content["results"] == {}


def test_unknown_names_are_refused_at_once(tmp_path: Path) -> None:
    done = script("--geometries", "tyni", "--out", str(tmp_path))
    assert done.returncode != 0 and "unknown geometry 'tyni'" in done.stderr and list(tmp_path.iterdir()) == []
