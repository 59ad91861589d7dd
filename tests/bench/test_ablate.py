"""Ablations: what the table says, also of rows that cannot run or would change nothing, and where it is kept."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree as ET

import pytest

from minisgl_core.bench import make_workload
from minisgl_core.bench.ablate import Job, ablate, measure_rows
from minisgl_core.bench.ablation_table import AblationTable
from minisgl_core.bench.model_folder import write_geometry
from minisgl_core.bench.plot import LABELS, WIDTH, bar_chart
from minisgl_core.bench.report import one_line
from minisgl_core.bench.variants import DEFAULT, choose_variants
from minisgl_core.cli.app import main
from minisgl_core.engine import EngineConfig
from minisgl_core.env import ENV
from minisgl_core.errors import BackendError, UsageError
from minisgl_core.modelconfig.geometries import geometry
from support.bench_targets import mute

TINY = ("--geometry", "tiny", "--num-page-override", "9000", "--requests", "2", "--short")


def test_the_table_on_a_cpu(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out, plot = tmp_path / "a" / "rows.json", tmp_path / "rows.svg"
    rows = "overlap,prefix-cache,attention fa,linear unfused,moe,chunk 8192,page 16"
    code = main(
        ["bench", "offline", *TINY, "--ablate", "--rows", rows, "--json", "--out", str(out), "--plot", str(plot)]
    )
    printed = json.loads(capsys.readouterr().out)
    assert code == 0 and json.loads(out.read_text()) == printed
    found = {(row["variant"], row["mode"]): row for row in printed["rows"]}
    assert list(found)[:2] == [("default", "offline"), ("default", "shared-prefix")]
    assert all(found["default", mode]["relative"] == 1.0 for mode in ("offline", "shared-prefix"))
    base = found["default", "shared-prefix"]["rate"]
    cache = found["prefix-cache off", "shared-prefix"]
    assert cache["relative"] == pytest.approx(cache["rate"] / base) and cache["changed"] == {}
    assert found["page 16", "offline"]["changed"]["page_size"] == "16" and found["overlap off", "offline"]["rate"] > 0
    refused = found["attention fa", "offline"]["error"]  # with the remedy, and the reasons against every variant
    assert refused.startswith("you named fa for attention; it needs CUDA; leave it out, or use ")
    assert "supported cuda" in refused and len(refused) > 400
    assert found["moe loop (no graphs)", "latency"]["note"] == "the model has no experts"
    assert found["chunk 8192", "offline"]["note"] == "the default is the same"
    assert found["linear unfused", "latency"]["note"] == "the plan has no linear:skinny"
    unmeasured = [found[name, "offline"] for name in ("attention fa", "chunk 8192")]
    unmeasured.append(found["moe loop (no graphs)", "latency"])
    assert all(row["relative"] is None and "rate" not in row for row in unmeasured)
    assert printed["workloads"]["offline"]["requests"] == 2
    drawn = ET.fromstring(plot.read_text())
    labels = [text.text for text in drawn.iter("{http://www.w3.org/2000/svg}text")]
    assert "prefix-cache off (shared-prefix)" in labels and "attention fa" not in labels


def test_the_default_again_and_a_loop_over_experts_are_measured(capsys: pytest.CaptureFixture[str]) -> None:
    tiny = ("--geometry", "tiny-moe", "--num-page-override", "9000", "--requests", "2", "--short")
    assert main(["bench", "offline", *tiny, "--ablate", "--rows", "moe,default", "--json"]) == 0
    rows = {(row["variant"], row["mode"]): row for row in json.loads(capsys.readouterr().out)["rows"]}
    loop_row, again = rows["moe loop (no graphs)", "latency"], rows["default again", "offline"]
    assert set(rows) == {
        ("default", "offline"), ("default", "latency"), ("moe loop (no graphs)", "latency"),
        ("default again", "offline"),
    }  # fmt: skip
    assert all(row["rate"] > 0 for row in rows.values()) and again["changed"] == {}
    assert loop_row["changed"] == {"moe": "torch@minisgl-cpu-sim"}
    (loop,) = choose_variants(["moe"])
    assert loop.applied_to(EngineConfig("m")).cuda_graph_max_bs == 0  # elsewhere graphs would refuse it


def test_a_long_error_ends_with_a_whole_word_in_the_table(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    error = ", ".join(f"reason{number}" for number in range(100))
    default = {**row("default", 100.0), "tpot_ms": 1.0}
    rows = [default, {"variant": "page 16", "mode": "offline", "relative": None, "error": error}]
    monkeypatch.setattr("minisgl_core.bench.ablate.ablate", lambda *_: iter(rows))
    assert main(["bench", "offline", *TINY, "--ablate"]) == 0
    printed = capsys.readouterr()
    assert f"page 16, offline: {error}\n" in printed.err
    cell = printed.out.splitlines()[-1].split("  ")[-1]
    last = cell.removesuffix(" ...").rpartition(" ")[2]
    assert cell.endswith(" ...") and 200 < len(cell) <= 240 and f"{last}, " in error


@pytest.mark.parametrize(
    ("text", "limit", "said"),
    [
        ("one  two\nthree", 13, "one two three"),
        ("one two three", 12, "one two ..."),
        ("one two three", 11, "one two ..."),
        ("one, two three", 9, "one ..."),
        ("one, two three", 8, "one ..."),
        ("onetwothree", 8, "onet ..."),
        ("", 8, ""),
    ],
)
def test_one_line(text: str, limit: int, said: str) -> None:
    assert one_line(text, limit) == said


def test_a_default_that_cannot_be_measured_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    small = ("--geometry", "tiny", "--num-page-override", "40", "--page-size", "1", "--requests", "1")
    assert main(["bench", "prefill", *small, "--ablate", "--rows", "overlap"]) == 1
    out = capsys.readouterr().out
    assert out.count("a prompt of 1024 tokens leaves no room") == 2 or out.count("instead of") == 2


FACTS = {"mode": "offline", "geometry": "tiny", "repeat": 1, "device": "cpu", "versions": {"torch": "2.13.0"}}
WORK = {"offline": {"requests": 2}}


def test_a_row_that_is_given_up_says_by_which_option(tmp_path: Path) -> None:
    config = EngineConfig(str(write_geometry(geometry("tiny"), tmp_path)), device="cpu", dummy_weights=True)
    rows = list(ablate(Job(config, "latency", {}), (), limit_s=1.0, target=mute))
    assert [row["error"] for row in rows] == ["it sent nothing for 1 s (--row-limit)"]


@pytest.mark.parametrize(
    ("options", "rows", "said"),
    [
        ((), 0, "interrupted before the first row"),
        ((), 1, "interrupted after 1 row, shown above; --out keeps them"),
        (("--out", "rows.json"), 2, "interrupted after 2 rows, kept in rows.json"),
    ],
)
def test_an_interrupt_says_where_the_rows_are(
    options: tuple[str, ...],
    rows: int,
    said: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupted(*_: Any) -> Iterator[dict[str, Any]]:
        yield from [row("default", 100.0), row("page 16", 90.0)][:rows]
        raise KeyboardInterrupt

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("minisgl_core.bench.ablate.ablate", interrupted)
    assert main(["bench", "offline", *TINY, "--ablate", *options]) == 130
    printed = capsys.readouterr()
    assert not printed.out and printed.err.splitlines()[-1] == said
    if options:
        assert len(json.loads(Path("rows.json").read_text())["rows"]) == rows


def row(variant: str, rate: float, mode: str = "offline") -> dict[str, Any]:
    return {"variant": variant, "mode": mode, "rate": rate, "relative": rate / 100}


def test_rows_of_a_later_run_join_the_table(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    first = AblationTable({**FACTS, "command": "bench 1"}, WORK, path)
    for each in (row("default", 100), row("page 16", 90), row("kv torch", 80)):
        first.add(each)
    both = {**WORK, "shared-prefix": {"requests": 1}}
    second = AblationTable({**FACTS, "command": "bench 2"}, both, path)
    added = [row("default", 200), row("default", 50, "shared-prefix"), row("overlap off", 120), row("page 16", 180)]
    for each in added:
        second.add(each)
    assert second.rows == [added[0], added[1], added[2], row("kv torch", 80), added[3]]
    assert json.loads(path.read_text()) == second.content == {
        **FACTS, "commands": ["bench 1", "bench 2"], "workloads": both, "rows": second.rows,
    }  # fmt: skip
    assert AblationTable(FACTS, WORK, path).content["workloads"] == both, "what other rows need is not forgotten"


def test_two_runs_at_once_lose_no_row(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    first, second = AblationTable(FACTS, WORK, path), AblationTable(FACTS, WORK, path)
    for table, name in ((first, "default"), (second, "default"), (first, "page 16"), (second, "kv torch")):
        table.add(row(name, 100))
    rows = json.loads(path.read_text())["rows"]
    assert [each["variant"] for each in rows] == ["default", "kv torch", "page 16"]
    path.unlink()
    second.add(row("page 1", 90))
    rows = json.loads(path.read_text())["rows"]
    assert [each["variant"] for each in rows] == ["default", "kv torch", "page 1", "page 16"]


def test_of_two_runs_at_once_the_one_of_something_else_is_refused_before_any_row(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    first = AblationTable(FACTS, WORK, path)
    with pytest.raises(UsageError, match="geometry is tiny there and tiny-moe here"):
        AblationTable({**FACTS, "geometry": "tiny-moe"}, WORK, path)
    path.unlink()
    other = AblationTable({**FACTS, "geometry": "tiny-moe"}, WORK, path)
    with pytest.raises(UsageError, match="geometry is tiny-moe there and tiny here"):
        first.add(row("default", 100))
    assert json.loads(path.read_text()) == other.content


def test_rows_of_another_default_are_recognised_by_its_rate() -> None:
    table = AblationTable(FACTS, WORK)
    for each in (row("default", 100), row("page 16", 90), row("kv torch", 0)):
        table.add(each)
    assert [table.other_default(each) for each in table.rows] == [None, None, None]
    table.add({**row("default", 200), "relative": 1.0})
    table.add({**row("page 1", 50), "relative": 0.25})
    assert [table.other_default(each) for each in table.rows] == [None, None, None, pytest.approx(100)]
    assert table.other_default({**row("page 16", 90, "latency")}) == pytest.approx(100), "there is none of its mode"


def test_a_default_that_failed_does_not_replace_one_that_was_measured(tmp_path: Path) -> None:
    failed = {"variant": "default", "mode": "offline", "error": "no memory", "relative": None}
    table = AblationTable(FACTS, WORK, tmp_path / "rows.json")
    table.add(failed)
    assert table.rows == [failed]
    good = row("default", 100)
    for each in (good, row("page 16", 90), failed, {**failed, "variant": "page 16"}):
        table.add(each)
    assert table.rows == [good, {**failed, "variant": "page 16"}]


def test_rows_are_in_the_order_of_a_whole_ablation_with_or_without_a_file() -> None:
    table = AblationTable(FACTS, WORK)
    for name in ("of an older version", "page 1", "default"):
        table.add(row(name, 1))
    assert [each["variant"] for each in table.rows] == ["default", "page 1", "of an older version"]


@pytest.mark.parametrize(
    ("facts", "work", "message"),
    [
        ({"geometry": "tiny-moe"}, WORK, "geometry is tiny there and tiny-moe here"),
        (
            {"device": "NVIDIA H200", "versions": {"torch": "2.14.0"}},
            WORK,
            "device is cpu there and NVIDIA H200 here; versions: torch is 2.13.0 there and 2.14.0 here",
        ),
        ({"tp_size": 2}, WORK, "tp_size is absent there and 2 here"),
        ({}, {"offline": {"requests": 3}}, "work of offline: requests is 2 there and 3 here"),
    ],
)
def test_a_table_of_something_else_is_left_alone(
    tmp_path: Path, facts: dict[str, Any], work: dict[str, Any], message: str
) -> None:
    path = tmp_path / "rows.json"
    AblationTable(FACTS, WORK, path).add(row("default", 100))
    before = path.read_text()
    with pytest.raises(UsageError) as caught:
        AblationTable({**FACTS, **facts}, work, path)
    assert f"cannot be added to: {message}; name another file, or remove it" in str(caught.value)
    assert path.read_text() == before and caught.value.field == "--out"


@pytest.mark.parametrize(
    "text",
    [
        *("", "[]", "{}", '{"rows": []}', '{"workloads": [], "rows": []}', '{"workloads": {}, "rows": 1}'),
        '{"workloads": {}, "rows": [{"variant": "x", "mode": "y"}]}',
    ],
)
def test_a_file_that_holds_no_table_is_left_alone(tmp_path: Path, text: str) -> None:
    path = tmp_path / "rows.json"
    path.write_text(text)
    with pytest.raises(UsageError, match="is there and holds no ablation to add to: "):
        AblationTable(FACTS, WORK, path)
    assert path.read_text() == text


@pytest.mark.slow
def test_two_runs_of_the_command_share_a_file(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, plot = tmp_path / "rows.json", tmp_path / "rows.svg"
    call = ["bench", "prefill", *TINY, "--ablate", "--out", str(out), "--plot", str(plot)]
    assert main([*call, "--rows", "chunk 2048"]) == 0
    assert " (of " not in capsys.readouterr().out and "*" not in plot.read_text()
    first = {row["variant"]: row for row in json.loads(out.read_text())["rows"]}
    assert main([*call, "--rows", "overlap"]) == 0
    table = capsys.readouterr().out
    assert [line.split("  ")[0] for line in table.splitlines()[1:]] == ["default", "overlap off", "chunk 2048"]
    base = first["default"]["rate"]
    assert [f" (of {base:,.0f})" in line for line in table.splitlines()] == [False, False, False, True]
    drawn = plot.read_text()
    assert ">chunk 2048 *<" in drawn and ">overlap off<" in drawn and "default (* of another run)<" in drawn
    second = {row["variant"]: row for row in json.loads(out.read_text())["rows"]}
    assert second["chunk 2048"] == first["chunk 2048"] and second["default"] != first["default"]
    changes = (
        (("--page-size", "16"), "0", "page_size is 1 there and 16 here"),
        (("--backend", "kv=torch"), "0", "kv is cpu@minisgl-cpu-sim there and torch@minisgl-cpu-sim here"),
        (("--max-prefill-tokens", "512"), "0", "max_prefill_tokens is 8192 there and 512 here"),
        ((), "1", "overlap is on there and off here"),
    )
    for changed, overlap_off, said in changes:
        monkeypatch.setenv("MINISGL_DISABLE_OVERLAP_SCHEDULING", overlap_off)
        assert main([*call, "--rows", "overlap", *changed]) == 2
        assert f"cannot be added to: {said}; name another file, or remove it" in capsys.readouterr().err
    monkeypatch.delenv("MINISGL_DISABLE_OVERLAP_SCHEDULING")
    assert main([*call, "--rows", "overlap", "--bench-seed", "3"]) == 2  # as many tokens, but others
    assert "cannot be added to: work of prefill: seed is 0 there and 3 here; name" in capsys.readouterr().err
    namesake = write_geometry(replace(geometry("tiny"), vocab_size=1024), tmp_path / "tiny")
    arguments = [str(namesake) if each == "tiny" else each.replace("--geometry", "--model") for each in call]
    assert main(arguments) == 2
    assert "cannot be added to: model: vocab_size is 512 there and 1024 here; name" in capsys.readouterr().err


def test_bars_by_hand() -> None:
    drawn = ET.fromstring(bar_chart("a < b", [("one", 0.5), ("two", 2.0)]))
    space = "{http://www.w3.org/2000/svg}"
    bars = [rect.get("width") for rect in drawn.iter(f"{space}rect")][1:]
    assert bars == [f"{WIDTH / 4:.1f}", f"{WIDTH:.1f}"]
    assert drawn.find(f"{space}text") is not None and drawn.find(f"{space}text").text == "a < b"  # type: ignore[union-attr]
    line = drawn.find(f"{space}path")
    assert line is not None and str(line.get("d")).startswith(f"M{LABELS + WIDTH / 2:.1f} ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--rows", "overlap"), "--rows belongs to --ablate"),
        (("--part", "1/2"), "--part belongs to --ablate"),
        (("--ablate", "--part", "3/2"), "give I/N"),
        (("--ablate", "--part", "x"), "give I/N"),
        (("--ablate", "--rows", "grafs"), "did you mean 'graphs"),
        (("--ablate", "--plot", "x.png"), "name a .svg file"),
        (("--ablate", "--rows", ","), "name rows, or leave it out"),
        (("--ablate", "--row-limit", "nan"), "--row-limit is nan"),
        (("--ablate", "--out", "/proc/a.json"), "--out /proc/a.json cannot be written"),
        (("--ablate", "--plot", "/proc/self/status/a.svg"), "cannot be written"),
        (("--ablate", "--out", "/"), "--out / cannot be written"),
        (("--model", "demo"), "--model and --geometry are both given"),
    ],
)
def test_options_that_mean_nothing(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "offline", "--geometry", "tiny", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_overlap_off_is_measured_with_overlap_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[bool] = []

    @contextmanager
    def session(config: EngineConfig, *_: Any) -> Iterator[Any]:
        started.append(not ENV.DISABLE_OVERLAP_SCHEDULING.value)
        raise BackendError("not started in this test")
        yield

    monkeypatch.setattr("minisgl_core.bench.ablate.open_session", session)
    config = EngineConfig(str(write_geometry(geometry("tiny"), tmp_path)), device="cpu", dummy_weights=True)
    variants = (DEFAULT, *choose_variants(["overlap off", "page 16", "default again"]))
    job = Job(config, "latency", {"latency": make_workload("latency")})
    switches = {switch.name: switch.value for switch in ENV.all()}
    try:
        measure_rows(SimpleNamespace(send=lambda _: None), job, variants, switches)  # type: ignore[arg-type]
    finally:
        for switch in ENV.all():
            switch.reset()
    assert [variant.name for variant in variants] == ["default", "overlap off", "page 16", "default again"]
    assert started == [True, False, True, True]
