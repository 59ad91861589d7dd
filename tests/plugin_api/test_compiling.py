"""Compiling once for everybody: which compiler, which folder, who waits."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from minisgl_core.env import ENV
from minisgl_core.errors import ConfigError
from minisgl_core.plugin_api import CannotRun, cache_dir, compile_once, find_compiled, host_compiler

Capture = pytest.CaptureFixture[str]


def writes(text: str) -> Callable[[Path], None]:
    return lambda path: void(path.write_text(text))


def void(_: object) -> None:
    pass


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary files go: a folder of the test."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


@pytest.fixture
def unwritable(tmp_path: Path) -> Path:
    """An existing folder whose lock file cannot be opened, as on a file system that is mounted read-only."""
    (tmp_path / "unwritable" / "lock").mkdir(parents=True)
    return tmp_path / "unwritable"


def program(folder: Path, name: str) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return path


def test_a_plugins_folder_is_below_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINISGL_CACHE_DIR", "/some/where")
    assert cache_dir("mine") == ENV.CACHE_DIR.value / "mine" == Path("/some/where/mine")
    monkeypatch.delenv("MINISGL_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache_dir("mine") == Path.home() / ".cache" / "minisgl" / "mine"


def test_it_is_made_once_and_announced_once(tmp_path: Path, capsys: Capture) -> None:
    folder = tmp_path / "deep" / "cache"
    assert compile_once(folder, "a.so", writes("first"), "the kernels").read_text() == "first"
    assert capsys.readouterr().err == "minisgl: compiling the kernels, once for this machine\n"
    assert compile_once(folder, "a.so", writes("second"), "the kernels").read_text() == "first"
    assert capsys.readouterr().err == ""
    assert sorted(path.name for path in folder.iterdir()) == ["a.so", "lock"]


def test_those_that_come_meanwhile_wait_for_it(tmp_path: Path) -> None:
    entered, go_on = threading.Event(), threading.Event()

    def slow(path: Path) -> None:
        entered.set()
        assert go_on.wait(30)
        path.write_text("slow")

    made: list[str] = []
    threads = [
        threading.Thread(target=lambda make=make: made.append(compile_once(tmp_path, "a", make).read_text()))
        for make in (slow, writes("late"))
    ]
    threads[0].start()
    assert entered.wait(30)
    threads[1].start()
    go_on.set()
    for thread in threads:
        thread.join(30)
    assert made == ["slow", "slow"]


def test_nothing_is_kept_of_what_fails(tmp_path: Path) -> None:
    def fails(path: Path) -> None:
        path.write_text("half")
        path.with_name("waste.o").write_text("")
        raise CannotRunError

    with pytest.raises(CannotRunError):
        compile_once(tmp_path, "a.so", fails)
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]


class CannotRunError(Exception):
    pass


def test_a_folder_that_cannot_be_written_is_replaced_for_all_processes_of_this_user(
    unwritable: Path, temporary: Path, capsys: Capture
) -> None:
    made = compile_once(unwritable, "a.so", writes("first"), "the kernels")
    assert made == temporary / f"minisgl-{os.getuid()}" / "unwritable" / "a.so"
    line = capsys.readouterr().err
    assert line.startswith(f"minisgl: compiling the kernels, into {made.parent}: {unwritable} cannot be written (")
    assert "MINISGL_CACHE_DIR" in line and "once for this machine" not in line and line.count("\n") == 1
    assert compile_once(unwritable, "a.so", writes("second"), "the kernels") == made
    assert made.read_text() == "first" and capsys.readouterr().err == ""
    assert find_compiled(unwritable, "*.so") == made
    assert made.parent.parent.stat().st_mode & 0o777 == 0o700


def test_what_exists_in_a_folder_that_cannot_be_written_is_used(unwritable: Path, temporary: Path) -> None:
    (unwritable / "a.so").write_text("there")
    assert compile_once(unwritable, "a.so", writes("new")) == unwritable / "a.so" == find_compiled(unwritable, "*.so")
    assert list(temporary.iterdir()) == []


def test_code_of_others_is_not_loaded_from_the_temporary_files(unwritable: Path, temporary: Path) -> None:
    """A folder that others may write to, and one that is a link: both could hold anybody's code."""
    for prepare in (make_open, make_link):
        home = temporary / f"minisgl-{os.getuid()}"
        prepare(home, temporary)
        (home / "unwritable").mkdir()
        (home / "unwritable" / "a.so").write_text("foreign")
        assert find_compiled(unwritable, "*.so") is None
        assert compile_once(unwritable, "a.so", writes("own")).read_text() == "own"
        (home / "unwritable" / "a.so").unlink()
        (home / "unwritable").rmdir()
        home.unlink() if home.is_symlink() else home.rmdir()


def make_open(home: Path, _: Path) -> None:
    home.mkdir()
    home.chmod(0o777)


def make_link(home: Path, temporary: Path) -> None:
    (temporary / "elsewhere").mkdir()
    home.symlink_to(temporary / "elsewhere")


def test_a_folder_of_one_process_goes_with_it(tmp_path: Path) -> None:
    home = tmp_path / f"minisgl-{os.getuid()}"
    home.write_text("not a folder")
    (tmp_path / "kept" / "lock").mkdir(parents=True)
    code = (
        "import sys; from pathlib import Path; from minisgl_core.plugin_api import compile_once;"
        "print(compile_once(Path(sys.argv[1]), 'a.so', Path.touch))"
    )
    call = [sys.executable, "-c", code, str(tmp_path / "kept")]
    done = subprocess.run(call, capture_output=True, text=True, check=True, env={**os.environ, "TMPDIR": str(tmp_path)})
    assert Path(done.stdout.strip()).is_relative_to(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kept", home.name]


def test_without_any_folder_it_is_a_reason(unwritable: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "file"))
    with pytest.raises(CannotRun, match="set MINISGL_CACHE_DIR to a folder with 16 MiB free"):
        compile_once(unwritable, "a.so", writes(""))


def test_the_newest_is_found(tmp_path: Path, temporary: Path) -> None:
    for age, name in enumerate(("new.so", "old.so")):
        (tmp_path / name).write_text("")
        os.utime(tmp_path / name, (1000 - age, 1000 - age))
    assert find_compiled(tmp_path, "*.so") == tmp_path / "new.so"
    assert find_compiled(tmp_path, "*.dll") is find_compiled(tmp_path / "nowhere", "*.so") is None


def test_the_compiler_is_the_first_on_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(CannotRun, match=r"wanted g\+\+ or c\+\+ or clang\+\+, supported none on PATH \(install g\+\+"):
        host_compiler()
    program(tmp_path, "clang++")
    assert host_compiler() == ("clang++",)
    program(tmp_path, "g++")
    assert host_compiler() == ("g++",)


def test_cxx_names_the_compiler_or_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = program(tmp_path, "mine")
    monkeypatch.setenv("CXX", f"{mine} -DX='a b'")
    assert host_compiler() == (str(mine), "-DX=a b")
    for text in ("/nope/g++", "'unfinished"):
        monkeypatch.setenv("CXX", text)
        with pytest.raises(
            ConfigError, match=r"CXX is .* no program .*set it to a C\+\+ compiler, or unset it"
        ) as refused:
            host_compiler()
        assert (refused.value.field, refused.value.value) == ("CXX", text)
    monkeypatch.setenv("CXX", " ")
    program(tmp_path, "g++")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert host_compiler() == ("g++",)
