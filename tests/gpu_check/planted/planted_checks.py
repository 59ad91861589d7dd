"""Checks that go wrong in every way, for the tests of the runner."""

from __future__ import annotations

import atexit
import ctypes
import os
import subprocess
import sys
import time

import pytest

from support.gpu.check import Context, Skipped, expect

pytestmark = pytest.mark.check(seconds=1.0)


def test_good(context: Context) -> None:
    context.note(seen=context.kind)


@pytest.mark.check(session="shared", cases=(1,))
@pytest.mark.parametrize("which", ["first", pytest.param("second", marks=pytest.mark.check(cases=(2,)))])
def test_shared(which: str, context: Context) -> None:
    context.note(pid=os.getpid())


@pytest.mark.check(session="shared", cases=(1, 2))
def test_fails(context: Context) -> None:
    context.note(tried=3)
    expect(False, "two and two\nare not five")


@pytest.mark.check(session="shared")
def test_raises() -> None:
    raise ValueError("a planted error")


@pytest.mark.check(session="shared")
def test_last(context: Context) -> None:
    context.note(pid=os.getpid())


@pytest.mark.check(cases=(3,))
def test_skips() -> None:
    raise Skipped("there is no such thing here")


@pytest.fixture
def broken() -> None:
    raise RuntimeError("a planted fixture")


@pytest.mark.check(session="fixture")
def test_without_its_fixture(broken: None) -> None: ...


@pytest.mark.check(session="crash")
def test_crashes(context: Context) -> None:
    context.note(before="the crash")
    ctypes.string_at(0)


@pytest.mark.check(session="crash")
def test_after_the_crash() -> None: ...


@pytest.mark.check(session="hang", limit_s=1.0)
def test_hangs(context: Context) -> None:
    # a process that would outlive its parent unless it is ended too
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    context.note(child=child.pid)
    time.sleep(600)


@pytest.mark.check(session="hang")
def test_after_the_hang() -> None: ...


def test_leaves() -> None:
    print("last output", flush=True)
    os._exit(3)


@pytest.mark.check(env={"PLANTED": "7"})
def test_environment(context: Context) -> None:
    context.note(value=os.environ["PLANTED"])


def test_dies_at_exit() -> None:
    atexit.register(os._exit, 4)


@pytest.mark.parametrize("which", ["a", "b"])
def test_once(which: str, context: Context) -> None:
    folder = context.once("made", lambda folder: (folder / "by").write_text(str(os.getpid())) and None)
    context.note(by=(folder / "by").read_text())


@pytest.mark.parametrize("which", ["a", "b", pytest.param("alone-a", marks=pytest.mark.check(alone=True)),
                                   pytest.param("alone-b", marks=pytest.mark.check(alone=True))])  # fmt: skip
def test_span(which: str, context: Context) -> None:
    """From when to when it ran."""
    began = time.monotonic()
    time.sleep(0.3)
    context.note(span=(began, time.monotonic()))


def test_endless() -> None:
    time.sleep(600)
