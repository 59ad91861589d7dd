from __future__ import annotations

import logging
from typing import Any

import pytest

from minisgl_core.errors import BackendError, ConfigError
from minisgl_core.plugin_api import OneOf, Reason
from minisgl_core.registry import DeviceFacts

CPU = DeviceFacts("cpu")
H200 = DeviceFacts("cuda", sm=90)


def test_auto_on_a_cpu(cpu_sim: None, resolve: Any) -> None:
    plan = resolve()
    assert plan.summary() == {
        "attention.decode": "cpu@minisgl-cpu-sim",
        "attention.prefill": "cpu@minisgl-cpu-sim",
        "kv": "torch@minisgl-cpu-sim",
        "graph": "eager@minisgl-core",
        "ops.rms_norm": "composed@minisgl-core",
        "ops.add_rms_norm": "composed@minisgl-core",
        "ops.allreduce_add_rms_norm": "composed@minisgl-core",
        "ops.qk_norm_rope_store": "composed@minisgl-core",
        "ops.act_and_mul": "composed@minisgl-core",
        "ops.sample": "composed@minisgl-core",
        "linear": "plain@minisgl-core",
        "comm": "torch_dist@minisgl-core",
        "platform": "cpu@minisgl-core",
        "models": "qwen3@minisgl-core",
        "grammar": "none@minisgl-core",
        "parser.reasoning": "none@minisgl-core",
        "parser.tools": "none@minisgl-core",
    }
    assert (plan.kv_layout, plan.graph, plan.kv_dtype) == ("NHD", False, "bfloat16")


def test_graphs_are_run_by_a_runner_that_captures(cpu_sim: None, resolve: Any) -> None:
    plan = resolve(graph=True)
    assert (plan.graph, plan.choice("graph").name, plan.choice("graph").graph) == (True, "emulated", "decode")


def test_an_explicit_eager_runner_turns_graphs_off_and_a_list_prefers_its_first(cpu_sim: None, resolve: Any) -> None:
    assert resolve(graph=True, backends={"graph": "eager"}).graph is False
    assert resolve(graph=True, backends={"graph": ["emulated", "eager"]}).graph is True
    assert resolve(graph=False, backends={"graph": "emulated"}).choice("graph").name == "emulated"


def test_case_76_a_moe_model_needs_no_flags_and_a_dense_one_no_moe(
    cpu_sim: None, resolve: Any, make_model: Any
) -> None:
    plan = resolve(model=make_model(moe=True))
    assert plan.choice("moe").name == "torch"
    assert plan.choice("ops", op="route").name == "composed"
    assert not any(bucket.entry.role == "moe" or bucket.entry.op == "route" for bucket in resolve().buckets)


@pytest.mark.parametrize(
    ("device", "remedy"),
    [(CPU, "pip install minisgl-cpu-sim"), (H200, "pip install minisgl-cuda minisgl-flashinfer minisgl-fa")],
)
def test_without_any_attention_plugin_the_error_says_what_to_install(
    resolve: Any, device: DeviceFacts, remedy: str
) -> None:
    with pytest.raises(BackendError) as refused:
        resolve(device=device)
    assert str(refused.value).startswith(
        f"no plugin for {device.kind} is installed: {remedy} (built by make wheels: see --find-links in the "
        "README); no backend for attention"
    )


def test_stand_ins_are_no_plugins_for_a_gpu(cpu_sim: None, world: Any, make_spec: Any, resolve: Any) -> None:
    install = "no plugin for cuda is installed: pip install minisgl-cuda"
    with pytest.raises(BackendError, match=install):
        resolve(device=H200)
    world.plugin("mine", make_spec("attention", "mine", devices=("cuda",), sm=(100, 100)), make_spec("kv", "mine"))
    with pytest.raises(BackendError, match=r"(?s)no backend for attention.*wanted sm90, supported sm100"):
        resolve(device=H200)


def test_what_is_installed_is_not_to_be_installed(cpu_sim: None, resolve: Any) -> None:
    with pytest.raises(BackendError, match=r"; `minisgl plugins` lists what is installed$") as refused:
        resolve(backends={"attention": "nope"})
    assert refused.value.exit_code == 2


