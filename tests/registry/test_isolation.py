"""Plugins that end or disturb the process are judged in another one: each is left out, or named with its effects."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from minisgl_core.errors import BackendError
from minisgl_core.registry import Choice, build
from minisgl_core.sandbox import Sandbox

ENDS = "importing it would end or block every command: the process"
HOOK = "from minisgl_core.plugin_api import hookimpl\n@hookimpl\ndef minisgl_attention_backends():\n    "


@pytest.fixture(autouse=True)
def no_kept_answers(own_cache: Path) -> None:
    """Every test judges its plugins for the first time."""


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import os\nos._exit(0)", f"{ENDS} died (exit code 0)"),
        ("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)", f"{ENDS} died (exit code -11)"),
        (f"{HOOK}import os; os._exit(3)", f"{ENDS} died (exit code 3)"),
        ("import sys\nsys.exit('bye')", "SystemExit: bye"),
    ],
)
def test_a_plugin_that_ends_the_process_is_named_and_left_out(
    world: Any, make_spec: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, expected: str
) -> None:
    (tmp_path / "leaving_plugin.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    world.distribution("leaving", "[minisgl]\nmain = leaving_plugin\n")
    world.plugin("good", make_spec("attention", "fine"))
    registry = world.registry()
    assert {record.distribution: record.failure for record in registry.failures()} == {"leaving": expected}
    assert [item.label for item in registry.candidates("attention")] == ["fine@good"]


def test_a_factory_that_ends_the_process_fails_the_start(world: Any) -> None:
    def construct(self: Any, setup: object, options: object) -> None:
        raise SystemExit(0)

    methods = dict.fromkeys(("capture", "pad_batch", "can_replay", "replay", "close"), lambda self: None)
    world.module("leaving_factory", Runner=type("Runner", (), {"__init__": construct, **methods}))
    choice = Choice("graph", "mine", "", "dist", "1", "leaving_factory:Runner")
    with pytest.raises(BackendError, match=r"graph backend mine@dist 1 failed to start: SystemExit"):
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


def test_the_users_interrupt_says_whose_import_it_ended(
    world: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "waiting_plugin.py").write_text("raise KeyboardInterrupt")
    monkeypatch.syspath_prepend(tmp_path)
    world.distribution("waiting", "[minisgl]\nmain = waiting_plugin\n")
    with pytest.raises(KeyboardInterrupt):
        world.registry()
    assert capsys.readouterr().err == "interrupted while plugin waiting was loaded\n"


def test_an_import_that_hangs_is_a_failure_with_its_name(
    world: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MINISGL_PROBE_TIMEOUT_S", "1")
    (tmp_path / "hanging_plugin.py").write_text("import time\ntime.sleep(1000)")
    monkeypatch.syspath_prepend(tmp_path)
    world.distribution("hanging", "[minisgl]\nmain = hanging_plugin\n")
    assert world.record("hanging").failure == f"{ENDS} did not answer within 1 s"


PLUGIN = """
import os
from minisgl_core.plugin_api import PluginInfo, hookimpl
MINISGL_PLUGIN = PluginInfo("x", {"attention": ">=1"})
os.environ["OMP_X"] = "1"
@hookimpl
def minisgl_attention_backends():
    return []
"""


def test_effects_are_recorded_and_judged_again_only_after_the_files_have_changed(
    world: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "loud_plugin.py"
    monkeypatch.syspath_prepend(tmp_path)
    started: list[object] = []
    start = Sandbox._start
    monkeypatch.setattr(Sandbox, "_start", lambda self: started.append(self) or start(self))

    def loaded(source: str, version: str = "1.0") -> tuple[str, ...]:
        if not file.exists() or file.read_text() != source:
            file.write_text(source)
        monkeypatch.setenv("OMP_X", "")
        monkeypatch.setenv("OMP_Y", "")
        world.distributions.clear()
        world.distribution("loud", "[minisgl]\nmain = loud_plugin\n", version=version)
        record = world.record("loud")
        sys.modules.pop("loud_plugin")
        assert record.failure == "" and record.to_json()["effects"] == list(record.effects)
        return record.effects  # type: ignore[no-any-return]

    expected = ("changes the environment: OMP_X",)
    assert (loaded(PLUGIN), len(started)) == (expected, 1)
    assert (loaded(PLUGIN), len(started)) == (expected, 1)
    assert (loaded(PLUGIN, version="1.1"), len(started)) == (expected, 2)
    assert (loaded(PLUGIN.replace("OMP_X", "OMP_Y")), len(started)) == (("changes the environment: OMP_Y",), 3)
    assert (loaded(PLUGIN), len(started)) == (expected, 4)  # another time of change
