from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from minisgl_core.env import ENV
from minisgl_core.errors import BackendError
from minisgl_core.registry import detect_device
from minisgl_core.registry.probe import ProbeCrash, ProbeProcess, ProbeRequest, run_probes
from minisgl_core.registry.probe_child import answer

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
    told = "probe: wanted a working backend, supported the probe did not answer within 2 s"
    assert ask("hangs") == {"hangs": f"{told} (MINISGL_PROBE_TIMEOUT_S gives it longer)"}


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
    with ProbeProcess(30) as child:
        with pytest.raises(ProbeCrash, match="died"):
            child.ask({"probe": "some_probes:dies", "with": {}})
        assert child.ask({"probe": "some_probes:raises", "with": {}})["ok"] is False


def test_a_probe_that_does_not_exist_is_an_answer() -> None:
    assert answer({"probe": "minisgl_core.env:nothing", "with": {}}) == {
        "ok": False,
        "error": "AttributeError: module 'minisgl_core.env' has no attribute 'nothing'",
    }


def test_without_a_driver_the_device_is_a_cpu_and_no_process_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minisgl_core.registry.probe._TRACES", ((Path("/nowhere/at/all"), "*"),))
    monkeypatch.setattr("minisgl_core.registry.probe.ProbeProcess", None)
    assert detect_device().kind == "cpu"
    assert detect_device("cpu").kind == "cpu"


class Child:
    """Stands in for the process: answers as a machine with one H200 would."""

    asked = 0

    def __init__(self, timeout_s: float) -> None:
        pass

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def ask(self, request: object) -> dict[str, object]:
        Child.asked += 1
        assert request == {"facts": True}
        return {"ok": True, "device": {"kind": "cuda", "sm": 90, "name": "H200", "total_bytes": 141 << 30, "count": 1}}


class NoDevice(Child):
    def ask(self, request: object) -> dict[str, object]:
        return {"ok": True, "device": None}


class Crashing(Child):
    def ask(self, request: object) -> dict[str, object]:
        raise ProbeCrash("died (exit code -11)")


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "version"
    file.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06  Sun Jul 27\n")
    monkeypatch.setattr("minisgl_core.registry.probe._DRIVER", file)
    monkeypatch.setattr("minisgl_core.registry.probe._TRACES", ((tmp_path, "version"),))
    monkeypatch.setenv("MINISGL_CACHE_DIR", str(tmp_path / "cache"))


def test_device_facts_come_from_the_child_once_and_then_from_the_cache(
    driver: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("minisgl_core.registry.probe.ProbeProcess", Child)
    monkeypatch.setattr(Child, "asked", 0)
    first, second = detect_device(), detect_device("cuda")
    assert first == second and (first.sm, first.driver, str(first)) == (90, "580.65.06", "cuda sm90")
    assert Child.asked == 1
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    detect_device()
    assert Child.asked == 2


@pytest.mark.parametrize(("child", "text"), [(NoDevice, "torch sees none"), (Crashing, r"died \(exit code -11\)")])
def test_a_driver_without_a_usable_device_means_cpu_unless_cuda_was_asked_for(
    driver: None, monkeypatch: pytest.MonkeyPatch, child: Any, text: str
) -> None:
    monkeypatch.setattr("minisgl_core.registry.probe.ProbeProcess", child)
    assert detect_device().kind == "cpu"
    with pytest.raises(BackendError, match=f"no CUDA device can be used: .*{text}"):
        detect_device("cuda")


def test_the_cache_is_below_the_users_cache_folder_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MINISGL_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/some/cache")
    assert os.fspath(ENV.CACHE_DIR.value) == "/some/cache/minisgl"
