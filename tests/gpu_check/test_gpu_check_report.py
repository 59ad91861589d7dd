"""Parts, names, reports and the command line, without running anything."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import pytest

from minisgl_core.errors import BackendError, UsageError
from minisgl_core.registry import DeviceFacts
from support.gpu.check import Check, Context, Record
from support.gpu.collect import LISTED, collected, named, parse_part, part_of
from support.gpu.command import main
from support.gpu.report import NOT_RUN, Report, default_path, header_of, merged

H200 = DeviceFacts("cuda", sm=90, name="NVIDIA H200", driver="580.1")


def check(name: str, seconds: float = 1.0, session: str = "", cases: tuple[int, ...] = ()) -> Check:
    return Check(name, "", seconds, session=session, cases=cases)


def drawn(seed: int) -> list[Check]:
    draw = Random(seed)
    sessions = [("", "a", "b", "c")[draw.randrange(4)] for _ in range(30)]
    return [check(f"check-{i}", draw.uniform(1, 60), session) for i, session in enumerate(sessions)]


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_parts_are_all_of_it_once_and_sessions_stay_whole(count: int) -> None:
    for seed in range(5):
        checks = drawn(seed)
        parts = [part_of(checks, index, count) for index in range(1, count + 1)]
        assert sorted(item.name for part in parts for item in part) == sorted(item.name for item in checks)
        homes = [{item.process for item in part} for part in parts]
        assert sum(map(len, homes)) == len(set.union(*homes))
        again = [[item.name for item in part_of(drawn(seed), index, count)] for index in range(1, count + 1)]
        assert again == [[item.name for item in part] for part in parts]


def test_parts_cost_about_the_same() -> None:
    checks = [check(f"check-{i}", seconds) for i, seconds in enumerate((90, 60, 60, 30, 30, 20, 10, 10, 5, 5))]
    costs = [sum(item.seconds for item in part_of(checks, index, 3)) for index in (1, 2, 3)]
    assert sum(costs) == 320 and max(costs) - min(costs) <= 10


def test_parts_by_name() -> None:
    assert parse_part("2/3") == (2, 3)
    for wrong in ("0/3", "4/3", "3", "a/b", "-1/2", "1/0", "1/2/3"):
        with pytest.raises(UsageError, match="write such as 2/3"):
            parse_part(wrong)


def test_checks_by_name() -> None:
    checks = [check("versions"), check("stress/page-1"), check("stress/page-64"), check("case/69-the-end")]
    assert [item.name for item in named(checks, ["stress/*", "versions"])] == [
        "versions",
        "stress/page-1",
        "stress/page-64",
    ]
    with pytest.raises(UsageError, match="no check is named 'stress/page-65'; did you mean 'stress/page-64'"):
        named(checks, ["stress/page-65"])


def test_where_reports_are_kept() -> None:
    assert default_path(H200).parts[-3:] == ("benchmarks", "results", "gpu_check_h200.json")
    assert default_path(H200, (2, 3)).name == "gpu_check_h200_part2of3.json"
    card = DeviceFacts("cuda", sm=89, name="NVIDIA GeForce RTX 4090")
    assert default_path(card).name == "gpu_check_rtx-4090.json"
    assert default_path(DeviceFacts("cpu")).name == "gpu_check_cpu.json"


def made(*records: Record, device: DeviceFacts = H200) -> Report:
    report = Report(header_of(device, {"torch": "2.11"}, "abc", {"quick": True}), seconds=3.0)
    report.records = {record.name: record for record in records}
    return report


def test_a_report_holds_what_happened_and_what_it_shows(tmp_path: Path) -> None:
    report = made().expecting([check("a", cases=(1,)), check("b", cases=(1, 2)), check("c", cases=(3,)), check("d")])
    assert {record.error for record in report.records.values()} == {(NOT_RUN,)}
    assert not report.passed
    report.records["a"] = Record("a", "ok", 1.25, {"worst_error": 0.0123, "list": [1]}, cases=(1,))
    report.records["b"] = Record("b", "failed", 2.0, {}, ("two lines", "of it"), (1, 2))
    report.records["c"] = Record("c", "skipped", 0.0, {}, ("no [such] program",), (3,))
    path = tmp_path / "new" / "report.json"
    report.write(path)
    data = json.loads(path.read_text())
    assert data["counts"] == {"ok": 1, "failed": 1, "skipped": 1, "unfinished": 1}
    assert data["passed"] is False and data["seconds"] == 3.0 and data["commit"] == "abc"
    assert data["device"] == {"kind": "cuda", "sm": 90, "name": "NVIDIA H200", "driver": "580.1", "count": 1}
    assert data["checks"][1] == {
        "name": "b",
        "status": "failed",
        "seconds": 2.0,
        "figures": {},
        "error": ["two lines", "of it"],
        "cases": [1, 2],
    }
    assert {number: case["status"] for number, case in data["cases"].items()} == {
        "1": "failed",
        "2": "failed",
        "3": "skipped",
    }
    assert data["cases"]["1"]["checks"] == ["a", "b"]
    assert Report.read(path) == report
    assert [item.name for item in path.parent.iterdir()] == ["report.json"]


def test_passed_means_something_was_made_and_nothing_is_wrong() -> None:
    ok, skipped = Record("a", "ok"), Record("b", "skipped", error=("why",))
    assert made(ok, skipped).passed
    assert not made(skipped).passed
    assert not made(ok, Record("b", "unfinished")).passed
    assert not made(ok, Record("b", "failed")).passed


def test_the_list_of_results_names_everything() -> None:
    report = made(
        Record("good", "ok", 1.0, {"worst_error": 0.0123, "graphs": "on"}),
        Record("bad", "failed", 1.0, {}, ("first line", "second line")),
        Record("absent", "skipped", 0.0, {}, ("no [such] program",)),
    )
    text = report.show()
    for wanted in ("cuda sm90 NVIDIA H200", "worst_error 0.0123, graphs on", "no [such] program"):
        assert wanted in text
    assert "FAILED bad\n  first line\n  second line" in text
    assert "FAILED: 1 ok, 1 failed, 1 skipped, 3 s" in text


def test_parts_of_a_run_are_joined(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = made(Record("a", "ok"), Record("b", "unfinished", error=(NOT_RUN,)))
    second = made(Record("b", "ok"), Record("c", "ok"))
    third = made(Record("c", "unfinished"), Record("a", "ok", 9.0))
    paths = [tmp_path / f"{n}.json" for n in range(3)]
    for report, path in zip((first, second, third), paths, strict=True):
        report.write(path)
    whole = merged([Report.read(path) for path in paths])
    assert {name: record.status for name, record in whole.records.items()} == {"a": "ok", "b": "ok", "c": "ok"}
    assert whole.records["a"].seconds == 9.0 and whole.seconds == 9.0 and len(whole.header["parts"]) == 3
    out = tmp_path / "whole.json"
    assert main(["--merge", *map(str, paths), "--json", str(out)]) == 0
    assert "PASSED: 3 ok" in capsys.readouterr().out
    assert Report.read(out) == whole
    made(Record("d", "failed")).write(paths[0])
    assert main(["--merge", *map(str, paths)]) == 1


def test_a_missing_part_is_no_pass(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    reports = [made(Record("a", "ok")), made(Record("b", "ok"))]
    paths = [tmp_path / "1.json", tmp_path / "2.json"]
    for number, (report, path) in enumerate(zip(reports, paths, strict=True), 1):
        report.header = {**report.header, "options": {"part": f"{number}/2"}}
        report.write(path)
    half, whole = tmp_path / "half.json", tmp_path / "whole.json"
    assert main(["--merge", str(paths[0]), "--json", str(half)]) == 1
    assert "part 2/2" in capsys.readouterr().out
    assert main(["--merge", *map(str, paths), "--json", str(whole)]) == 0
    for joined in ([half, paths[1]], [paths[1], half], [whole], [whole, half]):  # joined ones may be joined again
        assert main(["--merge", *map(str, joined)]) == 0
    assert main(["--merge", str(half)]) == 1


def test_only_reports_of_one_installation_are_joined(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [tmp_path / "old.json", tmp_path / "new.json"]
    for version, path in zip(("0.0.1", "0.1.0"), paths, strict=True):
        report = made(Record("a", "ok"))
        report.header = {**report.header, "versions": {"minisgl-core": version}}
        report.write(path)
    assert main(["--merge", *map(str, paths)]) == 2
    assert "2 sets of versions" in capsys.readouterr().err


def test_what_cannot_be_written_is_a_wrong_call(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, blocked = tmp_path / "one.json", tmp_path / "file"
    made(Record("a", "ok")).write(path)
    blocked.touch()
    for target in (tmp_path, blocked / "report.json"):
        assert main(["--merge", str(path), "--json", str(target)]) == 2
        assert "cannot be written" in capsys.readouterr().err
    assert main(["--device", "cpu", "--only", "versions", "--keep", str(blocked / "logs")]) == 2
    assert "models and logs cannot be written to" in capsys.readouterr().err
    assert sorted(item.name for item in tmp_path.iterdir()) == ["file", "one.json"]


def test_only_reports_of_one_device_are_joined(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [tmp_path / "gpu.json", tmp_path / "cpu.json"]
    made(Record("a", "ok")).write(paths[0])
    made(Record("a", "ok"), device=DeviceFacts("cpu")).write(paths[1])
    assert main(["--merge", *map(str, paths)]) == 2
    assert "the reports are of 2 devices" in capsys.readouterr().err
    for text in ("{}", "nothing", '{"format": 99}', "[]"):
        paths[0].write_text(text)
        assert main(["--merge", str(paths[0])]) == 2
        assert "is no report" in capsys.readouterr().err


def test_the_list_and_mistakes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--device", "cpu", "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("versions ") for line in lines) and any(
        line.endswith("not in --quick") for line in lines
    )
    assert main(["--device", "cpu", "--list", "--quick"]) == 0
    quick = capsys.readouterr().out.splitlines()
    assert 0 < len(quick) < len(lines)
    parts: list[str] = []
    for part in ("1/2", "2/2"):
        assert main(["--device", "cpu", "--list", "--quick", "--part", part]) == 0
        parts += capsys.readouterr().out.splitlines()
    assert sorted(parts) == sorted(quick)
    for mistake, text in ((["--part", "3/2"], "--part is '3/2'"), (["--only", "nonsense"], "no check is named")):
        assert main(["--device", "cpu", "--list", *mistake]) == 2
        assert text in capsys.readouterr().err


def test_the_list_needs_no_gpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def absent(kind: str) -> DeviceFacts:
        raise BackendError("no CUDA device can be used: there is none")

    monkeypatch.setattr("support.gpu.command.detect_device", absent)
    assert main(["--list"]) == 0
    printed = capsys.readouterr()
    assert "NVIDIA H200" in printed.err and "all need the GPU" in printed.err
    lines = {line.split()[0]: line for line in printed.out.splitlines()}
    assert list(lines) == [item.name for item in collected(Context(LISTED, False, Path(), elsewhere=True))]
    assert lines["bf16/fa+flashinfer/dense"].endswith(" s  needs flash_attn_interface, flashinfer")
    assert lines["conformance/kv:cuda/cpp"].endswith(" s  needs nvcc")
    assert lines["sanitizer/racecheck/sample"].endswith(" s  needs an NVIDIA GPU, compute-sanitizer; not in --quick")
    assert lines["versions"].endswith(" s")
    assert main(["--only", "versions"]) == 1
    assert "no CUDA device can be used" in capsys.readouterr().err


@pytest.mark.parametrize("wrong", [["--jobs", "0"], ["--budget", "0"], ["--budget", "-5"]])
def test_numbers_that_make_no_sense_are_refused(wrong: list[str], capsys: pytest.CaptureFixture[Any]) -> None:
    assert main(["--device", "cpu", *wrong]) == 2
    assert wrong[0] in capsys.readouterr().err
