"""Whatever a check does, the others are made and the report says what happened."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import planted
import pytest

from gpu_check.checks import Check, Record
from gpu_check.process import OUT_OF_TIME, Settings, in_turn, run_checks, sessions_of
from minisgl_core.registry import DeviceFacts

CPU = DeviceFacts("cpu")
Run = Callable[..., dict[str, Record]]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """``run("good", "hangs")`` -> records by name."""

    def go(*names: str, **settings: Any) -> dict[str, Record]:
        records: list[Record] = []
        path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
        defaults = {"catalogue": "planted:checks", "env": {"PYTHONPATH": path}, "jobs": 3}
        run_checks(_chosen(names), Settings(CPU, True, tmp_path, **{**defaults, **settings}), records.append)
        assert len({record.name for record in records}) == len(records)
        return {record.name: record for record in records}

    return go


def _chosen(names: Sequence[str]) -> list[Check]:
    return [check for check in planted.checks(CPU, True) if check.name in names]


def test_a_failure_is_told_and_the_rest_of_its_session_goes_on_elsewhere(run: Run) -> None:
    found = run("shared/first", "shared/fails", "shared/raises", "shared/last", "good", "skips", "environment")
    assert {name: record.status for name, record in found.items()} == {
        "shared/first": "ok",
        "shared/fails": "failed",
        "shared/raises": "failed",
        "shared/last": "ok",
        "good": "ok",
        "skips": "skipped",
        "environment": "ok",
    }
    assert found["good"].figures == {"seen": "cpu"}
    assert found["environment"].figures == {"value": "7"}
    assert found["skips"].error == ("there is no such thing here",) and found["skips"].cases == (3,)
    assert found["shared/fails"].error == ("two and two", "are not five")
    assert found["shared/fails"].figures == {"tried": 3}
    assert found["shared/raises"].error[0] == "ValueError: a planted error"
    assert "planted.py" in found["shared/raises"].error[-1] and "_raises" in found["shared/raises"].error[-1]
    assert found["shared/first"].figures["pid"] != found["shared/last"].figures["pid"]


@pytest.mark.parametrize(
    ("jobs", "order"),
    [(1, ["short", "versions", "many", "plan", "long"]), (2, ["versions", "plan", "long", "many", "short"])],
)
def test_where_several_run_at_once_the_longest_begin_after_those_of_a_moment(jobs: int, order: list[str]) -> None:
    costs = [("alone", 90.0), ("short", 11.0), ("versions", 5.0), ("many", 9.0), ("many", 9.0), ("plan", 10.0),
             ("long", 50.0)]  # fmt: skip
    made = [Check(f"{name}{i}", lambda here: {}, cost, session=name, alone=name == "alone")
            for i, (name, cost) in enumerate(costs)]  # fmt: skip
    by_itself, together = in_turn(sessions_of(made).values(), jobs)
    assert [session[0].session for session in by_itself] == ["alone"]
    assert [session[0].session for session in together] == order
    assert [len(session) for session in together if session[0].session == "many"] == [2]


def test_a_crash_harms_nothing_but_its_check(run: Run) -> None:
    found = run("crashes", "after-the-crash", "leaves", "dies-at-exit")
    assert found["crashes"].status == "failed" and found["after-the-crash"].status == "ok"
    assert found["crashes"].error[0] == "the process was ended by SIGSEGV"
    assert found["crashes"].figures == {"before": "the crash"}
    assert any("_crashes" in line for line in found["crashes"].error)
    assert found["leaves"].error == ("the process ended with exit code 3", "last words")
    assert found["dies-at-exit"].status == "ok"
    assert found["dies-at-exit (at exit)"].status == "failed"


def test_a_hang_is_ended_with_all_that_it_started(run: Run) -> None:
    began = time.monotonic()
    found = run("hangs", "after-the-hang")
    assert time.monotonic() - began < 60
    assert found["hangs"].status == "failed" and found["after-the-hang"].status == "ok"
    assert found["hangs"].error[0] == "it did not end within 1 s"
    child = found["hangs"].figures["child"]
    for _ in range(100):
        state = Path(f"/proc/{child}/stat")
        if not state.exists() or state.read_text().split()[2] == "Z":
            return
        time.sleep(0.05)
    pytest.fail(f"process {child} outlived its check")


def test_the_budget_ends_what_runs_and_leaves_the_rest_undone(run: Run) -> None:
    found = run("endless", "good", jobs=1, deadline=time.monotonic() + 20)
    statuses = {name: record.status for name, record in found.items()}
    assert statuses == {"endless": "unfinished", "good": "ok"}
    assert found["endless"].error[0] == OUT_OF_TIME
    late = run("good", "shared/first", deadline=time.monotonic() - 1)
    assert {record.status for record in late.values()} == {"unfinished"}


def test_a_catalogue_that_cannot_be_listed_is_a_failure_of_each_check(run: Run) -> None:
    found = run("good", "skips", catalogue="planted:broken")
    assert {record.status for record in found.values()} == {"failed"}
    assert found["good"].error[0] == "the process ended with exit code 1 (before the check began)"
    assert found["good"].error[-1] == "RuntimeError: this catalogue cannot be listed"


def test_what_is_needed_by_several_is_made_once(run: Run) -> None:
    found = run("once-a", "once-b")
    assert found["once-a"].figures == found["once-b"].figures


def test_what_must_be_alone_has_nothing_beside_it(run: Run) -> None:
    found = run("beside-a", "alone-a", "beside-b", "alone-b", jobs=4)
    assert {record.status for record in found.values()} == {"ok"}
    spans = {name: record.figures["span"] for name, record in found.items()}
    for name in ("alone-a", "alone-b"):
        began, ended = spans.pop(name)
        assert all(other_ended <= began or ended <= other_began for other_began, other_ended in spans.values())


PROGRAM = """
import sys
sys.path[:0] = {paths!r}
from gpu_check import catalogue
import planted
catalogue.checks = planted.checks
from gpu_check import command, process
command.Settings = lambda *args, **more: process.Settings(*args, **more, catalogue="planted:checks")
sys.exit(command.main(sys.argv[1:]))
"""


def test_a_killed_run_leaves_a_report(tmp_path: Path) -> None:
    """The command line on the planted catalogue, terminated while a check hangs."""
    here = Path(__file__).parent
    paths = [str(here.parents[1] / "tools"), str(here)]
    report = tmp_path / "report.json"
    arguments = ["--device", "cpu", "--json", str(report), "--jobs", "2", "--only", "good", "endless", "skips"]
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM.format(paths=paths), *arguments],
        env={**os.environ, "PYTHONPATH": str(here)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if report.exists() and json.loads(report.read_text())["counts"]["unfinished"] == 1:
            break
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    out, errors = process.communicate(timeout=30)
    assert (process.returncode, errors) == (1, "")
    told = json.loads(report.read_text())
    statuses = {check["name"]: check["status"] for check in told["checks"]}
    assert statuses == {"good": "ok", "skips": "skipped", "endless": "unfinished"}
    assert told["passed"] is False and told["device"]["kind"] == "cpu"
    assert told["versions"]["minisgl-core"] and told["options"]["jobs"] == 2
    assert "ended early" in out and "FAILED: 1 ok, 1 skipped, 1 unfinished" in out