@pytest.mark.parametrize(
    ("lists", "expected", "remedy"),
    [
        ({"deny": ["minisgl-cpu-sim"]}, "plugins.deny keeps out minisgl-cpu-sim", "take {} out of plugins.deny"),
        ({"allow": ["other"]}, "plugins.allow keeps out minisgl-cpu-sim", "add {} to plugins.allow"),
    ],
)
def test_a_refusal_names_the_list_that_keeps_a_plugin_out(
    cpu_sim: None, world: Any, make_spec: Any, resolve: Any, lists: dict[str, Any], expected: str, remedy: str
) -> None:
    world.plugin("other", make_spec("attention", "wide", head_dims=OneOf(256)))
    with pytest.raises(BackendError) as refused:
        resolve(**lists)
    first, *details = str(refused.value).splitlines()
    assert first.endswith(f"; {remedy.format('minisgl-cpu-sim')}") and details[-1].strip() == expected
    assert str(refused.value).count("minisgl-cpu-sim") == 2


def test_case_85_an_unknown_name_lists_what_is_installed_what_failed_and_how_to_install(
    cpu_sim: None, world: Any, resolve: Any, make_model: Any
) -> None:
    world.distribution("broken", "[minisgl]\nmain = never_there\n")
    with pytest.raises(BackendError) as refused:
        resolve(backends={"attention": "fa"})
    text = str(refused.value)
    assert "'fa'" in text and "cpu@minisgl-cpu-sim, torch@minisgl-cpu-sim" in text
    assert text.index("broken (ModuleNotFoundError") < text.index("installed for attention: ")
    assert "pip install minisgl-fa" in text
    with pytest.raises(BackendError, match="did you mean 'torch'"):
        resolve(backends={"attention": "troch"})
    with pytest.raises(BackendError, match="no plugin offers the kv backend 'cpu@no-such-dist'"):
        resolve(backends={"kv": "cpu@no-such-dist"})
    with pytest.raises(BackendError, match=r"plugins\.deny keeps out minisgl-cpu-sim"):
        resolve(backends={"kv": "torch"}, deny=["minisgl-cpu-sim"])


def test_an_explicit_name_is_strict(cpu_sim: None, resolve: Any) -> None:
    with pytest.raises(BackendError, match=r"(?s)no backend for attention\.decode.*needs exec:c\+\+ or exec:g\+\+"):
        resolve(
            missing=(
                "c++",
                "g++",
            ),
            backends={"attention": "cpu"},
        )
    assert resolve(missing=("c++",)).choice("attention", phase="decode").name == "cpu"
    assert (
        resolve(
            missing=(
                "c++",
                "g++",
            )
        )
        .choice("attention", phase="decode")
        .name
        == "torch"
    )


def test_an_ordered_list_is_the_only_fallback_and_taking_it_is_said(
    cpu_sim: None, resolve: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "minisgl"):
        plan = resolve(
            missing=(
                "c++",
                "g++",
            ),
            backends={"attention": ["cpu", "torch"]},
        )
    assert plan.choice("attention", phase="prefill").name == "torch"
    assert len(plan.fallbacks) == 2 and list(plan.fallbacks) == [record.getMessage() for record in caplog.records]
    assert plan.fallbacks[0].startswith("attention.decode: cpu@minisgl-cpu-sim cannot run (requires: needs exec:c++")
    assert plan.fallbacks[0].endswith("using torch@minisgl-cpu-sim")
    assert resolve(backends={"attention": ["torch", "cpu"]}).choice("attention", phase="decode").name == "torch"
    with_auto = resolve(
        missing=(
            "c++",
            "g++",
        ),
        backends={"attention": ["cpu", "auto"]},
    )
    assert with_auto.choice("attention", phase="decode").name == "torch"


def test_attention_may_differ_by_phase(cpu_sim: None, resolve: Any) -> None:
    plan = resolve(backends={"attention": {"prefill": "torch", "decode": ["cpu"]}})
    assert plan.choice("attention", phase="prefill").name == "torch"
    assert plan.choice("attention", phase="decode").name == "cpu"
    only = resolve(backends={"attention": {"*": "torch", "decode": "cpu"}})
    assert [choice.name for choice in only.choices("attention")] == ["cpu", "torch"]


