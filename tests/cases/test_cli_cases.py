"""The cases of the command line, the front door, and disks that are full."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from minisgl_core.cli.app import COMMANDS, main
from minisgl_core.plugin_api import CannotRun, compile_once, no_room
from minisgl_core.progress import progress_bar

Capture = pytest.CaptureFixture[str]
PROGRAM = str(Path(sys.executable).with_name("minisgl"))


@pytest.fixture(autouse=True)
def _alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No config file, no settings of this machine."""
    monkeypatch.chdir(tmp_path)
    for name in list(os.environ):
        if name.startswith("MINISGL_") and name != "MINISGL_CACHE_DIR":
            monkeypatch.delenv(name)


# 128: a full disk


@pytest.fixture
def full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> set[Path]:
    """Folders whose disk has no room: put them in. Temporary files go to ``tmp_path / "temporary"``."""
    folders: set[Path] = set()
    reserve = os.posix_fallocate

    def limited(descriptor: int, offset: int, length: int) -> None:
        place = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        if any(place.is_relative_to(folder) for folder in folders):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        reserve(descriptor, offset, length)

    monkeypatch.setattr(os, "posix_fallocate", limited)
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    return folders


def test_case_128_a_full_cache_disk_is_replaced_by_a_temporary_folder(
    full: set[Path], tmp_path: Path, capsys: Capture
) -> None:
    full.add(tmp_path / "cache")
    made = compile_once(tmp_path / "cache" / "mine", "a.so", lambda path: path.touch(), "the kernels")
    assert made.is_relative_to(tmp_path / "temporary")
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{tmp_path / 'cache' / 'mine'} cannot be written (No space left on device; MINISGL_CACHE_DIR" in line
    full.add(tmp_path / "temporary")
    assert compile_once(tmp_path / "cache" / "mine", "a.so", lambda path: path.touch()) == made


def test_case_128_a_disk_that_a_compiler_fills_is_replaced(full: set[Path], tmp_path: Path) -> None:
    tried = []

    def make(path: Path) -> None:
        tried.append(path)
        if path.is_relative_to(tmp_path / "cache"):
            raise CannotRun(no_room("fatal error: error writing to x.o: No space left on device"))  # type: ignore[arg-type]
        path.touch()

    assert compile_once(tmp_path / "cache", "a.so", make).is_relative_to(tmp_path / "temporary")
    assert len(tried) == 2


def test_case_128_where_all_disks_are_full_the_error_names_the_disk(full: set[Path], tmp_path: Path) -> None:
    full.update((tmp_path / "cache", tmp_path / "temporary"))
    with pytest.raises(CannotRun) as raised:
        compile_once(tmp_path / "cache", "a.so", lambda path: path.touch())
    reason = raised.value.reason
    assert reason.field == "disk" and "No space left on device" in reason.supported
    assert "g++" not in str(reason) and str(tmp_path / "cache") in str(reason)


def test_case_128_another_failure_of_a_compiler_is_passed_on(full: set[Path], tmp_path: Path) -> None:
    def make(path: Path) -> None:
        raise ValueError("no such option")

    with pytest.raises(ValueError, match="no such option"):
        compile_once(tmp_path / "cache", "a.so", make)
    assert no_room("unknown option -march=nativ") is None


def test_case_128_a_compiler_on_a_full_disk_is_not_at_fault(tmp_path: Path) -> None:
    """Files may not grow at all: the compiler's own are cut too."""
    pytest.importorskip("minisgl_cpu_sim")
    code = (
        "import resource, sys; from minisgl_cpu_sim.native import build;"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (2048, 2048));"
        "from minisgl_core.plugin_api import CannotRun\n"
        "try: build.check()\n"
        "except CannotRun as error: print(error)"
    )
    environ = {**os.environ, "MINISGL_CACHE_DIR": str(tmp_path / "cache"), "TMPDIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environ)
    assert "a disk is full" in done.stdout and "install g++" not in done.stdout, done.stdout + done.stderr


# 131: nothing that is given is dropped


@pytest.mark.parametrize("way", ["pipe", "file"])
def test_case_131_standard_input_with_a_prompt_option_is_refused(way: str, tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("a text that would not be read")
    call = [PROGRAM, "generate", "-p", "x", "--model", "./no/where"]
    with text.open() as file:
        given = {"stdin": file} if way == "file" else {"input": text.read_text()}
        done = subprocess.run(call, capture_output=True, text=True, check=False, **given)
    assert done.returncode == 2
    assert done.stderr.startswith("error: standard input has text in addition to --prompt; leave out")


def test_case_131_an_empty_standard_input_is_nothing_to_refuse(tmp_path: Path) -> None:
    call = [PROGRAM, "generate", "-p", "x", "--model", "./no/where"]
    for given in ({"input": ""}, {"stdin": subprocess.DEVNULL}):
        done = subprocess.run(call, capture_output=True, text=True, check=False, **given)
        assert done.stderr.startswith("error: there is no model folder")


def test_case_131_a_shadow_is_announced_and_its_result_printed(small: Path, capsys: Capture) -> None:
    pytest.importorskip("minisgl_cpu_sim")
    call = ["generate", "--model", str(small), "--prompt-ids", "5,6,7", "--max-tokens", "3", "--ignore-eos"]
    assert main([*call, "--num-page-override", "64", "--backend", "shadow.attention=torch"]) == 0
    _, start, _, result = capsys.readouterr().err.splitlines()
    assert start.startswith("shadow torch@minisgl-cpu-sim: compared on every 1. eager step")
    assert re.fullmatch(
        r"shadow torch@minisgl-cpu-sim: [1-9]\d* steps, [1-9]\d* layers compared, worst error .*", result
    )


# 131, 133: what is a flag, and when a wrong value is refused


@pytest.mark.parametrize("arguments", [["-p", "--debug"], ["--prompt=--debug"], ["--system", "--debug", "-p", "x"]])
def test_case_131_debug_is_a_flag_and_no_part_of_a_value(arguments: list[str], capsys: Capture) -> None:
    assert main(["generate", *arguments, "--model", "./no/where"]) == 2
    error = capsys.readouterr().err
    assert "Traceback" not in error and error.startswith("error: ") and "requires an argument" not in error


@pytest.mark.parametrize("place", [0, 1, 3])
def test_case_131_debug_works_before_and_after_the_command(place: int, capsys: Capture) -> None:
    arguments = ["generate", "-p", "x", "--model", "./no/where"]
    arguments.insert(place, "--debug")
    assert main(arguments) == 2
    assert capsys.readouterr().err.startswith("Traceback")


@pytest.mark.parametrize("name", COMMANDS)
def test_case_133_every_command_knows_h(name: str, capsys: Capture) -> None:
    assert main([name, "-h"]) == 0
    assert COMMANDS[name].help in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments",
    [
        ["generate", "-p", "x", "--temperature", "-1"],
        ["generate", "-p", "x", "--max-tokens", "0"],
        ["generate", "-p", "x", "--model", "./no/where"],
        ["generate", "-p", "x", "--backend", "attention=nope"],
        ["generate", "-p", "x", "--page-size", "0"],
        ["generate", "--input", "./no/where.jsonl", "--output", "-"],
        ["chat", "--top-p", "2"],
        ["bench", "offline", "--against", "nope"],
        ["explain", "--geometry", "nope"],
        ["calibrate", "--page-size", "x"],
    ],
    ids=" ".join,
)
def test_case_133_wrong_values_are_refused_before_torch_is_imported(arguments: list[str]) -> None:
    code = (
        "import sys, time; start = time.process_time(); from minisgl_core.cli.app import main;"
        "code = main(sys.argv[1:]); print('torch' in sys.modules, time.process_time() - start); sys.exit(code)"
    )
    best = float("inf")
    for _ in range(3):
        done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)
        assert done.returncode == 2 and done.stderr.startswith("error: "), done.stderr
        torch_was_imported, seconds = done.stdout.split()
        assert torch_was_imported == "False"
        best = min(best, float(seconds))
        if best < 2:
            break
    assert best < 2, "processor time: twice what is needed, since other processes slow each core down"


