"""A backend's check: called each time for what would be chosen; a refusal strikes it, and the stand-in is remarked."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from minisgl_core.errors import BackendError, ConfigError
from minisgl_core.plugin_api import CannotRun, Reason
from minisgl_core.registry import DeviceFacts, PlanQuery
from minisgl_core.registry.explain import explain
from minisgl_core.registry.probe import run_checks
from minisgl_core.registry.records import Candidate

REFUSAL = Reason("no-compiler", "compiler", "one", "none", "install one")
EXPECTED = "attention, kv: slow@plugin is slow, and only used because fast@plugin cannot run here"


@pytest.fixture
def asked(world: Any, make_spec: Any) -> SimpleNamespace:
    """A plugin whose fast backends share a check; ``says`` is what it raises, ``times`` how often it was asked."""
    state = SimpleNamespace(says=None, times=0)

    def check() -> None:
        state.times += 1
        if state.says is not None:
            raise state.says

    world.module("fast_check", check=check)
    for_cpu = {"devices": ("cpu",)}
    world.plugin(
        "plugin",
        *(make_spec(role, "fast", check="fast_check:check", tier=1, **for_cpu) for role in ("attention", "kv")),
        *(make_spec(role, "slow", stand_in=True, tier=9) for role in ("attention", "kv")),
        make_spec("attention", "elsewhere", check="fast_check:check", tier=0, devices=("cuda",)),
    )
    return state


def names(plan: Any) -> set[str]:
    return {plan.choice("attention", phase="decode").name, plan.choice("kv").name}


def test_what_passes_is_chosen_and_asked_once_for_all_that_share_it(asked: Any, resolve: Any) -> None:
    assert names(resolve()) == {"fast"}
    assert asked.times == 1
    resolve()
    assert asked.times == 2, "nothing is remembered"


def test_only_what_would_be_chosen_is_asked(asked: Any, resolve: Any) -> None:
    assert names(resolve(backends={"attention": "slow", "kv": "slow"})) == {"slow"}
    assert asked.times == 0


@pytest.mark.parametrize(
    ("says", "why"),
    [
        (CannotRun(REFUSAL), "compiler: wanted one, supported none (install one)"),
        (OSError("no disk"), "check: wanted a working backend, supported the check raised OSError: no disk"),
    ],
)
def test_a_refusal_strikes_it_and_the_stand_in_is_remarked_once(
    asked: Any, resolve: Any, caplog: pytest.LogCaptureFixture, says: Exception, why: str
) -> None:
    asked.says = says
    with caplog.at_level(logging.WARNING, "minisgl"):
        assert names(resolve()) == {"slow"}
    assert [record.getMessage() for record in caplog.records] == [f"{EXPECTED} ({why})"]


def test_a_name_stays_strict_and_a_list_says_what_it_took(
    asked: Any, resolve: Any, caplog: pytest.LogCaptureFixture
) -> None:
    asked.says = CannotRun(REFUSAL)
    with pytest.raises(
        BackendError, match=r"(?s)no backend for kv .*fast@plugin: compiler: wanted one, supported none"
    ):
        resolve(backends={"kv": "fast"})
    with caplog.at_level(logging.WARNING, "minisgl"):
        plan = resolve(backends={"attention": ["fast", "slow"], "kv": "slow"})
    assert [record.getMessage() for record in caplog.records] == list(plan.fallbacks)
    assert "fast@plugin cannot run (compiler: wanted one" in plan.fallbacks[0]


def test_a_wrong_setting_ends_it(asked: Any, resolve: Any) -> None:
    asked.says = ConfigError("CXX is 'x'", field="CXX")
    with pytest.raises(ConfigError, match="CXX is 'x'"):
        resolve()


def test_explain_asks_too_but_not_about_another_machine(asked: Any, world: Any, make_model: Any) -> None:
    asked.says = CannotRun(REFUSAL)
    query = PlanQuery(make_model(), DeviceFacts("cpu"), "bfloat16")
    answer = explain(query, world.registry())
    assert answer.plan is not None and answer.plan.choice("kv").name == "slow"
    (line,) = answer.remarks
    assert line.startswith(EXPECTED)
    kv = next(entry for entry in answer.entries if entry.entry.role == "kv")
    fast = next(item for item in kv.candidates if item.backend == "fast@plugin")
    assert (fast.status, fast.reasons) == ("rejected", (REFUSAL,))
    assert fast.would_allow == ("install one",)
    asked.times = 0
    there = explain(query, world.registry(), elsewhere=True)
    assert there.plan is not None and there.plan.choice("kv").name == "fast"
    assert asked.times == 0


def test_a_check_that_does_not_exist_is_a_reason(make_spec: Any) -> None:
    candidate = Candidate(make_spec("kv", "x", check="minisgl_core.env:nothing"), "d", "1")
    (reason,) = run_checks([candidate]).values()
    assert "AttributeError" in reason.supported
    assert run_checks([Candidate(make_spec("kv", "x"), "d", "1")]) == {}
