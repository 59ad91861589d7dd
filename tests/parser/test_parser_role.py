"""The role ``parser``: chosen by the chat template, named by the config, checked by its suite."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from minisgl_core.errors import ConfigError
from minisgl_core.modelconfig.geometries import geometry
from minisgl_core.plugin_api import BackendSpec
from minisgl_core.registry import DeviceFacts, Plan, PlanQuery, discover, resolve_plan
from minisgl_core.registry.explain import explain
from minisgl_core.scaffold import write_distribution
from minisgl_core.testing import BackendUnderTest, DeviceFixture, ParserSuite, checks_of, run_checks

pytest.importorskip("minisgl_cpu_sim")

HERMES = "{{ tools }} <tool_call>"
CODER = HERMES + " <function=x> <parameter=y>"
LLAMA = "<|start_header_id|> <|python_tag|>"
SMALL_LLAMA = '<|start_header_id|> {"name": n, "parameters": p}'
DEEPSEEK = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>"


def plan(template: str, **fields: Any) -> Plan:
    query = PlanQuery(geometry("smollm2-135m"), DeviceFacts("cpu"), "float32", chat_template=template, **fields)
    return resolve_plan(query, discover())


def names(template: str, **fields: Any) -> tuple[str, str]:
    found = plan(template, **fields)
    return found.choice("parser", op="reasoning").name, found.choice("parser", op="tools").name


@pytest.mark.parametrize(
    ("template", "chosen"),
    [
        ("", ("none", "none")),
        ("{{ messages }}", ("none", "none")),
        (HERMES, ("none", "hermes")),
        (HERMES + "</think>", ("think", "hermes")),
        (CODER, ("none", "qwen3_coder")),
        (LLAMA, ("none", "llama3")),
        (SMALL_LLAMA, ("none", "llama3")),
        (DEEPSEEK + "</think>", ("think", "deepseek")),
    ],
)
def test_auto_follows_the_chat_template(template: str, chosen: tuple[str, str]) -> None:
    assert names(template) == chosen


@pytest.mark.parametrize(
    ("backends", "chosen"),
    [
        ("none", ("none", "none")),
        ("llama3", ("think", "llama3")),
        ({"tools": "deepseek"}, ("think", "deepseek")),
        ({"tools": "none"}, ("think", "none")),
        ({"reasoning": "none"}, ("none", "hermes")),
    ],
)
def test_a_named_parser_needs_no_marker(backends: Any, chosen: tuple[str, str]) -> None:
    assert names(HERMES + "</think>", backends={"parser": backends}) == chosen


def test_an_unknown_part_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="did you mean 'tools'"):
        plan("", backends={"parser": {"tool": "hermes"}})


def test_explain_says_why_and_how_to_choose_another() -> None:
    query = PlanQuery(geometry("smollm2-135m"), DeviceFacts("cpu"), "float32", chat_template=HERMES)
    entry = next(one for one in explain(query, discover()).entries if one.entry.label == "parser.tools")
    status = {one.backend.partition("@")[0]: one for one in entry.candidates}
    assert status["hermes"].status == "chosen" and status["none"].status == "fits"
    (reason,) = status["deepseek"].reasons
    assert reason.code == "template" and "unless it is named" in str(reason)
    assert status["deepseek"].would_allow == ("backends.parser=deepseek",)


class TestHermes(ParserSuite):
    spec = "parser:hermes"


class TestQwen3Coder(ParserSuite):
    spec = "parser:qwen3_coder"


class TestLlama3(ParserSuite):
    spec = "parser:llama3"


class TestDeepSeek(ParserSuite):
    spec = "parser:deepseek"


class TestThink(ParserSuite):
    spec = "parser:think"


class TestNone(ParserSuite):
    spec = "parser:none"


def _module(name: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def test_the_scaffold_conforms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = write_distribution("demo_parser", "parser", tmp_path / "made", discover())
    source = made.folder / "src"
    monkeypatch.syspath_prepend(str(source))
    spec: BackendSpec = _module("demo_parser_plugin", source / made.package / "plugin.py").SPEC
    fixture = DeviceFixture("cpu")
    under_test = BackendUnderTest(spec)
    checks = [check for check in checks_of(under_test, fixture, quick=True) if "contract" not in check.name]
    outcomes = run_checks(under_test, checks, fixture)
    assert checks and [(one.name, one.detail) for one in outcomes if one.status != "passed"] == []