def test_case_133_json_has_the_backends_and_the_plan_only_on_demand(small: Path, capsys: Capture) -> None:
    call = ["generate", "--model", str(small), "--prompt-ids", "5,6", "--max-tokens", "1", "--json"]
    call += ["--num-page-override", "64"]
    assert main(call) == 0
    text = capsys.readouterr().out
    data = json.loads(text)
    assert list(data) == ["text", "token_ids", "finish_reason", "usage", "backends"]
    assert "attention" in data["backends"] and len(text.splitlines()) < 50
    assert main([*call, "--plan"]) == 0
    assert json.loads(capsys.readouterr().out)["plan"]["buckets"]
    assert main(["generate", "-p", "x", "--plan"]) == 2


def test_case_133_a_progress_bar_is_for_terminals(monkeypatch: pytest.MonkeyPatch) -> None:
    for terminal in (False, True):
        stream = io.StringIO()
        monkeypatch.setattr(stream, "isatty", lambda terminal=terminal: terminal)
        monkeypatch.setattr(sys, "stderr", stream)
        with progress_bar("work", 3) as bar:
            bar.update(3)
        assert bool(stream.getvalue()) == terminal
    monkeypatch.setattr(sys, "stderr", None)
    with progress_bar("work", 3) as bar:
        bar.update(3)


