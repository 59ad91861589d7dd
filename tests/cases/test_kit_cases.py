"""What the conformance kit must survive, notice and not call a fault."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from minisgl_core import plugin_api, testing
from minisgl_core.cli.app import main
from minisgl_core.plugin_api import BackendSpec, Caps, OneOf
from minisgl_core.registry import Candidate, PluginRecord, Registry
from minisgl_core.testing import AttentionSuite, BackendUnderTest, DeviceFixture, Mismatch, backend_under_test
from minisgl_core.testing.check_process import MOST_ENDS, MOST_HANGS, CheckProcess
from minisgl_core.testing.run import run_checks
from minisgl_core.testing.suite import checks_of

TESTS = Path(__file__).resolve().parents[1]
CAPS = Caps(
    devices=("cpu",),
    dtypes=("float32",),
    kv_dtypes=("float32",),
    head_dims=OneOf(32, 64),
    gqa_ratios=OneOf(2),
    page_sizes=OneOf(16),
    kv_layouts=("NHD",),
    phases=("decode",),
)


@pytest.fixture(autouse=True)
def _paths(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    monkeypatch.syspath_prepend(str(TESTS / "testing" / "mutants"))
    monkeypatch.syspath_prepend(str(TESTS / "fixtures" / "broken_backends"))


def spec_of(name: str) -> BackendSpec:
    return BackendSpec(role="attention", name="mine", factory=f"broken_backends:{name}", caps=(CAPS,))


@pytest.fixture
def verified(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, dict[str, Any], dict[str, Any]]]:
    """``verified(name, check, *flags)`` -> (exit code, card, outcomes by name) of ``minisgl verify --json``."""

    def verify(name: str, check: str, *flags: str) -> tuple[int, dict[str, Any], dict[str, Any]]:
        offer = Candidate(spec_of(name), "dist-of-test", "1.2", 0)
        registry = Registry((PluginRecord("dist-of-test", "x = broken_backends", candidates=(offer,)),))
        monkeypatch.setattr(backend_under_test, "discover", lambda: registry)
        monkeypatch.setattr("minisgl_core.cli.verify.discover", lambda: registry)
        code = main(["verify", "attention:mine", "--device", "cpu", "--quick", "--json", "--check", check, *flags])
        said = capsys.readouterr()
        card = json.loads(said.out)
        assert not said.err
        return code, card, {outcome["name"]: outcome for outcome in card["outcomes"]}

    return verify


@pytest.mark.parametrize(
    ("name", "cause"),
    [
        ("Crashes", r"it ended the process by SIGSEGV (broken_backends.py:"),
        ("ExitsAtOnce", "it ended the process with exit code 3"),
        ("ExitsAtOnceInItsConstructor", "it ended the process with exit code 4"),
        ("ExitsByException", "it calls sys.exit(5)"),
        ("RaisesInForward", "IndexError: tuple index out of range (broken_backends.py:"),
        ("LeavesAThread", "it left behind the thread 'my worker', which is no daemon"),
        ("LeavesAProcess", "it left behind the child process 'sleep 1000'"),
    ],
)
def test_case_118_the_card_names_the_check_and_the_cause(verified: Any, name: str, cause: str) -> None:
    code, card, outcomes = verified(name, "decode/float32/head_dim")
    assert code == 1 and card["passed"] is False
    assert set(outcomes) == {"decode/float32/head_dim=32", "decode/float32/head_dim=64"}
    for outcome in outcomes.values():  # the second one is run although the first ended its process
        assert outcome["status"] == "failed" and cause in outcome["detail"]
        assert "assert_conforms('attention:mine@dist-of-test', AttentionCheck(" in outcome["snippet"]


def test_case_118_a_crash_costs_its_own_check_only(verified: Any) -> None:
    code, _, outcomes = verified("CrashesOnce", "head_dim=")
    assert code == 1
    assert "SIGABRT (broken_backends.py:" in outcomes["decode/float32/head_dim=32"]["detail"]
    assert outcomes["decode/float32/head_dim=64"]["status"] == "passed"


def test_case_118_a_hang_ends_at_the_limit(verified: Any) -> None:
    began = time.monotonic()
    code, _, outcomes = verified("Hangs", "decode/float32/", "--limit", "3")
    assert code == 1 and time.monotonic() - began < 60
    details = [outcome["detail"] for outcome in outcomes.values()]
    assert all("it did not end within 3 s (broken_backends.py:" in detail for detail in details[:MOST_HANGS])
    assert {outcome["status"] for outcome in list(outcomes.values())[MOST_HANGS:]} == {"skipped"}
    assert f"not run: {MOST_HANGS} checks hung" in details[-1]


def test_case_118_a_crash_or_hang_outside_the_caps_is_what_they_said(verified: Any) -> None:
    code, _, outcomes = verified("HangsOutsideItsCaps", "head_dim=", "--limit", "3")
    assert code == 0
    assert outcomes["outside/head_dim=80"]["status"] == "passed"
    assert "it did not end within 3 s" in outcomes["outside/head_dim=80"]["detail"]


def test_case_118_what_is_printed_is_a_note_and_json_stays_pure(verified: Any) -> None:
    code, card, outcomes = verified("Prints", "head_dim=64")
    (outcome,) = outcomes.values()
    assert code == 0 and card["checks"]["note"] == 1 and outcome["status"] == "note"
    assert "it printed to standard output: 'a word from Python" in outcome["detail"]
    assert "and one from C" in outcome["detail"]
    assert "it printed to standard error: 'a warning" in outcome["detail"]


@pytest.mark.parametrize(
    ("name", "cause"),
    [
        ("LeaksDescriptors", "file descriptors are left open by 6 backends, each closed: /dev/null"),
        ("LeaksMemoryOfTheCLibrary", "bytes are left in use by 6 backends, each closed"),
    ],
)
def test_case_118_what_each_backend_leaves_behind_is_named(verified: Any, name: str, cause: str) -> None:
    code, _, outcomes = verified(name, "lifetime")
    assert code == 1 and cause in outcomes["lifetime"]["detail"]
    assert "LifetimeCheck(name='lifetime', of=AttentionCheck(" in outcomes["lifetime"]["snippet"]


def test_case_118_a_backend_that_always_crashes_is_given_up() -> None:
    device = DeviceFixture("cpu")
    under_test = BackendUnderTest(spec_of("Crashes"))
    checks = [check for check in checks_of(under_test, device, quick=True) if check.name.startswith("decode/float32/")]
    with CheckProcess(under_test, device.facts) as process:
        process.ends = MOST_ENDS - 1
        outcomes = [process.run(check) for check in checks[:2]]
    assert [outcome.status for outcome in outcomes] == ["failed", "skipped"]
    assert f"{MOST_ENDS} ended their process before" in outcomes[1].detail


class Isolated(AttentionSuite):
    spec = spec_of("CrashesOnce")
    device = "cpu"
    isolated = True


def test_case_118_an_isolated_suite_survives_a_crash() -> None:
    device = DeviceFixture("cpu")
    under_test = BackendUnderTest(spec_of("CrashesOnce"))
    checks = {check.name: check for check in checks_of(under_test, device, quick=True)}
    with pytest.raises(Mismatch, match="it ended the process by SIGABRT"):
        Isolated().test_conforms((under_test, device, checks["decode/float32/head_dim=32"]))
    Isolated().test_conforms((under_test, device, checks["decode/float32/head_dim=64"]))


@pytest.mark.parametrize(
    ("name", "refused"),
    [
        ("CannotRunHere", ["decode/float32/head_dim=32"]),
        ("CannotStartHere", ["decode/float32/head_dim=32", "decode/float32/head_dim=64"]),
    ],
)
def test_case_141_a_refusal_is_no_failure(verified: Any, name: str, refused: list[str]) -> None:
    _, card, outcomes = verified(name, "decode/float32/head_dim")
    assert [name for name, outcome in outcomes.items() if outcome["status"] == "refused"] == refused
    assert card["checks"]["refused"] == len(refused) and card["checks"]["failed"] == 0
    assert "wanted a prebuilt kernel, supported none" in outcomes[refused[0]]["detail"]


def test_case_141_flashinfer_refuses_kernels_that_may_not_be_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    fakes, plugin = pytest.importorskip("minisgl_cpu_sim.fakes"), pytest.importorskip("minisgl_flashinfer.plugin")
    fakes.inject(monkeypatch, "flashinfer")
    monkeypatch.setenv("FLASHINFER_DISABLE_JIT", "1")
    spec = fakes.on_cpu(plugin.minisgl_attention_backends()[0])
    under_test = BackendUnderTest(replace(spec, caps=spec.caps[:1]), options={"workspace_mib": 16})
    device = DeviceFixture("cpu")
    names = (
        "decode/float32/head_dim",
        "decode/float32/window=16",
        "decode/float32/softcap=2",
        "decode/float32/one_row",
    )
    checks = [check for check in checks_of(under_test, device, quick=True) if check.name.startswith(names)]
    outcomes = {outcome.name: outcome for outcome in run_checks(under_test, checks, device)}
    refused = [name for name, outcome in outcomes.items() if outcome.status == "refused"]
    assert refused == [f"decode/float32/{name}" for name in ("head_dim=256", "window=16", "softcap=2")]
    assert {outcomes[name].status for name in outcomes if name not in refused} == {"passed"}
    assert "FLASHINFER_DISABLE_JIT forbids" in outcomes[refused[0]].detail


def test_case_119_doctor_names_what_an_import_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from minisgl_core.doctor import diagnose
    from minisgl_core.registry import DeviceFacts

    (tmp_path / "impolite_plugin.py").write_text(
        "import os\n"
        "from minisgl_core.plugin_api import PluginInfo, hookimpl\n"
        "os.environ['OMP_SCHEDULE'] = 'static'\n"
        "MINISGL_PLUGIN = PluginInfo('impolite', {'kv': '>=1,<2'})\n"
        "@hookimpl\n"
        "def minisgl_kv_kernels():\n"
        "    from minisgl_core.scheduler import Scheduler\n"
        "    return []\n"
    )
    info = tmp_path / "impolite-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: impolite\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[minisgl]\nmain = impolite_plugin\n")
    monkeypatch.syspath_prepend(tmp_path)
    found = {item.text for item in diagnose(DeviceFacts(kind="cpu"), allow=["impolite"]).findings}
    assert "importing impolite_plugin changes the environment: OMP_SCHEDULE" in found
    private = "it imports what is no part of the contract: minisgl_core.scheduler (impolite_plugin.py:7)"
    assert private in found


@pytest.mark.parametrize("name", ["checks_of", "run_check", "run_checks", "assert_conforms", "verify"])
def test_case_127_what_the_kits_functions_take_and_return_can_be_imported_from_it(name: str) -> None:
    """The annotations are the text that a reader of the documentation sees."""
    annotations = " ".join(getattr(testing, name).__annotations__.values())
    types = set(re.findall(r"\b[A-Z]\w+", annotations)) - {"Any", "Callable", "Iterable", "None", "Sequence"}
    assert types and all(hasattr(testing, word) or hasattr(plugin_api, word) for word in types), types
