"""Whatever a check does, the others are run and the report contains what happened."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from minisgl_core.registry import DeviceFacts
from support.child_env import child_env
from support.gpu.check import Check, Context, Record
from support.gpu.collect import collected, named, sessions_of
from support.gpu.runner import OUT_OF_TIME, Settings, in_turn, run_checks

PLANTED = Path(__file__).parent / "planted"
Run = Callable[..., dict[str, Record]]


@pytest.fixture(scope="module")
def planted() -> list[Check]:
    return collected(Context(DeviceFacts("cpu"), True, Path()), PLANTED)


@pytest.fixture
def run(planted: list[Check], tmp_path: Path) -> Run:
    """``run("good", "hangs")`` -> records by name."""

    def go(*names: str, jobs: int = 3, deadline: float | None = None, checks: Any = ()) -> dict[str, Record]:
        records: list[Record] = []
        context = Context(DeviceFacts("cpu"), True, tmp_path)
        run_checks(checks or named(planted, names), Settings(context, jobs, deadline, PLANTED), records.append)
        assert len({record.name for record in records}) == len(records)
        return {record.name: record for record in records}

    return go


def test_a_failure_is_reported_and_the_rest_of_its_session_runs_in_another_process(run: Run) -> None:
    found = run("shared/*", "fails", "raises", "last", "good", "skips", "environment", "without-its-fixture")
    assert {name: record.status for name, record in found.items()} == {
        "shared/first": "ok",
        "shared/second": "ok",
        "fails": "failed",
        "raises": "failed",
        "last": "ok",
        "good": "ok",
        "skips": "skipped",
        "environment": "ok",
        "without-its-fixture": "failed",
    }
    assert found["good"].figures == {"seen": "cpu"}
    assert found["environment"].figures == {"value": "7"}
    assert found["skips"].error == ("there is no such thing here",) and found["skips"].cases == (3,)
    assert (found["shared/first"].cases, found["shared/second"].cases) == ((1,), (2,))
    assert found["fails"].error == ("two and two", "are not five")
    assert found["fails"].figures == {"tried": 3} and found["fails"].cases == (1, 2)
    assert found["raises"].error[0] == "ValueError: a planted error"
    assert "planted_checks.py" in found["raises"].error[-1] and "test_raises" in found["raises"].error[-1]
    assert found["without-its-fixture"].error[0] == "RuntimeError: a planted fixture"
    assert found["shared/first"].figures == found["shared/second"].figures != found["last"].figures


@pytest.mark.parametrize(
    ("jobs", "order"),
    [(1, ["short", "versions", "many", "plan", "long"]), (2, ["versions", "plan", "long", "many", "short"])],
)
def test_where_several_run_at_once_the_longest_begin_after_the_short_ones(jobs: int, order: list[str]) -> None:
    costs = [("alone", 90.0), ("short", 11.0), ("versions", 5.0), ("many", 9.0), ("many", 9.0), ("plan", 10.0),
             ("long", 50.0)]  # fmt: skip
    made = [Check(f"{name}{i}", seconds=cost, session=name, alone=name == "alone")
            for i, (name, cost) in enumerate(costs)]  # fmt: skip
    alone, together = in_turn(sessions_of(made).values(), jobs)
    assert [session[0].session for session in alone] == ["alone"]
    assert [session[0].session for session in together] == order
    assert [len(session) for session in together if session[0].session == "many"] == [2]


def test_a_crash_harms_nothing_but_its_check(run: Run) -> None:
    found = run("crashes", "after-the-crash", "leaves", "dies-at-exit")
    assert found["crashes"].status == "failed" and found["after-the-crash"].status == "ok"
    assert found["crashes"].error[0] == "the process was ended by SIGSEGV"
    assert found["crashes"].figures == {"before": "the crash"}
    assert any("test_crashes" in line for line in found["crashes"].error)
    assert found["leaves"].error == ("the process ended with exit code 3", "last output")
    assert found["dies-at-exit"].status == "ok"
    assert found["dies-at-exit (at exit)"].status == "failed"


def test_a_hang_is_ended_with_all_that_it_started(run: Run) -> None:
    began = time.monotonic()
    found = run("hangs", "after-the-hang")
    assert time.monotonic() - began < 90
    assert found["hangs"].status == "failed" and found["after-the-hang"].status == "ok"
    assert found["hangs"].error[0] == "it did not end within 1 s"
    child = found["hangs"].figures["child"]
    for _ in range(100):
        state = Path(f"/proc/{child}/stat")
        if not state.exists() or state.read_text().split()[2] == "Z":
            return
        time.sleep(0.05)
    pytest.fail(f"process {child} outlived its check")


@pytest.mark.slow
def test_the_budget_ends_what_runs_and_leaves_the_rest_unfinished(run: Run) -> None:
    found = run("good", "endless", jobs=2, deadline=time.monotonic() + 20)
    assert {name: record.status for name, record in found.items()} == {"endless": "unfinished", "good": "ok"}
    assert found["endless"].error[0] == OUT_OF_TIME
    late = run("good", "shared/first", deadline=time.monotonic() - 1)
    assert {record.status for record in late.values()} == {"unfinished"}


def test_tests_that_cannot_be_collected(run: Run, tmp_path: Path) -> None:
    """In a child that is a failure of its check; without a list nothing runs."""
    folder = tmp_path / "broken"
    folder.mkdir()
    (folder / "pytest.ini").write_text((PLANTED / "pytest.ini").read_text())
    file = folder / "planted_broken.py"
    file.write_text("raise RuntimeError('this file cannot be imported')\n")
    found = run(checks=[Check("gone", f"{file}::test_gone")])
    assert found["gone"].status == "failed" and "(before the check began)" in found["gone"].error[0]
    with pytest.raises(RuntimeError, match="this file cannot be imported"):
        collected(Context(DeviceFacts("cpu"), True, Path()), folder)


def test_what_several_need_is_made_once(run: Run) -> None:
    found = run("once/a", "once/b")
    assert found["once/a"].figures == found["once/b"].figures


@pytest.mark.slow
def test_what_must_be_alone_runs_alone(run: Run) -> None:
    found = run("span/*", jobs=4)
    assert {record.status for record in found.values()} == {"ok"}
    spans = {name: record.figures["span"] for name, record in found.items()}
    for name in ("span/alone-a", "span/alone-b"):
        began, ended = spans.pop(name)
        assert all(other_ended <= began or ended <= other_began for other_began, other_ended in spans.values())


PROGRAM = """
import functools, pathlib, sys
from support.gpu import command
folder = pathlib.Path(sys.argv.pop(1))
command.collected = functools.partial(command.collected, folder=folder)
command.Settings = functools.partial(command.Settings, folder=folder)
sys.exit(command.main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_a_killed_run_leaves_a_report(tmp_path: Path) -> None:
    """The command line on the planted checks, without plugins of pytest, terminated while a check hangs."""
    path = tmp_path / "report.json"
    arguments = ["--device", "cpu", "--json", str(path), "--jobs", "2", "--only", "good", "endless", "skips"]
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", PROGRAM, str(PLANTED), *arguments, "--commit", "abc"],
        env=child_env(PYTEST_ADDOPTS="-p no:xdist -p no:timeout"),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline:
        if path.exists() and json.loads(path.read_text())["counts"]["unfinished"] == 1:
            break
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    out, errors = process.communicate(timeout=30)
    assert (process.returncode, errors) == (1, "")
    report = json.loads(path.read_text())
    statuses = {check["name"]: check["status"] for check in report["checks"]}
    assert statuses == {"good": "ok", "skips": "skipped", "endless": "unfinished"}
    assert report["passed"] is False and report["device"]["kind"] == "cpu" and report["commit"] == "abc"
    assert report["versions"]["minisgl-core"] and report["options"]["jobs"] == 2
    assert "ended early" in out and "FAILED: 1 ok, 1 skipped, 1 unfinished" in out
