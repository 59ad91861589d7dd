"""The failure matrix: what each way of being broken does to the real commands.

``plugins`` always lists it, ``explain`` and ``generate`` go on without it unless it is named, and ``doctor`` says
what to do. The sources are in tests/fixtures/broken_plugins.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from minisgl_core.core import SamplingParams
from minisgl_core.errors import EngineError
from minisgl_core.llm import LLM

pytest.importorskip("minisgl_cpu_sim")

NOT_LOADED = {
    "import_raises": "ImportError: libkernels.so.12: cannot open shared object file",
    "hook_raises": "ValueError: no kernels for this machine",
    "wrong_type": "its minisgl_attention_backends returned a list holding str; return a list of BackendSpec",
    "api_too_new": "it needs attention API >=2, this core serves 1.0",
    "unknown_role": "MINISGL_PLUGIN.api names the unknown role 'atention'; did you mean 'attention'?",
    "import_exits": "importing it would end or block every command: the process died (exit code 0)",
    "misspelt_hook": "it has an unknown hook minisgl_attention_backend; did you mean 'minisgl_attention_backends'?",
}
"""Plugins that offer nothing, and the reason that is recorded."""

UNUSABLE = {
    "lying_factory": ("factory", "has no attribute 'NoSuchClass'", "correct `factory` of its spec"),
    "factory_segfaults": ("abi", "the process died (SIGSEGV)", "reinstall broken-factory-segfaults for the torch"),
    "missing_requirement": (
        "requirement",
        "it needs no-such-kernels>=3, found no-such-kernels is not installed",
        "pip install 'no-such-kernels>=3'",
    ),
    "old_requirement": ("requirement", "it needs pluggy>=1000, found pluggy ", "pip install 'pluggy>=1000'"),
    "cuda_at_import": ("import", "initialises a device: torch has initialised CUDA", "leave devices to the factory"),
}
"""Plugins that load, and what doctor says of them: check, text, remedy."""

EXPLAIN = ("explain", "--geometry", "qwen3-0.6b", "--device", "cpu", "--json")
SMALL = ("--dtype", "float32", "--num-page-override", "256", "--max-seq-len-override", "128", "--ignore-eos", "--json")


@pytest.mark.parametrize("case", NOT_LOADED)
def test_broken_plugin_that_cannot_be_loaded_stops_nothing_else(
    case: str, commands: Any, break_with: Callable[..., str]
) -> None:
    name, reason = break_with(case), NOT_LOADED[case]
    code, out, _ = commands.run("plugins", "--json")
    (listed,) = [plugin for plugin in json.loads(out)["plugins"] if plugin["distribution"] == name]
    assert code == 0 and reason in listed["failure"] and listed["backends"] == []
    code, out, _ = commands.run(*EXPLAIN)
    data = json.loads(out)
    assert code == 0 and data["plan"] and reason in data["failed_plugins"][name]
    code, _, err = commands.run(*EXPLAIN, "--backend", f"attention=fast@{name}")
    assert code == 1 and f"plugin {name}, named by backends.attention, failed to load: " in err
    code, _, err = commands.run(*EXPLAIN, "--backend", "attention=fast")
    assert code == 2 and name in err  # its names are unknowable, so it is listed
    code, findings, _ = commands.diagnose()
    (finding,) = [one for one in findings if one["about"] == name]
    if case == "import_exits":  # there it may: each import has a process of its own
        assert code == 1 and finding["text"] == "importing broken_import_exits, the process died (exit code 0)"
        return
    assert code == 1 and (finding["level"], finding["check"]) == ("wrong", "plugin")
    assert reason in finding["text"] and f"pip uninstall {name}" in finding["remedy"]


@pytest.mark.parametrize("case", UNUSABLE)
def test_broken_plugin_that_loads_is_found_by_doctor(case: str, commands: Any, break_with: Callable[..., str]) -> None:
    name, (check, text, remedy) = break_with(case), UNUSABLE[case]
    code, findings, _ = commands.diagnose()
    (finding,) = [one for one in findings if one["check"] == check and text in one["text"]]
    assert code == 1 and finding["level"] == "wrong" and remedy in finding["remedy"]
    assert name in finding["about"] or name in finding["text"]


def test_broken_plugin_whose_import_kills_the_process_does_not_kill_doctor(
    commands: Any, break_with: Callable[..., str]
) -> None:
    name = break_with("import_segfaults")
    code, findings, data = commands.diagnose()
    (finding,) = findings
    assert code == 1 and finding["about"] == name
    assert finding["text"] == "importing broken_import_segfaults, the process died (SIGSEGV)"
    assert f'deny = ["{name}"]' in finding["remedy"]
    assert data["plugins"][0]["import_ms"] is None
    commands.deny(name)
    assert commands.run("plugins")[0] == 0


def test_broken_plugin_that_prints_spoils_no_answer_and_is_named(
    commands: Any, break_with: Callable[..., str], generate: Callable[..., Any]
) -> None:
    name = break_with("prints")
    for asked in (("plugins", "--json"), EXPLAIN):
        code, out, err = commands.run(*asked)
        assert code == 0 and json.loads(out) and err == "fast kernels 1.0\nlooking for hardware\n"
        del sys.modules["broken_prints"]
    code, answered, err = generate()
    assert (code, answered) == (0, True) and err.startswith(
        "fast kernels 1.0\nlooking for hardware\nwhat a nice plan\n"
    )
    assert f"{name} (main = broken_prints)\n  name  " in (out := commands.run("plugins")[1])
    assert "  printed   'looking for hardware' (to standard output" in out  # its module is loaded already
    del sys.modules["broken_prints"]
    code, (finding,), _ = commands.diagnose()
    assert (code, finding["level"], finding["check"], finding["about"]) == (0, "note", "plugin", name)
    assert finding["text"].endswith("which every command does: 'fast kernels 1.0'")


def test_case_127_a_feature_that_nothing_requests_is_a_note_of_doctor(
    commands: Any, break_with: Callable[..., str]
) -> None:
    break_with("unknown_feature")
    code, findings, _ = commands.diagnose()
    assert code == 0 and [(one["level"], one["check"]) for one in findings] == [("note", "claims")] * 2
    assert "'ring'" in findings[0]["text"] and "did you mean 'window'?" in findings[1]["text"]


def test_case_124_a_plugin_with_a_taken_name_is_noted_and_the_name_stays(
    commands: Any, break_with: Callable[..., str]
) -> None:
    name = break_with("duplicate_name")
    for typed, distribution in (("torch", "minisgl-cpu-sim"), (f"torch@{name}", name)):
        code, out, err = commands.run(*EXPLAIN, "--backend", f"attention={typed}")
        data = json.loads(out)
        assert (code, err, data["plan"]["buckets"][0]["choice"]["distribution"]) == (0, "", distribution)
        assert data["notes"][name].startswith(f"its attention:torch is torch@{name};")
    code, findings, _ = commands.diagnose(also=["minisgl-cpu-sim"])
    (finding,) = [one for one in findings if name in one["about"]]
    assert (code, finding["level"], finding["check"]) == (0, "note", "clash")
    assert finding["remedy"].startswith(f"write torch@{name} to use it")


def test_broken_plugin_without_its_requirement_is_refused_with_the_command_that_helps(
    commands: Any, break_with: Callable[..., str]
) -> None:
    break_with("missing_requirement")
    data = json.loads(commands.run(*EXPLAIN, "--backend", "attention=missing_requirement")[1])
    assert data["plan"] is None
    candidate = next(c for c in data["entries"][0]["candidates"] if c["backend"].startswith("missing_requirement"))
    assert candidate["status"] == "rejected" and candidate["reasons"][0]["code"] == "requires"
    assert candidate["would_allow"] == ["pip install 'no-such-kernels>=3'"]


@pytest.fixture
def generate(commands: Any, tiny: Callable[[str], Path], answers: Callable[[str], Any]) -> Callable[..., Any]:
    """``generate(flags...)`` -> (exit code, right tokens?, standard error)"""

    def run(*flags: str) -> tuple[int, bool, str]:
        wanted = answers("s93")
        prompt = ",".join(map(str, wanted.prompts[0]))
        asked = ("--model", str(tiny("s93")), "--prompt-ids", prompt, "--max-tokens", "4", "--temperature", "0")
        code, out, err = commands.run("generate", *asked, *SMALL, *flags)
        tokens = json.loads(out)["token_ids"] if out else []
        assert tokens in ([], wanted.continuations[0][:4]), "wrong tokens"
        return code, bool(tokens), err

    return run


def test_broken_plugin_is_a_warning_to_a_generation_that_does_not_need_it(
    generate: Callable[..., Any], break_with: Callable[..., str], caplog: pytest.LogCaptureFixture
) -> None:
    name = break_with("hook_raises")
    assert generate()[:2] == (0, True)
    warnings = [record.getMessage() for record in caplog.records if name in record.getMessage()]
    assert warnings == [f"plugin {name} is not used: ValueError: no kernels for this machine"]


@pytest.mark.parametrize(
    ("case", "text"),
    [
        ("lying_factory", "cannot be imported: AttributeError: module 'broken_lying_factory' has no attribute"),
        ("factory_raises", "failed to start: RuntimeError: no workspace of 3 TiB"),
        ("forward_raises", "failed in a step: RuntimeError: an illegal memory access was encountered"),
    ],
)
def test_broken_plugin_that_is_named_ends_the_command_and_is_named(
    case: str, text: str, generate: Callable[..., Any], break_with: Callable[..., str]
) -> None:
    name = break_with(case)
    code, answered, err = generate("--backend", f"attention={case}")
    last = err.splitlines()[-1]
    assert (code, answered) == (1, False)
    assert last.startswith(f"error: attention backend {case}@{name} 1.0 {text}")
    assert "choose another with --backend attention=NAME" in last and "Traceback" not in err


@pytest.mark.parametrize(
    ("case", "expected"),
    [("probe_segfaults", "the probe died (exit code -11)"), ("probe_hangs", "the probe did not answer within 4 s")],
)
def test_broken_plugin_whose_probe_crashes_or_hangs_is_struck_and_the_next_one_runs(
    case: str,
    expected: str,
    generate: Callable[..., Any],
    break_with: Callable[..., str],
    commands: Any,
    caplog: pytest.LogCaptureFixture,
) -> None:
    name = break_with(case)
    commands.monkeypatch.setenv("MINISGL_PROBE_TIMEOUT_S", "4")
    assert generate("--backend", f"attention={case},torch")[:2] == (0, True)
    (line,) = [r.getMessage() for r in caplog.records if r.getMessage().startswith("attention.prefill")]
    assert f"{case}@{name} cannot run" in line and expected in line and "using torch@minisgl-cpu-sim" in line
    code, findings, _ = commands.diagnose(
        "--geometry", "qwen3-0.6b", "--backend", f"attention={case},torch", also=["minisgl-cpu-sim"]
    )
    (finding,) = [one for one in findings if one["check"] == "probe"]
    assert code == 1 and finding["about"] == f"attention:{case}@{name}"
    assert expected.replace("exit code -11", "SIGSEGV") in finding["text"]


def test_broken_plugin_that_fails_in_a_step_fails_its_requests_and_stops_the_engine(
    break_with: Callable[..., str], tiny: Callable[[str], Path], answers: Callable[[str], Any], commands: Any
) -> None:
    break_with("forward_raises")
    wanted, settings = answers("s93"), {"num_page_override": 256, "max_seq_len_override": 128, "max_running_req": 4}
    greedy = SamplingParams(max_tokens=4, ignore_eos=True)
    with LLM(tiny("s93"), dtype="float32", backends={"attention": "forward_raises"}, **settings) as llm:
        with pytest.raises(EngineError, match=r"attention backend forward_raises@.* failed in a step") as caught:
            llm.generate(wanted.prompts, greedy, progress=False)
        assert isinstance(caught.value.__cause__, RuntimeError)
        with pytest.raises(EngineError, match="stopped after an error: attention backend forward_raises"):
            llm.generate(wanted.prompts, greedy, progress=False)
    with LLM(tiny("s93"), dtype="float32", **settings) as llm:
        answer = llm.generate(wanted.prompts, greedy, progress=False)
    assert [one["token_ids"] for one in answer] == [tokens[:4] for tokens in wanted.continuations]
