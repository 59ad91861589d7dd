"""``minisgl verify``: report cards, exit codes, and what a failed check prints."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from minisgl_core.cli.app import main
from minisgl_core.errors import UsageError
from minisgl_core.plugin_api import ANY, BackendSpec, Caps, OneOf
from minisgl_core.registry import Candidate, PluginRecord, Registry
from minisgl_core.testing import BackendUnderTest, DeviceFixture, Mismatch, backend_under_test

pytest.importorskip("minisgl_cpu_sim")

CAPS = Caps(
    devices=("cpu",),
    dtypes=("float32",),
    kv_dtypes=("float32",),
    head_dims=OneOf(32, 64),
    gqa_ratios=ANY,
    page_sizes=ANY,
    kv_layouts=("NHD",),
    phases=("decode",),
    features=frozenset({"window"}),
)


@pytest.fixture
def offer(monkeypatch: pytest.MonkeyPatch) -> Callable[..., BackendSpec]:
    """``offer(name, variant=...)`` installs ``attention:NAME`` of tests/testing/mutants for this test."""
    torch.set_num_threads(1)
    monkeypatch.syspath_prepend(str(Path(__file__).parent / "mutants"))
    candidates: list[Candidate] = []

    def registry() -> Registry:
        record = PluginRecord("dist-of-test", "x = mutants_attention", candidates=tuple(candidates))
        return Registry((record,))

    monkeypatch.setattr(backend_under_test, "discover", registry)
    monkeypatch.setattr("minisgl_core.cli.verify.discover", registry)

    def make(name: str, **fields: object) -> BackendSpec:
        made = {"role": "attention", "name": "mine", "factory": f"mutants_attention:{name}", "caps": (CAPS,), **fields}
        spec = BackendSpec(**made)  # type: ignore[arg-type]
        candidates.append(Candidate(spec, "dist-of-test", "1.2", len(candidates)))
        return spec

    return make


def test_a_right_backend_gets_a_report_card(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["verify", "attention:torch", "--device", "cpu", "--quick", "--check", "window"]
    assert main([*arguments, "--json"]) == 0
    card = json.loads(capsys.readouterr().out)
    assert card["backend"] == "attention:torch@minisgl-cpu-sim" and card["passed"] is True
    assert card["checks"]["run"] == card["checks"]["passed"] == len(card["outcomes"]) >= 8
    assert card["worst_errors"]["float32"]["error"] < 1e-4
    assert card["spec"]["caps"][0]["head_dims"] == "ANY" and card["versions"]["torch"] == torch.__version__
    assert card["device"]["kind"] == "cpu"
    assert main(arguments) == 0
    text = capsys.readouterr().out
    assert "prefill/float32" in text and "PASSED" in text and "worst error, float32" in text


@pytest.mark.slow
def test_the_whole_quick_suite_is_timed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "linear:plain", "--device", "cpu", "--quick", "--json"]) == 0
    speeds = json.loads(capsys.readouterr().out)["speeds"]
    assert {speed["unit"] for speed in speeds} == {"GB/s", "TFLOP/s"}
    assert all(speed["achieved"] > 0 and speed["limit"] > 0 and speed["microseconds"] > 0 for speed in speeds)


def test_a_failed_check_prints_numbers_and_a_program_that_fails_alike(
    offer: Callable[..., BackendSpec], capsys: pytest.CaptureFixture[str]
) -> None:
    offer("WindowOffByOne")
    assert main(["verify", "attention:mine", "--device", "cpu", "--quick", "--check", "window=16", "--json"]) == 1
    card = json.loads(capsys.readouterr().out)
    (failed,) = [outcome for outcome in card["outcomes"] if outcome["status"] == "failed"]
    assert failed["name"] == "decode/float32/window=16"
    assert "the worst is [" in failed["detail"] and "expected" in failed["detail"] and "got" in failed["detail"]
    with pytest.raises(Mismatch) as again:
        exec(failed["snippet"], {})
    assert str(again.value) == failed["detail"]
    assert main(["verify", "attention:mine", "--device", "cpu", "--quick", "--check", "window=16"]) == 1
    text = capsys.readouterr().out
    assert (
        "FAILED decode/float32/window=16" in text
        and "assert_conforms('attention:mine@dist-of-test', AttentionCheck(" in text
    )


def test_outside_the_caps_is_refused_and_tried(
    offer: Callable[..., BackendSpec], capsys: pytest.CaptureFixture[str]
) -> None:
    offer("CannotDoHeadDim80")
    arguments = ["verify", "attention:mine", "--device", "cpu", "--quick", "--check", "outside/head_dim", "--json"]
    assert main(arguments) == 0
    outcomes = {outcome["name"]: outcome for outcome in json.loads(capsys.readouterr().out)["outcomes"]}
    assert outcomes["outside/head_dim=80"]["status"] == "passed"
    assert "unsupported head_dim 80" in outcomes["outside/head_dim=80"]["detail"]
    assert outcomes["outside/head_dim=16"]["status"] == "note"


def test_a_name_means_its_first_variant_that_runs_here(
    offer: Callable[..., BackendSpec], capsys: pytest.CaptureFixture[str]
) -> None:
    offer("Right", variant="absent", requires=("import:no_such_module",))
    offer("Right", variant="here")
    assert main(["verify", "attention:mine", "--device", "cpu", "--check", "one_row", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["backend"] == "attention:mine/here@dist-of-test"
    assert main(["verify", "attention:mine/absent", "--device", "cpu"]) == 1
    error = capsys.readouterr().err
    assert "attention:mine/absent cannot run here" in error and "no module no_such_module" in error


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("attention:missing", "error: no installed plugin offers 'attention:missing'; there are cpu, "),
        ("attn:torch", "error: there is no suite for role 'attn'; there are suites for attention, graph"),
        ("missing", "error: 'missing' names no role; write it as ROLE:NAME"),
        ("models:llama", "error: there is no suite for role 'models'; there are suites for attention, graph"),
    ],
)
def test_names_that_mean_nothing(name: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", name, "--device", "cpu"]) == 2
    assert message in capsys.readouterr().err


def test_a_plugin_that_failed_to_load_is_named_with_its_failure() -> None:
    registry = Registry((PluginRecord("old-one", "x = old", failure="it requires minisgl-core<0.1"),))
    with pytest.raises(UsageError, match=r"failed to load: old-one \(it requires minisgl-core<0\.1\); there are none"):
        BackendUnderTest.of("attention:old", DeviceFixture("cpu").facts, registry=registry)


@pytest.mark.parametrize(
    ("extra", "names"),
    [((), "some of the names: contract/"), (("--quick",), "some of the names (--quick has fewer): ")],
)
def test_a_text_that_no_name_holds_is_refused_with_names(
    extra: tuple[str, ...], names: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["verify", "kv:torch", "--device", "cpu", *extra, "--check"]
    assert main([*arguments, "nosuchcheck"]) == 2
    said = capsys.readouterr()
    refused, _, listed = said.err.partition("; ")
    assert refused == "error: no check's name holds 'nosuchcheck'" and listed.startswith(names) and not said.out
    *_, last = listed.split(": ")[-1].strip().split(", ")
    assert main([*arguments, last, "--json"]) == 0
    assert last in {outcome["name"] for outcome in json.loads(capsys.readouterr().out)["outcomes"]}


def test_an_unknown_name_is_refused_before_torch_is_imported() -> None:
    code = (
        "import sys; from minisgl_core.cli.app import main; "
        "assert main(['verify', 'attention:no-such']) == 2; assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "no installed plugin offers 'attention:no-such'" in done.stderr
