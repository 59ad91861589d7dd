"""``minisgl bench online``: its refusals, its output, and a server that it starts itself."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest

from minisgl_core.bench.model_folder import write_geometry
from minisgl_core.cli.app import main
from minisgl_core.modelconfig.geometries import geometry
from support.child_env import child_env
from support.fake_server import FakeServer, Part, event, fake_server

Capture = pytest.CaptureFixture[str]
SHORT = ("--requests", "4", "--input-len", "3", "--output-len", "2", "--warm-up", "1")


def answer(body: dict[str, Any]) -> list[Part]:
    if body["max_tokens"] == 5:
        error = b'{"error": {"message": "not now"}}'
        return [b"HTTP/1.1 429 No\r\ncontent-length: %d\r\n\r\n%s" % (len(error), error)]
    events = [event({"choices": [{"text": "x", "finish_reason": None}]})] * body["max_tokens"]
    used = {"prompt_tokens": len(body["prompt"]), "completion_tokens": body["max_tokens"]}
    return [*events, event({"choices": [], "usage": used}), event(b"[DONE]")]


@pytest.fixture(scope="module")
def server() -> Iterator[FakeServer]:
    with fake_server(answer) as found:
        yield found


def test_one_load_prints_all_figures(server: FakeServer, capsys: Capture) -> None:
    assert main(["bench", "online", "--url", server.url, *SHORT, "--goodput", "ttft:60000,e2e:60000"]) == 0
    out = capsys.readouterr().out
    for what in ("requests completed", "4/4", "time to first token", "p99", "goodput (ttft <= 60000 ms", "(100%)"):
        assert what in out, out


def test_a_sweep_prints_a_row_for_each_load_and_keeps_them(server: FakeServer, tmp_path: Path, capsys: Capture) -> None:
    kept, plot = tmp_path / "r.json", tmp_path / "r.svg"
    server.bodies.clear()
    arguments = ["--rate", "200,inf", "--concurrency", "1,2", "--json", str(kept), "--plot", str(plot)]
    assert main(["bench", "online", "--url", f"{server.url}/v1", *SHORT, *arguments]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in lines[2:]] == ["load", "200/s x1", "200/s x2", "x1", "x2"]
    content = json.loads(kept.read_text())
    assert [(one["rate"], one["max_concurrency"]) for one in content["points"]] == [
        (200.0, 1), (200.0, 2), (None, 1), (None, 2),
    ]  # fmt: skip
    assert all(one["completed"] == 4 and one["tokens_out"] == 8 for one in content["points"])
    assert content["model"] == "fake" and content["load"]["input_len"] == [3, 3] and content["client"]["commit"]
    assert len(server.bodies) == 1 + 4 * 4
    prompts = {tuple(body["prompt"]) for body in server.bodies}
    assert len(prompts) == len(server.bodies)  # no load finds its prompts in the cache
    svg = ET.parse(plot).getroot()
    assert len(svg.findall("{http://www.w3.org/2000/svg}polyline")) == 3


def test_json_on_standard_output_is_all_that_is_there(server: FakeServer, capsys: Capture) -> None:
    assert main(["bench", "online", "--url", server.url, *SHORT, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["mode"] == "online"


def test_errors_are_shown_and_fail_a_run_without_any_answer(server: FakeServer, capsys: Capture) -> None:
    failing = ["--requests", "3", "--output-len", "5", "--warm-up", "0"]
    assert main(["bench", "online", "--url", server.url, *failing]) == 1
    said = capsys.readouterr()
    assert "inf/s: 3 of 3 requests failed: status 429 (not now)" in said.err and "0/3" in said.out
    assert main(["bench", "online", "--url", server.url, "--output-len", "5"]) == 1
    assert "no request of the warm-up was answered (status 429: not now)" in capsys.readouterr().err


def test_prompts_as_text_and_as_chat(server: FakeServer) -> None:
    server.bodies.clear()
    assert main(["bench", "online", "--url", server.url, *SHORT, "--warm-up", "0", "--prompts", "text"]) == 0
    assert all(isinstance(body["prompt"], str) and len(body["prompt"].split()) == 3 for body in server.bodies)


def test_a_trace_is_replayed(server: FakeServer, tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "trace.jsonl"
    lines = [{"timestamp": 0.01 * n, "input_length": n + 1, "output_length": 2} for n in range(3)]
    path.write_text("\n".join(map(json.dumps, lines)))
    server.bodies.clear()
    assert main(["bench", "online", "--url", server.url, "--warm-up", "0", "--trace", str(path)]) == 0
    assert [len(body["prompt"]) for body in server.bodies] == [1, 2, 3]
    assert "fake, trace" in capsys.readouterr().out


WRONG: dict[str, tuple[list[str], str]] = {
    "address": (["--url", "localhost:8000"], "--url is 'localhost:8000'; give the address"),
    "no server": (["--url", "http://127.0.0.1:9"], "cannot be measured"),
    "rate": (["--rate", "fast"], "--rate is 'fast'"),
    "concurrency": (["--concurrency", "0"], "--concurrency is '0'"),
    "lengths": (["--input-len", "9..3"], "--input-len is '9..3'"),
    "burstiness": (["--burstiness", "0"], "--burstiness is 0.0"),
    "duration": (["--duration", "nan"], "--duration is nan"),
    "goodput": (["--goodput", "ttft"], "--goodput has 'ttft'"),
    "plot": (["--plot", "a.png"], "--plot is 'a.png'; name a .svg file"),
    "json": (["--json", "/proc/none/r.json"], "--json"),
    "trace": (["--trace", "nowhere.jsonl"], "--trace nowhere.jsonl cannot be read"),
    "settings of another server": (["--url", "http://h:1", "--page-size", "4"], "--page-size has no effect"),
    "backends of another server": (["--url", "http://h:1", "--backend", "ops=torch"], "--backend has no effect"),
    "geometry of another server": (["--url", "http://h:1", "--geometry", "tiny"], "--geometry has no effect"),
    "two models": (["--model", "x", "--geometry", "tiny"], "--model and --geometry are both given"),
    "geometry": (["--geometry", "tyni"], "unknown geometry 'tyni'"),
    "a server that cannot start": (["--model", "./no/where"], "the server did not start: there is no model"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_call_takes_one_line(name: str, capsys: Capture) -> None:
    arguments, message = WRONG[name]
    assert main(["bench", "online", *arguments]) == 2
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1


def test_a_server_ends_with_the_benchmark_that_started_it(tmp_path: Path) -> None:
    model = ["--model", str(write_geometry(geometry("tiny"), tmp_path)), "--dummy-weights", "--device", "cpu"]
    code = (
        "import sys, time; from minisgl_core.bench.online.server import _Child;"
        "print(_Child(sys.argv[1:]).process.pid, flush=True); time.sleep(60)"
    )
    command = [sys.executable, "-c", code, *model]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=child_env()) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        parent.kill()
    end = time.monotonic() + 60
    while _runs(child) and time.monotonic() < end:
        time.sleep(0.05)
    survived = _runs(child)
    if survived:
        os.kill(child, signal.SIGKILL)
    assert not survived


def _runs(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_server_is_started_measured_and_stopped(tmp_path: Path, capsys: Capture) -> None:
    kept = tmp_path / "r.json"
    small = ["--geometry", "tiny", "--device", "cpu", "--num-page-override", "512", "--max-seq-len-override", "64"]
    assert main(["bench", "online", *small, *SHORT, "--concurrency", "2", "--json", str(kept)]) == 0
    content = json.loads(kept.read_text())
    (point,) = content["points"]
    assert point["completed"] == 4 and point["tokens_out"] == 8 and point["errors"] == {}
    assert content["model"] == "tiny" and content["vocab_size"] == 512 and content["start_s"] > 0
    assert content["server"]["config"]["num_page_override"] == 512 and "model_path" not in content["server"]["config"]
    assert "tiny, x2" in capsys.readouterr().out
