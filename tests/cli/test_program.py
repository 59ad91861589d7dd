"""The program as it is installed: its exit codes, signals, and streams that are closed."""

from __future__ import annotations

import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

Tiny = Callable[[str], Path]
SMALL = ("--num-page-override", "64", "--max-seq-len-override", "48")
PROGRAM = str(Path(sys.executable).with_name("minisgl"))


def endless(model: Path) -> list[str]:
    """A call whose answer takes long enough to be stopped."""
    lengths = ["--max-tokens", "4000", "--max-seq-len-override", "4096"]
    return [PROGRAM, "generate", "--model", str(model), "--prompt-ids", "1,2,3", "--ignore-eos", *lengths]


def test_the_program_shows_a_traceback_only_to_debug(tiny: Tiny) -> None:
    model = tiny("q3-text")
    call = [PROGRAM, "generate", "--model", str(model), "--prompt", "hi", "--backend", "attention=nope"]
    done = subprocess.run(call, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith("error: no plugin offers the attention backend 'nope'")
    debugged = subprocess.run([*call, "--debug"], capture_output=True, text=True, check=False)
    assert (debugged.returncode, debugged.stdout) == (2, "")
    assert debugged.stderr.startswith("Traceback (most recent call last)")
    assert debugged.stderr.endswith(done.stderr)


@pytest.mark.parametrize(
    ("redirection", "why"), [(">&-", "Bad file descriptor"), (">/dev/full", "No space left on device")]
)
@pytest.mark.parametrize("arguments", [["plugins"], ["generate"]])
def test_a_standard_output_that_takes_nothing(arguments: list[str], redirection: str, why: str, tiny: Tiny) -> None:
    if arguments == ["generate"]:
        arguments = ["generate", "--model", str(tiny("q3")), "--prompt-ids", "1,2", "--max-tokens", "2", *SMALL]
    call = f"{shlex.join([PROGRAM, *arguments])} {redirection}"
    done = subprocess.run(["bash", "-c", call], stderr=subprocess.PIPE, text=True, check=False)
    (line,) = [line for line in done.stderr.splitlines() if not line.startswith("plan ")]
    assert line.startswith(f"error: standard output cannot be written: {why}; ")
    assert done.returncode == 1


def test_ctrl_c_ends_the_program_quietly(tiny: Tiny) -> None:
    with subprocess.Popen(endless(tiny("q3")), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        begin = process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=60)
    assert process.returncode == 130
    assert begin.isdecimal()
    assert [line for line in error.splitlines() if line and not line.startswith("plan ")] == []


def test_a_reader_that_goes_away_ends_the_program_quietly(tiny: Tiny) -> None:
    pipe = f"{shlex.join(endless(tiny('q3')))} | head -c 1"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", pipe], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert len(done.stdout) == 1
    assert [line for line in done.stderr.splitlines() if not line.startswith("plan ")] == []


@pytest.mark.parametrize("redirection", ["2>&-", "2>/dev/full"])
def test_a_standard_error_that_takes_nothing_is_no_failure(redirection: str, tiny: Tiny) -> None:
    call = [PROGRAM, "generate", "--model", str(tiny("q3")), "--prompt-ids", "1,2", "--max-tokens", "2", *SMALL]
    call = ["bash", "-c", f"{shlex.join(call)} {redirection}"]
    done = subprocess.run(call, stdout=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 0
    assert len(done.stdout.split()) == 2


def test_an_error_that_cannot_be_printed_keeps_its_exit_code() -> None:
    done = subprocess.run(["bash", "-c", f"{PROGRAM} genrate 2>/dev/full"], check=False)
    assert done.returncode == 2
