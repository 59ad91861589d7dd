from __future__ import annotations

import json
import logging
import subprocess
import sys
import time
from importlib.metadata import distributions, entry_points
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest

from minisgl_core.errors import BackendError, ConfigError
from minisgl_core.plugin_api import PluginInfo, hookimpl
from minisgl_core.registry import DeviceFacts, PlanQuery, discover, resolve_plan
from minisgl_core.registry.discover import BUILTIN

CPU = DeviceFacts("cpu")


def test_a_plugin_is_recorded_with_its_provenance(world: Any, make_spec: Any) -> None:
    editable = json.dumps({"url": "file:///src", "dir_info": {"editable": True}})
    world.plugin("My_Plugin", make_spec("attention", "mine"), version="2.3", direct_url__json=editable)
    record = world.record("my-plugin")
    assert (record.version, record.editable, record.failure) == ("2.3", True, "")
    assert record.name == record.to_json()["name"] == "My_Plugin"
    assert record.file == "/fake/My_Plugin_plugin.py"
    assert record.hooks == ("minisgl_attention_backends",)
    assert [item.key for item in record.candidates] == ["attention:mine@my-plugin"]
    assert record.to_json()["backends"] == ["attention:mine@my-plugin"]


def test_the_core_registers_its_built_ins_in_the_same_way(world: Any) -> None:
    record = world.record("minisgl-core")
    assert not record.failure
    keys = {f"{item.spec.role}:{item.spec.name}" for item in record.candidates}
    assert keys >= {"graph:eager", "comm:torch_dist", "platform:cpu", "platform:cuda", "linear:plain", "ops:composed"}


@pytest.mark.parametrize("editable", [True, False])
def test_the_core_is_editable_if_its_metadata_says_so(editable: bool, world: Any) -> None:
    url = json.dumps({"url": "file:///src", "dir_info": {"editable": editable}})
    world.distribution("minisgl-core", f"[minisgl]\ncore = {BUILTIN}\n", direct_url__json=url)
    assert world.record("minisgl-core").editable is editable


def test_case_86_a_plugin_for_another_core_is_refused_before_it_is_imported(world: Any) -> None:
    world.distribution("old", "[minisgl]\nmain = never_there\n", requires=["minisgl-core<0.1,>=0.0.1", "torch"])
    assert world.record("old").failure == ("it requires minisgl-core<0.1,>=0.0.1, this is minisgl-core 0.1.0")


def test_requirements_on_the_core_that_do_not_apply_are_ignored(world: Any, make_spec: Any) -> None:
    world.plugin(
        "good",
        make_spec("attention", "fine"),
        requires=["minisgl-core>=9; extra == 'next'", "Minisgl_Core>=0.1", "not a requirement !!"],
    )
    assert not world.record("good").failure


@pytest.mark.parametrize(
    ("entry_points", "text"),
    [
        ("[minisgl]\nmain = \n", "its entry point 'main =' is malformed; write NAME = MODULE"),
        ("[minisgl]\nmain\n", "its entry point 'main' is malformed"),
        ("[minisgl]\n= json\n", "its entry point '= json' is malformed"),
        ("[minisgl]\nmain = not-a-module!\n", "its entry point 'main = not-a-module!' is malformed"),
        ("[minisgl]\nmain = a = =\n", "its entry point 'main = a = =' is malformed"),
        ("[minisgl]\nmain = no_such_module_at_all\n", "ModuleNotFoundError"),
        ("[minisgl]\nmain = json:no.such.name\n", "AttributeError"),
    ],
)
def test_malformed_entry_points_are_failures_of_that_plugin(world: Any, entry_points: str, text: str) -> None:
    world.distribution("odd", entry_points)
    assert text in world.record("odd").failure


def test_a_nameless_distribution_with_a_plugin_is_reported_and_one_without_is_nothing(world: Any) -> None:
    world.distribution(None, "[minisgl]\nmain = json\n", place="/fake/nameless")
    world.distribution(None)
    failed = world.registry().failures()
    assert [(record.distribution, record.failure) for record in failed] == [
        ("nameless", "its metadata at /fake/nameless has no name; install it again")
    ]


