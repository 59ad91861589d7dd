"""A catalogue of checks that go wrong in every way, for the tests of the runner."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import time
from typing import Any

from gpu_check.checks import Check, Here, Skipped, expect


def checks(device: Any, quick: bool, elsewhere: bool = False) -> list[Check]:
    return [
        Check("good", lambda here: {"seen": here.kind}, 1.0),
        Check("shared/first", _pid, 1.0, session="shared", cases=(1,)),
        Check("shared/fails", _fails, 1.0, session="shared", cases=(1, 2)),
        Check("shared/raises", _raises, 1.0, session="shared"),
        Check("shared/last", _pid, 1.0, session="shared"),
        Check("skips", _skips, 1.0, cases=(3,)),
        Check("crashes", _crashes, 1.0, session="crash"),
        Check("after-the-crash", lambda here: {}, 1.0, session="crash"),
        Check("hangs", _hangs, 1.0, session="hang", limit_s=1.0),
        Check("after-the-hang", lambda here: {}, 1.0, session="hang"),
        Check("leaves", lambda here: _exit_badly(), 1.0),
        Check("environment", lambda here: {"value": os.environ["PLANTED"]}, 1.0, env={"PLANTED": "7"}),
        Check("dies-at-exit", _dies_at_exit, 1.0),
        Check("once-a", _once, 1.0),
        Check("once-b", _once, 1.0),
        Check("alone-a", _present, 1.0, alone=True),
        Check("alone-b", _present, 1.0, alone=True),
        Check("beside-a", _present, 1.0),
        Check("beside-b", _present, 1.0),
        Check("endless", lambda here: time.sleep(600), 1.0),
    ]


def broken(device: Any, quick: bool) -> list[Check]:
    raise RuntimeError("this catalogue cannot be listed")


def _pid(here: Here) -> dict[str, Any]:
    return {"pid": os.getpid()}


def _fails(here: Here) -> None:
    here.note(tried=3)
    expect(False, "two and two\nare not five")


def _raises(here: Here) -> None:
    raise ValueError("a planted error")


def _skips(here: Here) -> None:
    raise Skipped("there is no such thing here")


def _crashes(here: Here) -> None:
    here.note(before="the crash")
    ctypes.string_at(0)


def _hangs(here: Here) -> None:
    # something that would outlive its parent unless it is ended with it
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    here.note(child=child.pid)
    time.sleep(600)


def _exit_badly() -> None:
    print("last words", flush=True)
    os._exit(3)


def _dies_at_exit(here: Here) -> None:
    import atexit

    atexit.register(os._exit, 4)


def _once(here: Here) -> dict[str, Any]:
    folder = here.once("made", lambda folder: (folder / "by").write_text(str(os.getpid())) and None)
    return {"by": (folder / "by").read_text()}


def _present(here: Here) -> dict[str, Any]:
    """From when to when it ran."""
    began = time.monotonic()
    time.sleep(0.3)
    return {"span": (began, time.monotonic())}