@pytest.mark.parametrize("columns", ["40", "120"])
def test_case_133_narrow_terminals_cut_no_help(columns: str, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    assert main(["-h"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert all(entry.help in text for entry in COMMANDS.values())


@pytest.mark.parametrize("existed", [True, False])
def test_case_133_a_plugin_that_finds_no_room_leaves_nothing_half_made(
    existed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    write, written = Path.write_text, []

    def limited(path: Path, *arguments: object, **more: object) -> int:
        written.append(path)
        if len(written) > 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(path, *arguments, **more)  # type: ignore[arg-type]

    folder = tmp_path / "mine"
    if existed:
        folder.mkdir()
    monkeypatch.setattr(Path, "write_text", limited)
    assert main(["new-plugin", "mine", "--role", "attention", "--out", str(folder)]) == 2
    error = capsys.readouterr().err
    assert "No space left on device; nothing is left there" in error and "internal" not in error
    assert len(written) == 4 and folder.exists() == existed and (not existed or not list(folder.iterdir()))


def test_case_133_doctor_says_at_once_what_it_does(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    def stop(kind: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("minisgl_core.cli.doctor.detect_device", stop)
    assert main(["doctor"]) == 130
    assert capsys.readouterr().err.startswith("importing every plugin and loading every backend")


# 125: nothing is on an index yet


def test_case_125_the_documents_install_without_an_index() -> None:
    root = Path(__file__).parents[2]
    pages = [root / "README.md", *root.glob("docs/**/*.md"), *root.glob("plugins/*/README.md")]
    for page in pages:
        for line in page.read_text().splitlines():
            assert "--no-build-isolation" not in line, page
            assert "pip install" not in line or "minisgl-" not in line or "--find-links" in line, f"{page}: {line}"


# 134: chat


def test_case_134_an_answer_that_is_cut_says_so(
    tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    context = ("--max-seq-len-override", "128")
    for flags, why in (
        ((*context, "--max-tokens", "8"), "8 tokens: --max-tokens"),
        (context, "tokens: the context is full; /reset empties it"),
    ):
        monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n"))
        assert main(["chat", "--model", str(tiny("q3-text")), "--ignore-eos", *flags]) == 0
        assert capsys.readouterr().err.splitlines()[-1].endswith(f"{why}]")
