from __future__ import annotations

import json
from typing import Any

import pytest

from minisgl_core.errors import BackendError
from minisgl_core.installation import exclusion_lines
from minisgl_core.plugin_api import MultipleOf
from minisgl_core.registry import DeviceFacts, PlanQuery, resolve_plan
from minisgl_core.registry.explain import CandidateReport, Explanation, explain

CPU = DeviceFacts("cpu")


@pytest.fixture
def ask(world: Any, make_model: Any) -> Any:
    def run(device: DeviceFacts = CPU, elsewhere: bool = False, model: Any = None, **fields: Any) -> Explanation:
        query = PlanQuery(model or make_model(), device, fields.pop("dtype", "bfloat16"), **fields)
        return explain(query, world.registry(), elsewhere=elsewhere)

    return run


def reports(answer: Explanation, entry: str) -> dict[str, CandidateReport]:
    (found,) = [item for item in answer.entries if item.entry.label == entry]
    return {item.backend: item for item in found.candidates}


@pytest.fixture
def paged(world: Any, make_spec: Any) -> None:
    world.plugin(
        "p",
        make_spec("attention", "good"),
        make_spec("attention", "later", tier=90),
        make_spec("attention", "coarse", page_sizes=MultipleOf(16), tier=99),
        make_spec(
            "attention", "picky", page_sizes=MultipleOf(16), dtypes=("float16",), kv_dtypes=("float16",), tier=99
        ),
        make_spec("attention", "hopeless", page_sizes=MultipleOf(16), head_dims=MultipleOf(7), tier=99),
        make_spec("attention", "absent", requires=("no-such-distribution>=1",), page_sizes=MultipleOf(16), tier=99),
        make_spec("kv", "k", dtypes=("bfloat16", "float16"), kv_dtypes=("bfloat16", "float16")),
    )


def test_every_candidate_is_accounted_for(paged: None, ask: Any) -> None:
    found = reports(ask(), "attention.decode")
    assert {name: item.status for name, item in found.items()} == {
        "good@p": "chosen",
        "later@p": "fits",
        "coarse@p": "rejected",
        "picky@p": "rejected",
        "hopeless@p": "rejected",
        "absent@p": "rejected",
    }
    assert [reason.code for reason in found["picky@p"].reasons] == ["dtype", "kv_dtype", "page_size"]


def test_counterfactuals_are_the_smallest_changes_that_would_allow_a_backend(paged: None, ask: Any) -> None:
    found = reports(ask(), "attention.decode")
    assert found["good@p"].would_allow == ()
    assert found["coarse@p"].would_allow == ("page_size=16",)
    assert found["picky@p"].would_allow == ("dtype=float16",)
    assert found["hopeless@p"].would_allow == ()
    assert found["absent@p"].would_allow == ("pip install 'no-such-distribution>=1' and page_size=16",)


def test_a_counterfactual_comes_true(paged: None, ask: Any) -> None:
    coarse = reports(ask(page_size=16), "attention.decode")["coarse@p"]
    assert (coarse.status, coarse.reasons) == ("fits", ())
    picky = reports(ask(page_size=16, dtype="float16"), "attention.decode")["picky@p"]
    assert picky.status == "chosen"


def test_windows_and_graphs_have_counterfactuals(world: Any, make_spec: Any, make_model: Any, ask: Any) -> None:
    world.plugin("p", make_spec("attention", "full", graph="never"), make_spec("kv", "k"), make_spec("graph", "cap"))
    answer = ask(model=make_model(windows=(None, 64)), graph=True)
    full = reports(answer, "attention.decode")["full@p"]
    assert full.would_allow == ("cuda_graph_max_bs=0 and max_seq_len_override=64",)


def test_explicit_names_leave_the_others_judged_but_not_named(paged: None, ask: Any) -> None:
    found = reports(ask(backends={"attention": "later"}), "attention.decode")
    assert (found["later@p"].status, found["good@p"].status) == ("chosen", "not named")
    assert found["good@p"].reasons == ()
    assert [reason.code for reason in found["coarse@p"].reasons] == ["page_size"]


def test_a_query_without_a_solution_is_an_answer(paged: None, ask: Any) -> None:
    answer = ask(backends={"attention": "hopeless"})
    assert answer.plan is None and "no backend for attention.decode" in answer.error
    with pytest.raises(BackendError, match="no plugin offers"):
        ask(backends={"attention": "unknown"})


def test_hardware_elsewhere_is_judged_as_if_all_were_installed_there(world: Any, make_spec: Any, ask: Any) -> None:
    world.plugin(
        "p",
        make_spec("attention", "hopper", sm=(90, 90), requires=("no-such-distribution", "import:no_such_module")),
        make_spec("kv", "k"),
    )
    answer = ask(device=DeviceFacts("cuda", sm=90), elsewhere=True)
    found = reports(answer, "attention.decode")["hopper@p"]
    assert (found.status, found.reasons) == ("chosen", ())
    assert found.to_install == ("pip install 'no-such-distribution'", "import:no_such_module")
    here = ask(device=DeviceFacts("cuda", sm=90))
    assert here.plan is None
    other = ask(device=DeviceFacts("cuda", sm=100), elsewhere=True)
    assert [reason.code for reason in reports(other, "attention.decode")["hopper@p"].reasons] == ["sm"]


def test_an_explanation_is_plain_json(paged: None, world: Any, ask: Any) -> None:
    world.distribution("broken", "[minisgl]\nmain = never_there\n")
    data = json.loads(json.dumps(ask().to_json()))
    assert data["plan"]["page_size"] == 1 and data["error"] is None
    assert data["failed_plugins"] == {"broken": "ModuleNotFoundError: No module named 'never_there'"}
    assert data["excluded_plugins"] == {}
    labels = [entry["entry"] for entry in data["entries"]]
    assert labels[:4] == ["attention.decode", "attention.prefill", "kv", "graph"]
    coarse = next(item for item in data["entries"][0]["candidates"] if item["backend"] == "coarse@p")
    assert coarse["would_allow"] == ["page_size=16"]
    assert coarse["reasons"][0]["supported"] == "multiples of 16"


def test_explain_does_not_send_its_reader_to_explain(world: Any, make_spec: Any, ask: Any, make_model: Any) -> None:
    world.plugin("p", make_spec("attention", "a", dtypes=("float32",)), make_spec("kv", "k"))
    error = ask().error
    assert error.startswith("no backend for attention.decode") and error.endswith("(dtype=float32 would do)")
    with pytest.raises(BackendError, match=r"; `minisgl explain` shows every candidate and what would allow it\n"):
        resolve_plan(PlanQuery(make_model(), CPU, "bfloat16"), world.registry())


def test_plugins_that_the_config_keeps_out_are_named(paged: None, world: Any, make_spec: Any, ask: Any) -> None:
    world.plugin("q", make_spec("attention", "other"))
    world.plugin("r", make_spec("kv", "other"))
    answer = ask(deny=["q"])
    assert answer.plan is not None and answer.to_json()["excluded_plugins"] == {"q": "deny"}
    answer = ask(allow=["p"], deny=["q"])
    assert answer.excluded == {"q": "deny", "r": "allow"}
    assert exclusion_lines(answer.excluded) == ("plugins.allow keeps out r", "plugins.deny keeps out q")
    refused = ask(deny=["p", "r"])
    assert refused.plan is None and refused.error.endswith("\n  plugins.deny keeps out p, r")