def test_a_backend_of_some_operations_serves_those(
    cpu_sim: None, world: Any, make_spec: Any, resolve: Any, caplog: pytest.LogCaptureFixture
) -> None:
    world.plugin("minisgl-cuda", make_spec("ops", "fused", ops=("rms_norm", "sample"), per_row_seed=False, tier=10))
    auto = resolve()
    assert auto.choice("ops", op="rms_norm").name == "fused"
    assert auto.choice("ops", op="sample").name == "composed", "auto keeps every row's own seed"
    named = resolve(backends={"ops": "fused"})
    assert (named.choice("ops", op="sample").name, named.choice("ops", op="act_and_mul").name) == ("fused", "composed")
    assert named.choice("ops", op="rms_norm").ops == ("rms_norm", "sample")
    (warned,) = [record.getMessage() for record in caplog.records]
    assert warned.startswith("ops.sample: fused@minisgl-cuda keeps no seed for each row")
    one = resolve(backends={"ops": {"sample": "fused"}})
    assert one.choice("ops", op="sample").name == "fused"


def test_a_named_backend_of_operations_that_cannot_run_fails_the_start(
    cpu_sim: None, world: Any, make_spec: Any, resolve: Any
) -> None:
    world.plugin("fused", make_spec("ops", "fused", ops=("sample",), dtypes=("float32",)))
    with pytest.raises(BackendError, match=r"(?s)no backend for ops\.sample.*dtype=float32 would do"):
        resolve(backends={"ops": "fused"})


def test_linear_backends_can_be_named_by_shape(cpu_sim: None, world: Any, make_spec: Any, resolve: Any) -> None:
    world.plugin("thin", make_spec("linear", "thin", tier=99))
    plan = resolve(backends={"linear": {"4096x1024": "thin", "*": "plain"}})
    assert plan.choice("linear", shape=(4096, 1024)).name == "thin"
    assert plan.choice("linear", shape=(1024, 4096)).name == "plain"


@pytest.mark.parametrize(
    ("backends", "text"),
    [
        ({"atention": "x"}, "did you mean 'attention'?"),
        ({"attention": {"prefil": "torch"}}, "did you mean 'prefill'?"),
        ({"ops": {"sampling": "x"}}, "known are|did you mean 'sample'"),
        ({"kv": {"decode": "torch"}}, "chosen as a whole"),
        ({"linear": {"4096": "plain"}}, "a weight's shape such as 4096x1024"),
        ({"attention": []}, "give a backend name"),
        ({"attention": 3}, "give a backend name"),
        ({"attention": {"decode": ["torch", ""]}}, "give a backend name"),
    ],
)
def test_a_config_that_makes_no_sense_is_refused(cpu_sim: None, resolve: Any, backends: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=text.replace("?", r"\?")):
        resolve(backends=backends)


def test_case_87_a_name_of_two_distributions_is_refused_on_both_until_one_is_named(
    world: Any, make_spec: Any, resolve: Any
) -> None:
    for name in ("one", "two"):
        world.plugin(name, make_spec("attention", "same"), make_spec("kv", f"kv-{name}"))
    with pytest.raises(BackendError) as refused:
        resolve()
    text = str(refused.value)
    assert text.count("wanted one distribution with this name, supported one, two") == 2
    assert "backends.attention=same@one" in text and "backends.attention=same@two" in text
    with pytest.raises(BackendError, match="one distribution with this name"):
        resolve(backends={"attention": "same"})
    assert resolve(backends={"attention": "same@Two"}).choice("attention", phase="decode").distribution == "two"


def test_variants_share_a_name_and_the_first_that_fits_is_meant(world: Any, make_spec: Any, resolve: Any) -> None:
    world.plugin(
        "minisgl-fa",
        make_spec("attention", "fa", variant="fa3", sm=(90, 90), tier=50),
        make_spec("attention", "fa", variant="fa4", sm=(100, 109), tier=40),
        make_spec("attention", "fa", variant="fa2", sm=(80, 100), tier=10),
        make_spec("kv", "any"),
    )
    for sm, variant in ((90, "fa3"), (100, "fa4"), (89, "fa2")):
        plan = resolve(device=DeviceFacts("cuda", sm=sm), backends={"attention": "fa"})
        assert plan.choice("attention", phase="decode").label == f"fa/{variant}@minisgl-fa"
    narrowed = resolve(device=H200, backends={"attention": "fa/fa2"})
    assert narrowed.choice("attention", phase="prefill").variant == "fa2"


