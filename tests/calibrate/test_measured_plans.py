"""What was measured decides what an engine runs, and the commands show it."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from minisgl_core.calibration.store import Calibration, Point, file_of, save, scope_of, sources_of, versions_now
from minisgl_core.cli.app import main
from minisgl_core.core import SamplingParams
from minisgl_core.env import ENV
from minisgl_core.llm import LLM
from minisgl_core.modelconfig import read_model_config
from minisgl_core.registry import DeviceFacts, PlanQuery, discover
from support.settings import SMALL

pytest.importorskip("minisgl_cpu_sim")

PROMPTS = [[5, 6, 7, 8], [9, 10, 11], [12, 13]]
PARAMS = SamplingParams(max_tokens=5, ignore_eos=True)
SETTINGS = SMALL
CPU, TORCH = "cpu@minisgl-cpu-sim", "torch@minisgl-cpu-sim"


pytestmark = pytest.mark.usefixtures("no_settings")


@pytest.fixture
def measured(tiny: Callable[[str], Path]) -> Callable[..., Path]:
    """``measured(version=...)``: keep a calibration in which torch is fastest for up to 2 rows of decode."""

    def keep(version: str | None = None, **versions: str) -> Path:
        path = tiny("q3")
        model = read_model_config(str(path))
        query = PlanQuery(model, DeviceFacts("cpu"), "float32", max_seq_len=64)
        (cpu,) = [item for item in discover().candidates("attention") if item.label == CPU]
        at, source = version or cpu.version, sources_of(discover()).get("minisgl-cpu-sim", "")
        points = [
            Point("attention.decode", 1, 64, TORCH, at, 10.0, source=source),
            Point("attention.decode", 1, 64, CPU, at, 20.0, source=source),
            Point("attention.decode", 4, 64, TORCH, at, 50.0, source=source),
            Point("attention.decode", 4, 64, CPU, at, 25.0, source=source),
        ]
        save(Calibration(scope_of(query, model), {**versions_now(query), **versions}, tuple(points)))
        return path

    return keep


def run(path: Path, **settings: Any) -> tuple[list[list[int]], list[tuple[int | None, str]]]:
    with LLM(path, **{**SETTINGS, **settings}) as llm:
        tokens = [item["token_ids"] for item in llm.generate(PROMPTS, PARAMS, progress=False)]
        chosen = [(rows, item.label) for rows, item in llm.plan.by_batch("attention", phase="decode")]
    return tokens, chosen


def test_an_engine_follows_it_where_the_choice_is_open(
    measured: Any, tiny: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    tokens, before = run(tiny("q3"))
    assert before == [(None, CPU)]
    path = measured()
    with caplog.at_level(logging.INFO, "minisgl_core"):
        assert run(path) == (tokens, [(2, TORCH), (None, CPU)])
    assert "auto follows 4 measurements of `minisgl calibrate`" in caplog.text
    assert run(path, backends={"attention": "cpu"}) == (tokens, [(None, CPU)])
    assert run(path, calibrated=False) == (tokens, before)


def test_a_stale_one_is_ignored_and_said_so(measured: Any, caplog: pytest.LogCaptureFixture) -> None:
    path = measured(torch="1.0")
    assert run(path)[1] == [(None, CPU)]
    assert "calibration: all of it is stale: torch 1.0 is now" in caplog.text
    caplog.clear()
    path = measured(version="0.0.1")
    assert run(path)[1] == [(None, CPU)]
    assert f"attention:{TORCH} was measured at version 0.0.1, it is now" in caplog.text


def explained(path: Path, capsys: pytest.CaptureFixture[str], *more: str) -> Any:
    arguments = ["--model", str(path), "--device", "cpu", "--dtype", "float32", "--max-seq-len-override", "64", *more]
    assert main(["explain", *arguments]) == 0
    text = capsys.readouterr().out
    assert main(["explain", *arguments, "--json"]) == 0
    return text, json.loads(capsys.readouterr().out)


def test_explain_shows_the_numbers_and_the_rule(measured: Any, capsys: pytest.CaptureFixture[str]) -> None:
    path = measured()
    text, data = explained(path, capsys)
    words = " ".join(text.split())
    assert f"attention.decode[1-2] {TORCH}" in words
    assert f"attention.decode 1 64 {TORCH} 10, {CPU} 20" in words
    assert f"  attention.decode: {TORCH} up to 2 rows, then {CPU}" in text
    found = data["calibration"]
    assert [point["microseconds"] for point in found["points"]] == [10.0, 20.0, 50.0, 25.0]
    assert found["rules"] == [{"entry": "attention.decode", "backends": [[2, TORCH], [None, CPU]]}]
    assert (found["ignored"], found["unmeasured"]) == ([], [])
    buckets = [bucket for bucket in data["plan"]["buckets"] if bucket["phase"] == "decode"]
    assert [(bucket["batch"], bucket["choice"]["name"]) for bucket in buckets] == [([1, 2], "torch"), (None, "cpu")]
    without, data = explained(path, capsys, "--no-calibrated")
    assert "[1-2]" not in without and data["calibration"]["points"] is None
    assert "measurements of `minisgl calibrate` are left out: calibrated is off (--no-calibrated, " in without
    assert "would do it" not in without and data["calibration"]["left_out"].startswith("calibrated is off")
    assert found["left_out"] is None


def test_explain_looks_for_no_measurements_of_a_device_that_is_not_here(
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = ["explain", "--geometry", "tiny", "--device", "sm90"]
    main(arguments)
    text = capsys.readouterr().out
    assert "measurements of `minisgl calibrate` are left out: the device is not here" in text
    assert "would do it" not in text
    main([*arguments, "--json"])
    assert json.loads(capsys.readouterr().out)["calibration"]["left_out"] == "the device is not here"


def test_explain_says_what_is_stale_and_what_is_missing(measured: Any, capsys: pytest.CaptureFixture[str]) -> None:
    text, data = explained(measured(torch="1.0"), capsys)
    assert "calibration ignored: all of it is stale: torch 1.0 is now" in text
    assert data["calibration"]["points"] is None and len(data["calibration"]["ignored"]) == 1
    path = measured()
    kept = json.loads(next((ENV.CACHE_DIR.value / "calibration").iterdir()).read_text())
    kept["points"] = [point for point in kept["points"] if point["backend"] == CPU]
    file_of(kept["scope"]).write_text(json.dumps(kept))
    text, data = explained(path, capsys)
    assert f"not measured: attention.decode: {TORCH}; measured ones come first" in text
    assert data["calibration"]["unmeasured"] == [f"attention.decode: {TORCH}"]


def test_calibrate_measures_keeps_and_is_used(tiny: Callable[[str], Path], capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--model", str(tiny("q3")), "--device", "cpu", "--dtype", "float32", "--max-seq-len-override", "32"]
    assert "not measured on this machine" in (main(["explain", *arguments]), capsys.readouterr().out)[1]
    sizes = ["--quick", "--max-running-req", "2", "--max-prefill-tokens", "32"]
    assert main(["calibrate", *arguments, *sizes, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["notes"] == [] and all(point["microseconds"] > 0 for point in data["points"])
    assert Path(data["file"]).is_file() and data["scope"]["dtype"] == "float32"
    assert main(["explain", *arguments, "--json"]) == 0
    used = json.loads(capsys.readouterr().out)["calibration"]
    assert used["points"] == data["points"] and used["unmeasured"] == []
    assert used["rules"] == data["rules"] != [] and used["noise"] == data["noise"] >= 0, "case 127: the same rule"


def test_calibrate_prints_a_table(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    found = Calibration(
        {"some": "thing"}, {}, (Point("kv", 1, 0, "a@b", "1", 2.0),), ("kv: c@d failed at 1 rows: X: y",), 0.2
    )
    monkeypatch.setattr("minisgl_core.calibrate.measure.calibrate", lambda *_, **__: found)
    assert main(["calibrate", "--geometry", "smollm2-135m", "--device", "cpu"]) == 1
    text = capsys.readouterr().out
    head = "ENTRY  ROWS  TOKENS  MICROSECONDS, FASTEST FIRST\nkv     1             a@b 2\n"
    assert text.startswith(f"{head}\nnoise: equal measurements were up to 20% apart")
    assert "\nThe plan that follows\n  kv: cpu@minisgl-cpu-sim\n" in text
    assert "not measured: kv: c@d failed at 1 rows: X: y" in text and f"kept in {file_of(found.scope)}" in text


def test_calibrate_needs_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["calibrate"]) == 2
    assert "no model is named; give --model DIR" in capsys.readouterr().err
