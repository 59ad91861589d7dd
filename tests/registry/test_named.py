"""A name is strict: it runs, or the start fails; and what is named without effect is remarked."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest

from minisgl_core.cli.app import main
from minisgl_core.errors import BackendError, ConfigError
from minisgl_core.registry import DeviceFacts, PlanQuery
from minisgl_core.registry.explain import explain

CPU = DeviceFacts("cpu")
NO_EXPERTS = "this model has no experts, so {} would not be used; leave it out, or give a model with experts"


@pytest.fixture
def routing(world: Any, make_spec: Any) -> None:
    """A backend that can route and nothing else, and one that can also normalise."""
    world.plugin("router", make_spec("ops", "router", ops=("route",)))
    world.plugin("both", make_spec("ops", "both", ops=("route", "rms_norm")))


@pytest.mark.parametrize(
    ("backends", "named", "shared"),
    [
        ({"moe": "torch"}, "moe=torch", 'moe = ["torch", "auto"]'),
        ({"moe": ["torch"]}, "moe=torch", 'moe = ["torch", "auto"]'),
        ({"ops": {"route": "composed"}}, "ops.route=composed", 'ops.route = ["composed", "auto"]'),
        ({"ops": "router"}, "ops=router", 'ops = ["router", "auto"]'),
        ({"ops": {"*": "router", "sample": "composed"}}, "ops=router", 'ops = ["router", "auto"]'),
    ],
)
def test_a_name_that_this_model_has_no_use_for_is_refused(
    cpu_sim: None, routing: None, resolve: Any, make_model: Any, backends: Any, named: str, shared: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        resolve(backends=backends)
    text = str(refused.value)
    assert text.startswith(NO_EXPERTS.format(named)) and text.endswith(shared) and refused.value.exit_code == 2
    plan = resolve(backends=backends, model=make_model(moe=True))
    name = named.partition("=")[2]
    assert name in {bucket.choice.name for bucket in plan.buckets if bucket.label in ("moe", "ops.route")}


@pytest.mark.parametrize(
    "backends",
    [
        {"moe": ["torch", "auto"]},
        {"moe": "auto"},
        {"ops": {"route": ["router", "auto"]}},
        {"ops": "both"},
        {"attention": {"prefill": "torch", "decode": "cpu", "*": "torch"}},
        {"ops": {"*": "both", "rms_norm": "composed"}},
    ],
)
def test_a_preference_and_an_overridden_word_on_the_whole_may_go_unused(
    cpu_sim: None, routing: None, resolve: Any, backends: Any
) -> None:
    assert resolve(backends=backends).choice("attention", phase="decode").name in ("torch", "cpu")


def test_an_unknown_name_is_called_unknown_first(cpu_sim: None, resolve: Any) -> None:
    with pytest.raises(BackendError, match="no plugin offers the moe backend 'trch'"):
        resolve(backends={"moe": "trch"})


def test_a_backend_named_for_an_operation_that_it_lacks_is_refused(cpu_sim: None, routing: None, resolve: Any) -> None:
    with pytest.raises(
        BackendError, match=r"(?s)no backend for ops\.sample .*both@both: ops: wanted sample, supported"
    ):
        resolve(backends={"ops": {"sample": "both"}})
    assert resolve(backends={"ops": {"*": "both"}}).choice("ops", op="sample").name == "composed"


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"backends": {"graph": "emulated"}}, True),
        ({"backends": {"graph": ["emulated", "eager"]}}, True),
        ({"backends": {"graph": "emulated"}, "graph": True}, False),
        ({"backends": {"graph": "eager"}}, False),
        ({"backends": {"graph": ["emulated", "auto"]}}, False),
        ({}, False),
    ],
)
def test_a_named_runner_that_records_nothing_is_remarked(
    cpu_sim: None,
    world: Any,
    make_model: Any,
    resolve: Any,
    caplog: pytest.LogCaptureFixture,
    fields: dict[str, Any],
    expected: bool,
) -> None:
    line = "graphs are off, so graph=emulated records nothing and runs every step eagerly; cuda_graph_max_bs=N turns"
    with caplog.at_level(logging.WARNING, "minisgl"):
        resolve(**fields)
    remarks = explain(PlanQuery(make_model(), CPU, "bfloat16", **fields), world.registry()).remarks
    for lines in ([record.getMessage() for record in caplog.records], remarks):
        assert [text.startswith(line) for text in lines] == [True] * expected


def test_explain_refuses_and_remarks_like_a_start(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("minisgl_cpu_sim")
    asked = ["explain", "--geometry", "tiny", "--device", "cpu"]
    assert main([*asked, "--backend", "moe=torch"]) == 2
    assert capsys.readouterr().err.startswith("error: " + NO_EXPERTS.format("moe=torch"))
    assert main([*asked, "--backend", "graph=emulated"]) == 0
    assert "\nnote: graphs are off, so graph=emulated records nothing" in capsys.readouterr().out
    assert main([*asked, "--backend", "graph=emulated", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["remarks"]) == 1