def test_stand_ins_are_never_chosen_by_auto_on_cuda_but_may_be_named(cpu_sim: None, resolve: Any) -> None:
    with pytest.raises(BackendError, match=r"torch@minisgl-cpu-sim: stand_in: .*backends\.attention=torch"):
        resolve(device=H200)
    plan = resolve(device=H200, backends={"attention": "torch", "kv": "torch"})
    assert plan.choice("attention", phase="decode").name == "torch"


def test_ranking_follows_config_incumbents_calibration_tier_and_name(world: Any, make_spec: Any, resolve: Any) -> None:
    for name, tier in (("slow", 10), ("beta", 5), ("alpha", 5)):
        world.plugin(f"p-{name}", make_spec("attention", name, tier=tier))
    world.plugin("minisgl-flashinfer", make_spec("attention", "flashinfer", tier=90))
    world.plugin("p-kv", make_spec("kv", "any"))

    def decode(**fields: Any) -> str:
        return str(resolve(device=H200, **fields).choice("attention", phase="decode").name)

    assert decode() == "flashinfer"
    assert decode(calibration={"attention.decode": {"slow": 3.0, "beta": 4.0}}) == "slow"
    assert decode(calibration={"attention.prefill": {"slow": 3.0}}) == "flashinfer"
    assert decode(backends={"attention": ["beta", "slow"]}, calibration={"attention.decode": {"slow": 1.0}}) == "beta"
    world.distributions = [item for item in world.distributions if item.metadata["Name"] != "minisgl-flashinfer"]
    assert decode() == "alpha"


def test_requirements_are_pep_508_modules_programs_or_alternatives(world: Any, make_spec: Any, resolve: Any) -> None:
    world.plugin(
        "needy",
        make_spec(
            "attention", "a", requires=("lib>=2", "import:mod.sub", ("exec:nvcc", "exec:hipcc"), "x; os_name=='no'")
        ),
        make_spec("kv", "k"),
    )
    with pytest.raises(BackendError) as refused:
        resolve(
            missing=(
                "mod.sub",
                "nvcc",
                "hipcc",
            )
        )
    text = str(refused.value)
    assert "needs lib>=2, found lib 1.5 (pip install 'lib>=2')" in text
    assert "needs import:mod.sub, found no module mod.sub" in text
    assert "needs exec:nvcc or exec:hipcc, found no nvcc on PATH; no hipcc on PATH" in text
    assert "os_name" not in text


def test_a_failed_probe_strikes_the_backend_and_the_solve_runs_again(world: Any, make_spec: Any, resolve: Any) -> None:
    world.plugin(
        "p",
        make_spec("attention", "first", tier=1, probe="p.probes:first"),
        make_spec("attention", "second", tier=2, probe="p.probes:second"),
        make_spec("attention", "third", tier=3, probe="p.probes:third"),
        make_spec("kv", "k"),
    )
    asked: list[list[str]] = []

    def prober(requests: Any) -> Any:
        asked.append([request.probe for request in requests])
        assert all(request.facts["head_dim"] == 128 and request.facts["q_heads"] == 16 for request in requests)
        reason = Reason("probe", "probe", "a working backend", "an illegal instruction")
        return {request.key: reason for request in requests if request.probe == "p.probes:first"}

    plan = resolve(prober=prober)
    assert plan.choice("attention", phase="decode").name == "second"
    assert asked == [["p.probes:first"], ["p.probes:second"]]
    with pytest.raises(BackendError, match="first@p: probe: wanted a working backend, supported an illegal"):
        resolve(prober=prober, backends={"attention": "first"})


def test_without_probes_no_process_is_started(cpu_sim: None, resolve: Any) -> None:
    def prober(requests: Any) -> Any:
        raise AssertionError("nothing to ask")

    assert resolve(prober=prober).choice("kv").name == "torch"
