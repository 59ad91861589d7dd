"""Every script of benchmarks/: a wrong call, and a machine without a GPU, take one line and measure nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from support.child_env import child_env

pytest.importorskip("triton", reason="some scripts need triton")

FOLDER = Path(__file__).parents[2] / "benchmarks"
SCRIPTS = sorted(path.stem for path in FOLDER.glob("*.py") if 'if __name__ == "__main__":' in path.read_text())
NEED_A_GPU = [name for name in SCRIPTS if name.startswith("gpu_")]
NO_GPU = "error: this measures an NVIDIA GPU, and torch finds none here; run it where nvidia-smi lists one"
WRONG = {
    ("async_face", "--rounds", "0"): "argument --rounds: '0' is no whole number above 0",
    ("cpu", "--runs", "0"): "argument --runs: '0' is no whole number above 0",
    ("cpu", "--threads", "-1"): "--threads",
    ("cpu", "--dtype", "int8"): "argument --dtype: invalid choice: 'int8'",
    ("cpu", "--json", "file/cpu.json"): "argument --json: the file file/cpu.json cannot be written: Not a directory",
    ("cpu", "--model", "nowhere"): "there is no model folder or file at 'nowhere'",
    ("gpu_all", "--geometries", "tyni"): "unknown geometry 'tyni'; known are qwen3-0.6b, ",
    ("gpu_all", "--modes", "speed"): "argument --modes: invalid choice: 'speed'",
    ("gpu_all", "--requests", "few"): "argument --requests: 'few' is no whole number above 0",
    ("gpu_all", "--seconds", "nan"): "argument --seconds: 'nan' is no number from 0 on",
    ("gpu_all", "--split", "nowhere.json"): "--split nowhere.json holds no results: [Errno 2]",
    ("gpu_all", "--split", "list.json"): "--split list.json holds no results: ",
    ("gpu_all", "--split", "list.json", "--out", "file"): "results cannot be written to 'file': Not a directory",
    ("gpu_attention", "--out", "."): "argument --out: the file . cannot be written: it is a folder",
    ("gpu_decode", "--seconds", "-1"): "argument --seconds: '-1' is no number from 0 on",
    ("gpu_decode", "--out", "file/decode.jsonl"): "cannot be written",
    ("gpu_kv", "--out", "file/kv.json"): "cannot be written",
    ("gpu_linear", "--models", "qwen3-4"): "unknown geometry 'qwen3-4'; did you mean 'qwen3-4b'?",
    ("gpu_linear", "--add", "list.json"): "--add list.json holds no measurements: ",
    ("gpu_linear", "--out", "file/skinny.json"): "cannot be written",
    ("gpu_linear_fused", "--workers", "0"): "argument --workers: '0' is no whole number above 0",
    ("gpu_linear_fused", "--table", "nowhere.json"): "--table nowhere.json holds no tiles: [Errno 2]",
    ("gpu_moe", "--tokens", "1", "0"): "argument --tokens: '0' is no whole number above 0",
    ("gpu_moe", "--experts", "1.5"): "argument --experts: '1.5' is no whole number above 0",
    ("gpu_moe", "--compile-seconds", "soon"): "argument --compile-seconds: 'soon' is no number from 0 on",
    ("gpu_ops", "--part", "all"): "argument --part: invalid choice: 'all'",
    ("gpu_ops", "--out", "file/ops.json"): "cannot be written",
    ("host_step", "--batch", "8", "0"): "argument --batch: '0' is no whole number above 0",
    ("host_step", "--mode", "busy"): "argument --mode: invalid choice: 'busy'",
    ("host_step", "--page-size", "0"): "argument --page-size: '0' is no whole number above 0",
    ("host_step", "--json", "file/host.json"): "argument --json: the file file/host.json cannot be written: Not a dir",
    ("host_step", "--model", "nowhere"): NO_GPU,
    ("prefill_pauses", "--calls", "0"): "argument --calls: '0' is no whole number above 0",
    ("resolve", "--plugins", "0"): "argument --plugins: '0' is no whole number above 0",
    ("serving", "--parts", "all"): "argument --parts: invalid choice: 'all'",
    ("serving", "--geometry", "tyni"): "unknown geometry 'tyni'; known are qwen3-0.6b, ",
    ("serving", "--json", "file/serving.json"): "cannot be written",
    **{(name, "--no-such-option"): "error: unrecognized arguments: --no-such-option" for name in SCRIPTS},
    **{(name,): NO_GPU for name in NEED_A_GPU},
}
CHILD = """
import contextlib, io, json, runpy, sys
folder, calls = sys.argv[1], json.loads(sys.argv[2])
for name, *arguments in calls:
    out, error, code = io.StringIO(), io.StringIO(), None
    sys.argv = [name + ".py", *arguments]
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
        try:
            runpy.run_path(f"{folder}/{name}.py", run_name="__main__")
        except SystemExit as end:
            code = end.code
    print(json.dumps([code, out.getvalue(), error.getvalue()]))
