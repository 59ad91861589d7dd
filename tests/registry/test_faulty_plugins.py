"""Plugins that are not as the contract says: each fails alone, and its record says why."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from minisgl_core.plugin_api import BackendSpec, Caps, MultipleOf, PluginInfo, hookimpl

ATTENTION = PluginInfo(name="x", api={"attention": ">=1,<2"})


def offer(*specs: Any) -> Any:
    return hookimpl(lambda: list(specs))


GOOD = BackendSpec(role="attention", name="bad", factory="a.b:C", caps=(Caps(),))


def _raise(error: BaseException) -> Any:
    def hook() -> list[BackendSpec]:
        raise error

    return hookimpl(hook)


def _spec(**fields: Any) -> dict[str, Any]:
    spec = BackendSpec(**{"role": "attention", "name": "bad", "factory": "a.b:C", "caps": (Caps(),), **fields})
    return {"MINISGL_PLUGIN": ATTENTION, "minisgl_attention_backends": offer(spec)}


def _caps(**fields: Any) -> dict[str, Any]:
    return _spec(caps=(Caps(**fields),))


def _nothing() -> list[BackendSpec]:
    return []


@hookimpl
def _generator() -> Any:
    yield GOOD


@hookimpl(wrapper=True)
def _wrapper() -> Any:
    return (yield)


@hookimpl
def _asks_too_much(engine: object, device: object, mine: int = 1) -> list[BackendSpec]:
    return []


FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "hook raises": ({"minisgl_attention_backends": _raise(ValueError("boom"))}, "ValueError: boom"),
    "hook exits": ({"minisgl_attention_backends": _raise(SystemExit(3))}, "SystemExit: 3"),
    "hook returns None": ({"minisgl_attention_backends": hookimpl(lambda: None)}, "returned None"),
    "hook returns a spec": ({"minisgl_attention_backends": hookimpl(lambda: GOOD)}, "returned BackendSpec"),
    "hook returns an iterator": ({"minisgl_attention_backends": hookimpl(lambda: iter([GOOD]))}, "list_iterator"),
    "list of names": ({"minisgl_attention_backends": offer("fa")}, "a list holding str"),
    "generator": ({"minisgl_attention_backends": _generator}, "is a generator"),
    "wrapper": ({"minisgl_attention_backends": _wrapper}, "hook wrapper"),
    "misspelt": ({"minisgl_atention_backends": offer(GOOD)}, "did you mean 'minisgl_attention_backends'?"),
    "misspelt and undecorated": ({"minisgl_kv_kernel": _nothing}, "did you mean 'minisgl_kv_kernels'?"),
    "one right, one misspelt": (
        {"minisgl_attention_backends": offer(GOOD), "minisgl_linear": _nothing},
        "did you mean 'minisgl_linears'?",
    ),
    "undecorated": ({"minisgl_attention_backends": lambda: [GOOD]}, "not marked with @hookimpl"),
    "parameters": (
        {"minisgl_attention_backends": _asks_too_much},
        "its minisgl_attention_backends requires engine, device; it takes no parameters",
    ),
    "an observer's parameters": (
        {"minisgl_plan_resolved": hookimpl(lambda plan, engine: None)},
        "its minisgl_plan_resolved requires engine; it takes only plan",
    ),
    "one hook twice": (
        {
            "minisgl_attention_backends": offer(GOOD),
            "again": hookimpl(lambda: [GOOD], specname="minisgl_attention_backends"),
        },
        "it implements minisgl_attention_backends twice",
    ),
    "an observer and a fault": (
        {"minisgl_plan_resolved": hookimpl(lambda plan: None), "minisgl_attention_backends": hookimpl(lambda: None)},
        "its minisgl_attention_backends returned None",
    ),
    "no hooks": ({}, "implements no hook"),
    "no info": ({"MINISGL_PLUGIN": None, "minisgl_attention_backends": offer(GOOD)}, "no MINISGL_PLUGIN"),
    "unknown role": ({"MINISGL_PLUGIN": PluginInfo("x", {"atention": ">=1"})}, "did you mean 'attention'?"),
    "no range": ({"MINISGL_PLUGIN": PluginInfo("x")}, "no range for attention"),
    "bad range": ({"MINISGL_PLUGIN": PluginInfo("x", {"attention": "one"})}, "not a version range"),
    "other role": ({"minisgl_attention_backends": offer(BackendSpec("kv", "x", "a.b:C"))}, "role 'kv'"),
    "twice": ({"minisgl_attention_backends": offer(GOOD, GOOD)}, "twice"),
    "name with @": (_spec(name="a@b"), "name is 'a@b'"),
    "factory is a class": (_spec(factory=int), "factory is <class 'int'>"),
    "factory without class": (_spec(factory="a.b"), "factory is 'a.b'"),
    "requires is text": (_spec(requires="torch"), "requires is 'torch'"),
    "caps is one set": (_spec(caps=Caps()), "caps is not a tuple"),
    "no caps": (_spec(caps=()), "caps is empty, so it could never be chosen; say in at least one Caps"),
    "requires is misspelt": (
        _spec(requires=("imprt:torch",)),
        "'imprt:torch', which is of an unknown kind; did you mean 'i",
    ),
    "requires is of no kind": (
        _spec(requires=("gpu:8",)),
        "'gpu:8', which is of an unknown kind; use import: or exec:",
    ),
    "requires one of nothing": (
        _spec(requires=(("torch", "import:"),)),
        "requires has 'import:', which names no module",
    ),
    "requires a path": (_spec(requires=("import:a/b.so",)), "requires has 'import:a/b.so', which names no module"),
    "requires no program": (_spec(requires=("exec:",)), "requires has 'exec:', which names no program"),
    "requires >>": (
        _spec(requires=("torch>>2",)),
        "'torch>>2', which is no requirement; use one such as \"torch>=2.9\"",
    ),
    "device": (_caps(devices=("gpu",)), "unknown device 'gpu'; use cpu or cuda; did you mean 'cuda'?"),
    "device of its own": (_caps(devices=("tpu9",)), "caps.devices has the unknown device 'tpu9'; use cpu or cuda"),
    "phase": (_caps(phases=("prefil",)), "unknown phase 'prefil'; use prefill or decode; did you mean 'prefill'?"),
    "host_plan": (_caps(host_plan=("decode",)), "caps.host_plan is ('decode',); use True or False"),
    "layout": (_caps(kv_layouts=("NDH",)), "unknown KV layout 'NDH'; use NHD or HND; did you mean 'NHD'?"),
    "dtype": (_caps(dtypes=("fp32",)), "caps.dtypes has the unknown dtype 'fp32'; did you mean 'float32'?"),
    "KV dtype": (
        _caps(kv_dtypes=("fp8",)),
        "caps.kv_dtypes has the unknown dtype 'fp8'; did you mean 'float8_e4m3fn'?",
    ),
    "dtype of its own": (_caps(dtypes=("nf4",)), "unknown dtype 'nf4'; use float64, float32, "),
    "operation": (_caps(ops=("rmsnorm",)), "unknown operation 'rmsnorm'; did you mean 'rms_norm'?"),
    "sm reversed": (
        _caps(sm=(100, 80)),
        "caps.sm is (100, 80), which holds nothing; the lower end comes first: (80, 100)",
    ),
    "devices is text": (_caps(devices="cpu"), "caps.devices is 'cpu'"),
    "sm is a number": (_caps(sm=90), "caps.sm is 90"),
    "head_dims is a tuple": (_caps(head_dims=(64,)), "use OneOf, MultipleOf or ANY"),
    "page multiple of 0": (_caps(page_sizes=MultipleOf(0)), "positive"),
    "graph is a flag": (_caps(graph=True), "caps.graph is True"),
}


@pytest.mark.parametrize("case", FAULTS)
def test_a_faulty_plugin_fails_alone_and_says_why(world: Any, make_spec: Any, case: str) -> None:
    attributes, text = FAULTS[case]
    hook = (
        {}
        if any(name.startswith("minisgl_") for name in attributes) or case == "no hooks"
        else {"minisgl_attention_backends": offer(GOOD)}
    )
    world.module("bad_plugin", **{"MINISGL_PLUGIN": ATTENTION, **hook, **attributes})
    world.distribution("bad", "[minisgl]\nmain = bad_plugin\n")
    world.plugin("good", make_spec("attention", "fine"))
    failure = world.record("bad").failure
    assert text in failure and "\n" not in failure
    registry = world.registry()
    assert [item.label for item in registry.candidates("attention")] == ["fine@good"]
    (bad,) = registry.failures()
    assert (bad.distribution, bad.candidates, bad.observer) == ("bad", (), None)


@pytest.mark.parametrize("error", [ImportError("no CUDA here"), SystemExit("bye"), AttributeError("x")])
def test_a_plugin_that_fails_on_import_is_recorded(
    world: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    (tmp_path / "broken_plugin.py").write_text(f"raise {type(error).__name__}({error.args[0]!r})")
    monkeypatch.syspath_prepend(tmp_path)
    world.distribution("broken", "[minisgl]\nmain = broken_plugin\n")
    record = world.record("broken")
    assert record.failure == f"{type(error).__name__}: {error.args[0]}"
    assert record.import_ms > 0


def test_the_users_interrupt_is_not_caught(world: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "slow_plugin.py").write_text("raise KeyboardInterrupt")
    monkeypatch.syspath_prepend(tmp_path)
    world.distribution("slow", "[minisgl]\nmain = slow_plugin\n")
    with pytest.raises(KeyboardInterrupt):
        world.registry()


def test_case_86_an_api_of_the_future_is_refused_with_both_versions(world: Any) -> None:
    world.module(
        "future_plugin",
        MINISGL_PLUGIN=PluginInfo("future", {"attention": ">=99"}),
        minisgl_attention_backends=offer(GOOD),
    )
    world.distribution("future", "[minisgl]\nmain = future_plugin\n")
    assert world.record("future").failure == "it needs attention API >=99, this core serves 1.0"


@pytest.mark.parametrize(
    "fields",
    [
        {
            "requires": (
                "torch>=2.9,<3",
                "x[extra] ~= 1.0; python_version > '3'",
                "name @ https://host/file.whl",
                "a-b_c.d",
            )
        },
        {"requires": ("import:a.b_c", ("exec:g++", "exec:c++"))},
        {"caps": (Caps(sm=(90, 90), dtypes=("float8_e4m3fn",), features=frozenset({"windw", "anything"})),)},
        {"caps": (Caps(devices=["cpu"], phases=["decode"], formats=("fp8",), architectures=("Any",)),)},
    ],
)
def test_what_is_right_or_open_is_accepted(world: Any, fields: dict[str, Any]) -> None:
    world.module("fine_plugin", **_spec(**fields))
    world.distribution("fine", "[minisgl]\nmain = fine_plugin\n")
    assert world.record("fine").failure == ""
