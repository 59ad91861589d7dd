"""What a plugin prints, and its attempts to end the process, in fresh processes where the descriptors matter."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from minisgl_core.errors import BackendError
from minisgl_core.registry import Choice, build
from minisgl_core.registry.guest import ProcessEndsError, as_guest, told_if_slow


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)


def test_print_and_compiled_code_both_go_to_standard_error_and_only_inside() -> None:
    done = run(
        "import ctypes, os\n"
        "from minisgl_core.registry.guest import as_guest\n"
        "libc = ctypes.CDLL(None)\n"
        "print('before')\n"
        "with as_guest():\n"
        "    with as_guest() as inner:\n"
        "        print('printed')\n"
        "    libc.printf(b'compiled\\n')\n"
        "    os.write(1, b'written\\n')\n"
        "print('after', inner.printed)\n"
    )
    assert (done.returncode, done.stdout) == (0, "before\nafter printed\n")
    assert sorted(done.stderr.split()) == ["compiled", "printed", "written"]


@pytest.mark.parametrize("closed", ["os.close(1)", "os.close(2)", "sys.stdout = None", "sys.stderr = None"])
def test_closed_descriptors_are_no_fault(closed: str) -> None:
    done = run(
        f"import os, sys\nfrom minisgl_core.registry.guest import as_guest\n{closed}\n"
        "with as_guest():\n    print('x')\nos._exit(7)\n"
    )
    assert (done.returncode, done.stdout) == (7, ""), done.stderr


def test_guests_of_two_threads_leave_standard_output_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    stdout = io.StringIO()
    monkeypatch.setattr(sys, "stdout", stdout)
    both_in, first_out = threading.Barrier(2), threading.Event()

    def first() -> None:
        with as_guest():
            both_in.wait(10)
        first_out.set()

    thread = threading.Thread(target=first)
    thread.start()
    with as_guest():
        both_in.wait(10)
        assert first_out.wait(10)
    thread.join()
    assert sys.stdout is stdout


def test_a_guest_that_replaces_standard_output_does_not_keep_it(capsys: pytest.CaptureFixture[str]) -> None:
    with as_guest():
        sys.stdout = io.StringIO()
    print("mine")
    assert capsys.readouterr().out == "mine\n"


def test_os_exit_raises_what_a_guests_own_handler_lets_pass() -> None:
    def leave() -> None:
        try:
            os._exit(3)
        except Exception:
            pytest.fail("it went on")

    real = os._exit
    with pytest.raises(ProcessEndsError, match=r"it calls os\._exit\(3\), which would end every command"), as_guest():
        leave()
    assert os._exit is real


def test_os_exit_still_ends_a_forked_child_and_whoever_keeps_it() -> None:
    done = run(
        "import os\nfrom minisgl_core.registry.guest import as_guest\n"
        "with as_guest():\n"
        "    kept, child = os._exit, os.fork()\n"
        "    if child == 0:\n        os._exit(5)\n"
        "    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 5\n"
        "kept(6)\n"
    )
    assert done.returncode == 6, done.stderr


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("import os\nos._exit(0)", "it calls os._exit(0), which would end every command"),
        ("import sys\nsys.exit('bye')", "SystemExit: bye"),
    ],
)
def test_a_plugin_that_ends_the_process_is_named_and_left_out(
    world: Any, make_spec: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, told: str
) -> None:
    (tmp_path / "leaving_plugin.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    world.distribution("leaving", "[minisgl]\nmain = leaving_plugin\n")
    world.plugin("good", make_spec("attention", "fine"))
    registry = world.registry()
    assert {record.distribution: record.failure for record in registry.failures()} == {"leaving": told}
    assert [item.label for item in registry.candidates("attention")] == ["fine@good"]


@pytest.mark.parametrize("body", ["import os; os._exit(0)", "raise SystemExit(0)"])
def test_a_factory_that_ends_the_process_fails_the_start(world: Any, body: str) -> None:
    def construct(self: Any, setup: object, options: object) -> None:
        exec(body)

    methods = dict.fromkeys(("capture", "pad_batch", "can_replay", "replay", "close"), lambda self: None)
    world.module("leaving_factory", Runner=type("Runner", (), {"__init__": construct, **methods}))
    choice = Choice("graph", "mine", "", "dist", "1", "leaving_factory:Runner")
    with pytest.raises(BackendError, match=r"graph backend mine@dist 1 failed to start: (ProcessEnds|SystemExit)"):
        build(choice, None)


def test_what_a_plugin_prints_is_recorded_with_its_first_line(
    world: Any, make_spec: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    module = world.plugin("talks", make_spec("attention", "fine"))
    silent = module.minisgl_attention_backends

    def offer() -> Any:
        print("\nhello\nagain")
        return silent()

    offer.minisgl_impl = silent.minisgl_impl  # type: ignore[attr-defined]
    module.minisgl_attention_backends = offer
    (record,) = [one for one in world.registry().plugins if one.distribution == "talks"]
    assert (record.failure, record.printed, record.to_json()["printed"]) == ("", "hello", "hello")
    assert capsys.readouterr() == ("", "\nhello\nagain\n")


def test_only_what_is_slow_is_told_and_once(capsys: pytest.CaptureFixture[str]) -> None:
    with told_if_slow(patience_s=0.1) as doing:
        doing("importing plugin quick")
        doing("importing plugin slow")
        time.sleep(0.5)
    time.sleep(0.2)
    assert capsys.readouterr().err == "importing plugin slow takes more than 0.1 s\n"


def test_the_users_interrupt_says_whose_import_it_ended(
    world: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "waiting_plugin.py").write_text("raise KeyboardInterrupt")
    monkeypatch.syspath_prepend(tmp_path)
    world.distribution("waiting", "[minisgl]\nmain = waiting_plugin\n")
    with pytest.raises(KeyboardInterrupt):
        world.registry()
    assert capsys.readouterr().err == "interrupted while plugin waiting was loaded\n"