def test_a_nameless_distribution_has_the_name_of_its_folder(tmp_path: Path) -> None:
    info = tmp_path / "My_Plugin-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[minisgl]\nmain = json\n")
    (record,) = discover(distributions(path=[str(tmp_path)])).failures()
    assert (record.distribution, record.failure) == (
        "my-plugin",
        f"its metadata at {info} has no name; install it again",
    )


@pytest.mark.parametrize(
    "text",
    [
        "[console_scripts]\nbroken line\n\n[minisgl]\nmain = json\n",
        "[ minisgl ]\n# a comment\n\n  main = json : loads [extra]\n[other]\nx\n",
    ],
)
def test_entry_points_of_other_groups_are_nobodys_business_here(world: Any, text: str) -> None:
    world.distribution("odd", text)
    assert world.record("odd").failure.startswith("it implements no hook")


def test_case_85_stale_metadata_that_hides_a_plugin_is_noted_and_shown_where_it_is_named(
    world: Any, make_spec: Any, make_model: Any
) -> None:
    world.distribution("my-plugin", version="0.1", place="/fake/stale")
    world.plugin("My.Plugin", make_spec("attention", "mine"), version="2.0")
    registry = world.registry()
    (note,) = registry.notes
    assert note.distribution == "my-plugin"
    assert "0.1 at /fake/stale" in note.text and "2.0 at /fake/site" in note.text
    assert registry.candidates("attention") == ()
    with pytest.raises(BackendError, match=r"'mine'.*my-plugin: metadata 0\.1 at /fake/stale hides 2\.0"):
        resolve_plan(PlanQuery(make_model(), CPU, "float32", backends={"attention": "mine"}), registry)


def test_the_same_folder_twice_on_the_path_is_no_fault(world: Any, make_spec: Any) -> None:
    world.plugin("mine", make_spec("attention", "mine"))
    world.distributions.append(world.distributions[0])
    world.distribution("mine", "[minisgl]\nmain = mine_plugin\n")
    registry = world.registry()
    assert registry.notes == ()
    assert len(registry.candidates("attention")) == 1


@pytest.mark.parametrize("other", ["mine", "copy"])
def test_one_module_behind_two_entry_points_counts_once(world: Any, make_spec: Any, other: str) -> None:
    world.plugin("mine", make_spec("attention", "mine"))
    world.distributions.clear()
    world.distribution("mine", "[minisgl]\na = mine_plugin\n" + "b = mine_plugin\n" * (other == "mine"))
    if other != "mine":
        world.distribution(other, "[minisgl]\nb = mine_plugin\n")
    registry = world.registry()
    assert len(registry.candidates("attention")) == 1
    (failed,) = registry.failures()
    first = ("copy", "b") if other == "copy" else ("mine", "a")  # sorted by name
    assert (
        failed.failure
        == f"it is the same plugin as {first[0]}: {first[1]} = mine_plugin; keep one of the two entry points"
    )


def test_allow_and_deny_keep_plugins_from_being_imported(world: Any, make_spec: Any) -> None:
    world.plugin("one", make_spec("attention", "first"))
    world.distribution("two", "[minisgl]\nmain = never_there\n")
    assert world.record("two", deny=["Two"]).excluded == "deny"
    left_out = world.record("two", allow=["one"])
    assert (left_out.excluded, left_out.failure) == ("allow", "")
    assert not world.record("minisgl-core", allow=["one"]).excluded
    assert world.registry(allow=[]).candidates("attention") == ()


@pytest.mark.parametrize(
    ("which", "remedy"),
    [("allow", r"did you mean 'minisgl-fa'\?"), ("deny", "installed: minisgl-core, minisgl-fa$")],
    ids=["allow", "deny"],
)
def test_a_listed_name_that_matches_nothing_is_an_error(world: Any, make_spec: Any, which: str, remedy: str) -> None:
    world.plugin("minisgl-fa", make_spec("attention", "fa"))
    with pytest.raises(ConfigError, match=rf"plugins\.{which} names 'minisgl-fs'.*; {remedy}"):
        world.registry(**{which: ["minisgl-fs"]})


