"""What plugins print, in fresh processes where the descriptors matter, and what an import does to its process."""

from __future__ import annotations

import io
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from minisgl_core.sandbox import Sandbox, diverted_output, notify_if_slow


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)


def test_print_and_compiled_code_both_go_to_standard_error_and_only_inside() -> None:
    done = run(
        "import ctypes, os\n"
        "from minisgl_core.sandbox import diverted_output\n"
        "libc = ctypes.CDLL(None)\n"
        "print('before')\n"
        "with diverted_output():\n"
        "    with diverted_output() as inner:\n"
        "        print('printed')\n"
        "    libc.printf(b'compiled\\n')\n"
        "    os.write(1, b'written\\n')\n"
        "print('after', inner.first_line)\n"
    )
    assert (done.returncode, done.stdout) == (0, "before\nafter printed\n")
    assert sorted(done.stderr.split()) == ["compiled", "printed", "written"]


@pytest.mark.parametrize("closed", ["os.close(1)", "os.close(2)", "sys.stdout = None", "sys.stderr = None"])
def test_closed_descriptors_are_no_fault(closed: str) -> None:
    done = run(
        f"import os, sys\nfrom minisgl_core.sandbox import diverted_output\n{closed}\n"
        "with diverted_output():\n    print('x')\nos._exit(7)\n"
    )
    assert (done.returncode, done.stdout) == (7, ""), done.stderr


def test_blocks_of_two_threads_leave_standard_output_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    stdout = io.StringIO()
    monkeypatch.setattr(sys, "stdout", stdout)
    both_in, first_out = threading.Barrier(2), threading.Event()

    def first() -> None:
        with diverted_output():
            both_in.wait(10)
        first_out.set()

    thread = threading.Thread(target=first)
    thread.start()
    with diverted_output():
        both_in.wait(10)
        assert first_out.wait(10)
    thread.join()
    assert sys.stdout is stdout


def test_a_block_that_replaces_standard_output_does_not_keep_it(capsys: pytest.CaptureFixture[str]) -> None:
    with diverted_output():
        sys.stdout = io.StringIO()
    print("mine")
    assert capsys.readouterr().out == "mine\n"


def test_only_what_is_slow_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    with notify_if_slow("importing plugin quick", patience_s=0.1):
        pass
    with notify_if_slow("importing plugin slow", patience_s=0.1):
        time.sleep(0.5)
    time.sleep(0.2)
    assert capsys.readouterr().err == "importing plugin slow takes more than 0.1 s\n"


@pytest.fixture
def effects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """``effects(source)``: the answer about importing a plugin of this source in a throw-away process."""
    monkeypatch.syspath_prepend(tmp_path)

    def ask(source: str) -> dict[str, Any]:
        (tmp_path / "some_plugin.py").write_text(source)
        with Sandbox(30) as child:
            answer = child.call("minisgl_core.sandbox.imports:import_plugin", {"module": "some_plugin"})
        assert answer["ok"], answer
        return answer["value"]  # type: ignore[no-any-return]

    return ask


HOOK = "from minisgl_core.plugin_api import hookimpl\n@hookimpl\ndef minisgl_attention_backends():\n    "


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("", []),
        ("import os; os.environ['OMP_X'] = '1'; os.environ.pop('HOME', 0)", ["changes the environment: HOME, OMP_X"]),
        ("import os; os.environ['TRITON_CACHE'] = '1'", []),
        ("import os; os.chdir('/')", ["changes the working directory to /"]),
        (
            "import threading, time; threading.Thread(target=time.sleep, args=(1,), name='mine', daemon=True).start()",
            ["starts the threads mine"],
        ),
        ("import signal; signal.signal(signal.SIGTERM, lambda *_: None)", ["handles the signals SIGTERM"]),
        (HOOK + "import os; os.chdir('/')", ["changes the working directory to /"]),
        (HOOK + "raise SystemExit", []),
    ],
)
def test_what_an_import_or_a_hook_changes_in_the_process_is_an_effect(
    effects: Any, source: str, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/somewhere")
    assert effects(source)["effects"] == expected


def test_heavy_imports_are_those_of_the_shipped_list(effects: Any) -> None:
    assert effects("import pydantic")["heavy"] == ["pydantic"]
    assert effects("import json")["heavy"] == []