"""
"""All calls in one process, so that torch is imported once."""


class Ended(NamedTuple):
    code: int
    out: str
    error: str


def without_gpu() -> dict[str, str]:
    environment = child_env(FOLDER, CUDA_VISIBLE_DEVICES="")
    return {name: text for name, text in environment.items() if name != "OUT"}


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, ...], Ended]:
    folder = tmp_path_factory.mktemp("scripts")
    (folder / "file").touch()
    (folder / "list.json").write_text("[]")
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(FOLDER), json.dumps(list(WRONG))],
        cwd=folder, env=without_gpu(), capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in folder.iterdir()) == ["file", "list.json"]
    answers = [Ended(*json.loads(line)) for line in done.stdout.splitlines()]
    return dict(zip(WRONG, answers, strict=True))


@pytest.mark.parametrize("call", WRONG, ids=" ".join)
def test_one_line_says_what_is_wrong(ended: dict[tuple[str, ...], Ended], call: tuple[str, ...]) -> None:
    code, out, error = ended[call]
    assert code == 2 and out == ""
    assert error.startswith("error: ") and error.endswith("\n") and error.count("\n") == 1
    assert WRONG[call] in error


def test_the_scripts_are_those_that_are_known() -> None:
    assert {call[0] for call in WRONG if len(call) > 1} == set(SCRIPTS) and len(NEED_A_GPU) == 8


def test_host_times_are_kept_with_what_they_depend_on(tmp_path: Path) -> None:
    path = tmp_path / "made" / "host.json"
    arguments = ("--mode", "steady", "--batch", "1", "3", "--page-size", "4", "--json", str(path))
    done = subprocess.run(
        [sys.executable, str(FOLDER / "host_step.py"), *arguments],
        env=without_gpu(), capture_output=True, text=True, timeout=300, check=True,
    )  # fmt: skip
    kept = json.loads(path.read_text())
    assert kept["device"] == "cpu" and kept["model"] is None and kept["microseconds"] == "CPU time of the thread"
    assert kept["versions"].keys() >= {"minisgl", "torch", "python"} and kept["cpu"]
    assert kept["command"] == f"host_step.py {' '.join(arguments[:-1])} host.json" and len(kept["commit"]) >= 7
    assert [(row["mode"], row["batch"], row["page_size"]) for row in kept["rows"]] == [
        ("steady", 1, 4),
        ("steady", 3, 4),
    ]
    for row, line in zip(kept["rows"], done.stdout.splitlines(), strict=True):
        assert f"median {row['median']:6.1f} us, mean {row['mean']:6.1f} us, {row['steps']} steps" in line
        assert row["steps"] == 300 and row["plan"]["attention.decode"] and row["median"] > 0


def test_a_script_finds_its_helpers_from_another_folder(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(FOLDER / "gpu_kv.py")],
        cwd=tmp_path, env=without_gpu(), capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (2, "") and done.stderr.startswith(NO_GPU), done.stderr