def test_the_core_cannot_be_denied(world: Any) -> None:
    with pytest.raises(ConfigError, match="nothing runs without"):
        world.registry(deny=["minisgl-core"])


def test_a_failed_plugin_is_fatal_only_if_it_was_named(
    world: Any, make_spec: Any, make_model: Any, caplog: pytest.LogCaptureFixture
) -> None:
    world.plugin("good", make_spec("attention", "fine"), make_spec("kv", "fine"))
    world.distribution("bad", "[minisgl]\nmain = never_there\n")
    registry = world.registry()
    model = make_model()
    with caplog.at_level(logging.WARNING, "minisgl"):
        resolve_plan(PlanQuery(model, CPU, "float32"), registry)
    assert [record.getMessage() for record in caplog.records] == [
        "plugin bad is not used: ModuleNotFoundError: No module named 'never_there'"
    ]
    for asked in ({"allow": ["good", "bad"]}, {"backends": {"attention": "x@bad"}}):
        with pytest.raises(BackendError, match=r"plugin bad, named by .* failed to load: ModuleNotFoundError"):
            resolve_plan(PlanQuery(model, CPU, "float32", **asked), registry)


def test_case_87_what_is_found_does_not_depend_on_the_order_of_installation(world: Any, make_spec: Any) -> None:
    for name in ("c", "a", "b"):
        world.plugin(name, make_spec("attention", "same"), make_spec("kv", f"kv-{name}"))
    found = set()
    for order in permutations(list(world.distributions)):
        world.distributions = list(order)
        registry = world.registry()
        found.add(tuple(item.key for role in ("attention", "kv") for item in registry.candidates(role)))
    assert len(found) == 1


def test_observers_get_the_plan_and_one_that_fails_stops_no_other(
    world: Any, make_spec: Any, make_model: Any, caplog: pytest.LogCaptureFixture
) -> None:
    heard = []

    def failing(plan: Any) -> Any:
        raise RuntimeError("observer bug")

    def hearing(plan: Any) -> Any:
        heard.append(plan["page_size"])

    first = world.plugin("a-first", make_spec("attention", "one"))
    second = world.plugin("b-second", make_spec("kv", "two"))
    observer = world.module("only_observes", MINISGL_PLUGIN=PluginInfo("c"), minisgl_plan_resolved=hookimpl(hearing))
    world.distribution("c-third", f"[minisgl]\nmain = {observer.__name__}\n")
    first.minisgl_plan_resolved = hookimpl(failing)
    second.minisgl_plan_resolved = hookimpl(hearing)
    plan = resolve_plan(PlanQuery(make_model(), CPU, "float32"), world.registry())
    assert heard == [plan.page_size] * 2
    assert "a-first" in caplog.text and "observer bug" in caplog.text
    resolve_plan(PlanQuery(make_model(), CPU, "float32", deny=["c-third"]), world.registry())
    assert len(heard) == 3


def test_case_88_discovery_of_what_is_installed_imports_nothing_heavy() -> None:
    code = (
        "import sys; from minisgl_core.registry import discover; discover(); heavy = "
        "('torch', 'pydantic', 'triton', 'flashinfer', 'flash_attn', 'transformers'); "
        "print([name for name in heavy if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_every_plugin_of_this_project_that_is_installed_loads() -> None:
    from minisgl_core.registry import discover

    ours = {entry.dist.name for entry in entry_points(group="minisgl") if entry.dist is not None}
    registry = discover()
    assert {plugin.distribution for plugin in registry.plugins} >= ours
    assert [plugin.failure for plugin in registry.plugins if plugin.distribution in ours] == [""] * len(ours)


def test_twenty_plugins_are_found_and_resolved_in_a_tenth_of_a_second(
    world: Any, make_spec: Any, make_model: Any
) -> None:
    for index in range(20):
        specs = [make_spec(role, f"{role}{index}") for role in ("attention", "kv", "ops", "linear")]
        world.plugin(f"plugin-{index}", *specs)
    query = PlanQuery(make_model(), CPU, "float32")
    seconds = []
    for _ in range(3):
        start = time.process_time()
        resolve_plan(query, world.registry())
        seconds.append(time.process_time() - start)
    assert min(seconds) < 0.1
