from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from minisgl_core.env import ENV
from minisgl_core.registry.probe import ProbeRequest, run_probes
from minisgl_core.sandbox import Sandbox, SandboxError
from minisgl_core.sandbox.child import answer

PROBES = """
import os, sys, time
from pathlib import Path
from minisgl_core.plugin_api import CannotRun, Reason

def fine(facts):
    print("noise on standard output")
    with Path(facts["log"]).open("a") as log:
        log.write("ran\\n")

def refuses(facts):
    raise CannotRun(Reason("driver", "driver", "550", facts["driver"], "update the driver"))

def raises(facts):
    raise OSError("libcuda.so: no such file")

def dies(facts):
    print("illegal instruction", file=sys.stderr, flush=True)
    os._exit(9)

def hangs(facts):
    time.sleep(60)

def talks(facts):
    print("x" * 1_000_000)
"""


@pytest.fixture
def ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """``ask("fine", "dies")``: the refusals, as text by name, of these probes."""
    (tmp_path / "some_probes.py").write_text(PROBES)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("MINISGL_CACHE_DIR", str(tmp_path / "cache"))
    facts = {"log": str(tmp_path / "log"), "driver": "470"}

    def run(*names: str, driver: str = "470", version: str = "1.0") -> dict[str, str]:
        requests = [ProbeRequest(name, f"some_probes:{name}", facts, version, driver) for name in names]
        return {key: str(reason) for key, reason in run_probes(requests).items()}

    return run


def test_refusals_errors_and_crashes_are_reasons_and_the_others_still_run(ask: Any, tmp_path: Path) -> None:
    refused = ask("raises", "dies", "refuses", "fine")
    assert refused == {
        "raises": "probe: wanted a working backend, supported the probe raised OSError: libcuda.so: no such file",
        "dies": "probe: wanted a working backend, supported the probe died (exit code 9): illegal instruction",
        "refuses": "driver: wanted 550, supported 470 (update the driver)",
    }
    assert (tmp_path / "log").read_text() == "ran\n"


def test_a_probe_that_hangs_is_stopped(ask: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINISGL_PROBE_TIMEOUT_S", "2")
    expected = "probe: wanted a working backend, supported the probe did not answer within 2 s"
    assert ask("hangs") == {"hangs": f"{expected} (MINISGL_PROBE_TIMEOUT_S gives it longer)"}


def test_a_probe_may_print_as_much_as_it_likes(ask: Any) -> None:
    assert ask("talks") == {}


def test_answers_are_kept_until_a_version_or_the_driver_changes(ask: Any, tmp_path: Path) -> None:
    assert ask("fine", "refuses") == ask("fine", "refuses")
    assert (tmp_path / "log").read_text() == "ran\n"
    ask("fine", driver="550")
    assert (tmp_path / "log").read_text() == "ran\nran\n"


def test_a_new_version_of_the_plugin_is_asked_again(ask: Any, tmp_path: Path) -> None:
    """The planted fault "the probe cache without the plugin's version"."""
    for runs, version in enumerate(("1.0", "1.1"), 1):
        assert ask("fine", version=version) == ask("fine", version=version) == {}
        assert (tmp_path / "log").read_text() == "ran\n" * runs


def test_a_refusal_is_asked_again_at_each_start(ask: Any, tmp_path: Path) -> None:
    assert ask("refuses")
    (tmp_path / "some_probes.py").write_text(PROBES + "\nrefuses = fine\n")
    assert ask("refuses") == {}


def test_a_broken_cache_is_asked_again(ask: Any, tmp_path: Path) -> None:
    ask("fine")
    (cached,) = (tmp_path / "cache" / "probes").iterdir()
    cached.write_text("{")
    ask("fine")
    assert (tmp_path / "log").read_text() == "ran\nran\n"


def test_a_cache_folder_that_cannot_be_written_is_no_failure(
    ask: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MINISGL_CACHE_DIR", str(tmp_path / "file"))
    assert ask("fine") == {}


def test_the_child_starts_again_after_a_crash(ask: Any) -> None:
    with Sandbox(30) as child:
        with pytest.raises(SandboxError, match="died"):
            child.call("some_probes:dies", {})
        assert child.call("some_probes:raises", {})["ok"] is False


def test_a_probe_that_does_not_exist_is_an_answer() -> None:
    assert answer({"call": "minisgl_core.env:nothing", "with": {}}) == {
        "ok": False,
        "error": "AttributeError: module 'minisgl_core.env' has no attribute 'nothing'",
    }


def test_the_cache_is_below_the_users_cache_folder_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MINISGL_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/some/cache")
    assert os.fspath(ENV.CACHE_DIR.value) == "/some/cache/minisgl"
