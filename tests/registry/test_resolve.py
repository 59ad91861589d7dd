from __future__ import annotations

import itertools
import logging
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minisgl_core.errors import BackendError, ConfigError
from minisgl_core.modelconfig import ModelConfig, RopeConfig
from minisgl_core.plugin_api import ANY, BackendSpec, Caps, MultipleOf, OneOf, Reason
from minisgl_core.registry import Candidate, DeviceFacts, Plan, PlanQuery, PluginRecord, Registry, resolve_plan
from minisgl_core.registry.solve import solve

CPU = DeviceFacts("cpu")
H200 = DeviceFacts("cuda", sm=90)


class Everything:
    """An environment in which all requirements are met but those named."""

    def __init__(self, *missing: str) -> None:
        self.missing = missing

    def version(self, distribution: str) -> str | None:
        return None if distribution in self.missing else "1.5"

    def has_module(self, module: str) -> bool:
        return module not in self.missing

    def has_program(self, program: str) -> bool:
        return program not in self.missing


@pytest.fixture
def resolve(world: Any, make_model: Any) -> Any:
    """``resolve(device=CPU, environment=..., **query fields)`` over the plugins of ``world``."""

    def run(
        device: DeviceFacts = CPU, environment: Any = None, prober: Any = None, model: Any = None, **fields: Any
    ) -> Plan:
        query = PlanQuery(model or make_model(), device, fields.pop("dtype", "bfloat16"), **fields)
        return resolve_plan(query, world.registry(), environment=environment or Everything(), prober=prober)

    return run


@pytest.fixture
def cpu_sim(world: Any, make_spec: Any) -> None:
    """What minisgl-cpu-sim offers."""
    world.plugin(
        "minisgl-cpu-sim",
        make_spec("attention", "cpu", devices=("cpu",), requires=(("exec:c++", "exec:g++"),)),
        make_spec("attention", "torch", stand_in=True),
        make_spec("kv", "torch", stand_in=True),
        make_spec("moe", "torch", stand_in=True),
        make_spec("graph", "emulated", devices=("cpu",), stand_in=True),
    )


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
    }
    assert (plan.kv_layout, plan.graph, plan.kv_dtype) == ("NHD", False, "bfloat16")


def test_graphs_are_run_by_a_runner_that_captures(cpu_sim: None, resolve: Any) -> None:
    plan = resolve(graph=True)
    assert (plan.graph, plan.choice("graph").name, plan.choice("graph").graph) == (True, "emulated", "always")


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
    assert not any(bucket.slot.role == "moe" or bucket.slot.op == "route" for bucket in resolve().buckets)


@pytest.mark.parametrize(
    ("device", "remedy"),
    [(CPU, "pip install minisgl-cpu-sim"), (H200, "pip install minisgl-flashinfer or pip install minisgl-fa")],
)
def test_without_any_attention_plugin_the_error_says_what_to_install(
    resolve: Any, device: DeviceFacts, remedy: str
) -> None:
    with pytest.raises(BackendError) as refused:
        resolve(device=device)
    assert str(refused.value).endswith(f"none is installed; {remedy}")


def test_case_85_an_unknown_name_lists_what_is_installed_what_failed_and_how_to_install(
    cpu_sim: None, world: Any, resolve: Any, make_model: Any
) -> None:
    world.distribution("broken", "[minisgl]\nmain = never_there\n")
    with pytest.raises(BackendError) as refused:
        resolve(backends={"attention": "fa"})
    text = str(refused.value)
    assert "'fa'" in text and "cpu@minisgl-cpu-sim, torch@minisgl-cpu-sim" in text
    assert "broken (ModuleNotFoundError" in text and "pip install minisgl-fa" in text
    with pytest.raises(BackendError, match="did you mean 'torch'"):
        resolve(backends={"attention": "troch"})
    with pytest.raises(BackendError, match="no plugin offers the kv backend 'cpu@nobody'"):
        resolve(backends={"kv": "cpu@nobody"})
    with pytest.raises(BackendError, match=r"excluded by plugins\.allow or plugins\.deny: minisgl-cpu-sim"):
        resolve(backends={"kv": "torch"}, deny=["minisgl-cpu-sim"])


def test_an_explicit_name_is_strict(cpu_sim: None, resolve: Any) -> None:
    with pytest.raises(BackendError, match=r"no backend for attention\.decode.*needs exec:c\+\+ or exec:g\+\+"):
        resolve(environment=Everything("c++", "g++"), backends={"attention": "cpu"})
    assert resolve(environment=Everything("c++")).choice("attention", phase="decode").name == "cpu"
    assert resolve(environment=Everything("c++", "g++")).choice("attention", phase="decode").name == "torch"


def test_an_ordered_list_is_the_only_fallback_and_taking_it_is_said(
    cpu_sim: None, resolve: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "minisgl"):
        plan = resolve(environment=Everything("c++", "g++"), backends={"attention": ["cpu", "torch"]})
    assert plan.choice("attention", phase="prefill").name == "torch"
    assert len(plan.fallbacks) == 2 and list(plan.fallbacks) == [record.getMessage() for record in caplog.records]
    assert plan.fallbacks[0].startswith("attention.decode: cpu@minisgl-cpu-sim cannot run (requires: needs exec:c++")
    assert plan.fallbacks[0].endswith("using torch@minisgl-cpu-sim")
    assert resolve(backends={"attention": ["torch", "cpu"]}).choice("attention", phase="decode").name == "torch"
    with_auto = resolve(environment=Everything("c++", "g++"), backends={"attention": ["cpu", "auto"]})
    assert with_auto.choice("attention", phase="decode").name == "torch"


def test_attention_may_differ_by_phase(cpu_sim: None, resolve: Any) -> None:
    plan = resolve(backends={"attention": {"prefill": "torch", "decode": ["cpu"]}})
    assert plan.choice("attention", phase="prefill").name == "torch"
    assert plan.choice("attention", phase="decode").name == "cpu"
    only = resolve(backends={"attention": {"*": "torch", "decode": "cpu"}})
    assert [choice.name for choice in only.choices("attention")] == ["cpu", "torch"]


def test_a_backend_of_some_operations_serves_those(cpu_sim: None, world: Any, make_spec: Any, resolve: Any) -> None:
    world.plugin("fused", make_spec("ops", "fused", ops=("rms_norm", "sample"), per_row_seed=False, tier=10))
    auto = resolve()
    assert auto.choice("ops", op="rms_norm").name == "fused"
    assert auto.choice("ops", op="sample").name == "composed", "auto keeps every row's own seed"
    named = resolve(backends={"ops": "fused"})
    assert (named.choice("ops", op="sample").name, named.choice("ops", op="act_and_mul").name) == ("fused", "composed")
    assert named.choice("ops", op="rms_norm").ops == ("rms_norm", "sample")
    one = resolve(backends={"ops": {"sample": "fused"}})
    assert one.choice("ops", op="sample").name == "fused"


def test_a_named_backend_of_operations_that_cannot_run_fails_the_start(
    cpu_sim: None, world: Any, make_spec: Any, resolve: Any
) -> None:
    world.plugin("fused", make_spec("ops", "fused", ops=("sample",), dtypes=("float16",)))
    with pytest.raises(BackendError, match=r"no backend for ops\.sample.*dtype=float16 would do"):
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


def test_ranking_goes_by_config_calibration_table_tier_and_name(world: Any, make_spec: Any, resolve: Any) -> None:
    for name, tier in (("slow", 10), ("flashinfer", 90), ("beta", 5), ("alpha", 5)):
        world.plugin(f"p-{name}", make_spec("attention", name, tier=tier))
    world.plugin("p-kv", make_spec("kv", "any"))

    def decode(**fields: Any) -> str:
        return str(resolve(device=H200, **fields).choice("attention", phase="decode").name)

    assert decode() == "flashinfer"
    assert decode(calibration={"attention.decode": {"slow": 3.0, "beta": 4.0}}) == "slow"
    assert decode(calibration={"attention.prefill": {"slow": 3.0}}) == "flashinfer"
    assert decode(backends={"attention": ["beta", "slow"]}, calibration={"attention.decode": {"slow": 1.0}}) == "beta"
    world.distributions = [item for item in world.distributions if item.metadata["Name"] != "p-flashinfer"]
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
        resolve(environment=Everything("mod.sub", "nvcc", "hipcc"))
    text = str(refused.value)
    assert "needs lib>=2, found lib 1.5 (pip install 'lib>=2')" in text
    assert "needs import:mod.sub, found no module mod.sub" in text
    assert "needs exec:nvcc or exec:hipcc, found no nvcc on PATH; no hipcc on PATH" in text
    assert "os_name" not in text


# ---- the joint solve ----


def test_case_68_roles_agree_on_a_page_size_and_the_better_attention_decides_it(
    world: Any, make_spec: Any, resolve: Any
) -> None:
    world.plugin(
        "paged",
        make_spec("attention", "coarse", page_sizes=MultipleOf(256), tier=1),
        make_spec("attention", "fine", page_sizes=OneOf(1), tier=2),
        make_spec("kv", "k", page_sizes=MultipleOf(48)),
    )
    plan = resolve()
    assert plan.page_size == 768
    assert plan.choice("attention", phase="decode").name == "coarse"
    named = resolve(backends={"attention": "fine"})
    assert (named.page_size, named.choice("attention", phase="decode").page_size) == (48, 1)
    with pytest.raises(BackendError, match=r"page_sizes: wanted one that divides 32.*page_size=256 would do"):
        resolve(backends={"attention": "coarse"}, page_size=32)


def test_three_roles_may_need_a_multiple_that_no_two_of_them_need(world: Any, make_spec: Any, resolve: Any) -> None:
    world.plugin(
        "paged",
        make_spec("attention", "a", phases=("decode",), page_sizes=MultipleOf(16)),
        make_spec("attention", "b", phases=("prefill",), page_sizes=MultipleOf(24)),
        make_spec("kv", "k", page_sizes=MultipleOf(40)),
    )
    assert resolve().page_size == 240


def test_an_empty_solution_prints_the_smallest_conflict(world: Any, make_spec: Any, resolve: Any) -> None:
    world.plugin(
        "paged",
        make_spec("attention", "a", page_sizes=OneOf(3000)),
        make_spec("kv", "k", page_sizes=OneOf(2000)),
    )
    with pytest.raises(BackendError) as refused:
        resolve()
    text = str(refused.value)
    assert "serve attention.decode and kv together" in text
    assert "a@paged: " in text and "k@paged: " in text and "composed" not in text and "prefill" not in text


def test_graph_level_is_joint(world: Any, make_spec: Any, resolve: Any) -> None:
    world.plugin(
        "p",
        make_spec("attention", "never", graph="never", tier=1),
        make_spec("attention", "decode", graph="decode", tier=2),
        make_spec("kv", "k"),
        make_spec("graph", "cap"),
    )
    captured = resolve(graph=True)
    assert captured.choice("attention", phase="decode").name == "decode"
    assert captured.choice("attention", phase="prefill").name == "never", "prefill is not captured"
    assert resolve(graph=False).choice("attention", phase="decode").name == "never"
    with pytest.raises(BackendError, match=r"cuda_graph_max_bs=0 turns graphs off"):
        resolve(graph=True, backends={"attention": "never"})


def test_the_layout_is_one_that_the_engine_can_allocate(world: Any, make_spec: Any, resolve: Any) -> None:
    world.plugin("p", make_spec("attention", "a", kv_layouts=("HND", "NHD")), make_spec("kv", "k"))
    assert resolve().kv_layout == "NHD"
    with pytest.raises(BackendError, match="kv_layouts: wanted HND"):
        resolve(kv_layouts=("HND",), backends={"ops": "composed"})


# ---- what a model asks for ----


@pytest.mark.parametrize(("q_heads", "kv_heads"), [(9, 3), (15, 5), (14, 2), (12, 2), (28, 4), (64, 4), (7, 7)])
def test_case_1_a_ratio_that_a_backend_lacks_is_refused_at_start(
    world: Any, make_spec: Any, resolve: Any, make_model: Any, q_heads: int, kv_heads: int
) -> None:
    listed = OneOf(1, 3, 7)
    world.plugin("p", make_spec("attention", "holes", gqa_ratios=listed), make_spec("kv", "k"))
    model, ratio = make_model(num_q_heads=q_heads, num_kv_heads=kv_heads), q_heads // kv_heads
    if ratio in listed.values:
        assert resolve(model=model).choice("attention", phase="decode").name == "holes"
    else:
        with pytest.raises(BackendError, match=rf"holes@p: gqa_ratios: wanted {ratio}, supported 1, 3, 7"):
            resolve(model=model)


@pytest.mark.parametrize("head_dim", [80, 96, 256])
def test_case_2_a_head_dim_that_a_backend_lacks_is_refused_at_start(
    world: Any, make_spec: Any, resolve: Any, make_model: Any, head_dim: int
) -> None:
    world.plugin("p", make_spec("attention", "a"), make_spec("kv", "row128", head_dims=MultipleOf(64)))
    model = make_model(head_dim=head_dim)
    if head_dim % 64 == 0:
        assert resolve(model=model).choice("kv").name == "row128"
    else:
        with pytest.raises(BackendError, match=rf"row128@p: head_dims: wanted {head_dim}, supported multiples of 64"):
            resolve(model=model)


@pytest.mark.parametrize(
    ("q_heads", "kv_heads", "tp", "ratio"), [(16, 2, 4, 4), (8, 1, 2, 4), (16, 8, 2, 2), (16, 8, 8, 2)]
)
def test_case_3_ratios_are_those_of_one_rank_after_replication(
    world: Any, make_spec: Any, resolve: Any, make_model: Any, q_heads: int, kv_heads: int, tp: int, ratio: int
) -> None:
    world.plugin("p", make_spec("attention", "one", gqa_ratios=OneOf(ratio)), make_spec("kv", "k"))
    model = make_model(num_q_heads=q_heads, num_kv_heads=kv_heads)
    assert resolve(model=model, tp_size=tp).choice("attention", phase="decode").name == "one"


@pytest.mark.parametrize(("q_heads", "kv_heads", "tp"), [(9, 3, 2), (16, 3, 4), (16, 8, 3), (16, 8, 0)])
def test_case_3_heads_that_cannot_be_cut_are_refused_with_all_numbers(
    cpu_sim: None, resolve: Any, make_model: Any, q_heads: int, kv_heads: int, tp: int
) -> None:
    with pytest.raises(ConfigError) as refused:
        resolve(model=make_model(num_q_heads=q_heads, num_kv_heads=kv_heads), tp_size=tp)
    numbers = (q_heads, kv_heads, tp) if tp else (tp,)
    assert all(str(number) in str(refused.value) for number in numbers)


def test_case_16_a_window_is_needed_only_beyond_its_length(
    world: Any, make_spec: Any, resolve: Any, make_model: Any
) -> None:
    world.plugin("p", make_spec("attention", "full"), make_spec("kv", "k"))
    model = make_model(windows=(None, 8))
    assert resolve(model=model, max_seq_len=8).choice("attention", phase="decode").name == "full"
    with pytest.raises(
        BackendError, match=r"features: wanted window, supported none declared \(max_seq_len=8 needs none\)"
    ):
        resolve(model=model, max_seq_len=9)
    world.plugin("q", make_spec("attention", "windowed", features=frozenset({"window"})))
    assert resolve(model=model).choice("attention", phase="decode").name == "windowed"


def test_an_fp8_pool_is_a_feature(world: Any, make_spec: Any, resolve: Any) -> None:
    world.plugin("p", make_spec("attention", "a", kv_dtypes=ANY), make_spec("kv", "k", kv_dtypes=ANY))
    with pytest.raises(BackendError, match="features: wanted fp8_kv"):
        resolve(kv_dtype="float8_e4m3fn")


def test_an_unknown_architecture_lists_the_known_ones(cpu_sim: None, resolve: Any, make_model: Any) -> None:
    with pytest.raises(BackendError, match=r"no backend for models.*wanted GPT9ForCausalLM, supported Llama"):
        resolve(model=make_model(architecture="GPT9ForCausalLM"))


def test_the_facts_of_the_box_that_fits_are_in_the_choice(world: Any, resolve: Any) -> None:
    base: dict[str, Any] = {
        "devices": ("cpu",),
        "kv_dtypes": ANY,
        "gqa_ratios": ANY,
        "page_sizes": ANY,
        "head_dims": ANY,
        "kv_layouts": ("NHD",),
    }
    planned = Caps(**base, dtypes=("bfloat16",), phases=("prefill", "decode"), host_plan=("decode",), finite_tail=True)
    planless = Caps(**base, dtypes=("float16",), phases=("prefill", "decode"))
    world.plugin(
        "p",
        BackendSpec("attention", "a", "x.y:Z", caps=(planned, planless), options="x.y:Options"),
        BackendSpec("kv", "k", "x.y:K", caps=(Caps(**base, dtypes=ANY),)),
    )
    first = resolve(options={"attention:a": {"depth": 3}}).choice("attention", phase="decode")
    assert (first.host_plan, first.finite_tail, dict(first.options)) == (("decode",), True, {"depth": 3})
    second = resolve(dtype="float16").choice("attention", phase="decode")
    assert (second.host_plan, second.finite_tail, second.options_model) == ((), False, "x.y:Options")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"attention:tprch": {}}, "did you mean 'attention:torch'"),
        ({"attention:torch": {"x": 1}}, "takes no options"),
        ({"nonsense": {}}, "belongs to no installed backend"),
        ({"attention:torch": 3}, "give a table"),
    ],
)
def test_options_of_nobody_are_refused(cpu_sim: None, resolve: Any, options: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        resolve(options=options)


@pytest.mark.parametrize("page_size", [0, -16])
def test_a_page_size_that_is_not_positive_is_refused(cpu_sim: None, resolve: Any, page_size: int) -> None:
    with pytest.raises(ConfigError, match=f"page_size {page_size} is not positive"):
        resolve(page_size=page_size)


# ---- probes ----


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


# ---- properties ----

MODEL = ModelConfig(
    "Qwen3ForCausalLM", "qwen3", 512, 1024, 2, 16, 8, 128, 3072, 1e-6, RopeConfig(1e6, 128), 4096, True, "bfloat16"
)
BUILT_IN = {
    "graph": Caps(devices=ANY, sm=ANY),
    "comm": Caps(devices=ANY, sm=ANY, dtypes=ANY, graph="always"),
    "platform": Caps(devices=ANY, sm=ANY),
    "models": Caps(architectures=("Qwen3ForCausalLM",)),
    "linear": Caps(devices=ANY, sm=ANY, dtypes=ANY, graph="always", formats=("plain",)),
}

pages = st.one_of(
    st.just(ANY),
    st.builds(MultipleOf, st.sampled_from([1, 2, 3, 4])),
    st.lists(st.sampled_from([1, 2, 3, 4, 6]), min_size=1, max_size=2, unique=True).map(lambda v: OneOf(*v)),
)
boxes = st.builds(
    Caps,
    devices=st.just(ANY),
    sm=st.just(ANY),
    dtypes=st.just(ANY),
    kv_dtypes=st.just(ANY),
    head_dims=st.just(ANY),
    gqa_ratios=st.just(ANY),
    page_sizes=pages,
    kv_layouts=st.sampled_from([("NHD",), ("HND",), ("HND", "NHD")]),
    phases=st.sampled_from([("prefill",), ("decode",), ("prefill", "decode")]),
)


def registry_of(attention: list[Caps], kv: list[Caps], ops: Caps) -> Registry:
    specs = [BackendSpec("attention", f"a{index}", "x:Y", caps=(box,)) for index, box in enumerate(attention)]
    specs += [BackendSpec("kv", f"k{index}", "x:Y", caps=(box,)) for index, box in enumerate(kv)]
    specs += [BackendSpec(role, role, "x:Y", caps=(box,)) for role, box in BUILT_IN.items()]  # type: ignore[arg-type]
    specs.append(BackendSpec("ops", "o", "x:Y", caps=(ops,)))
    candidates = tuple(Candidate(spec, "dist", "1", index) for index, spec in enumerate(specs))
    return Registry((PluginRecord("dist", "main = x", candidates=candidates),))


def pages_fit(supported: Any, pool: int) -> bool:
    """By enumeration: is there a supported size that divides the pool's?"""
    sizes = [size for size in range(1, pool + 1) if pool % size == 0]
    if supported is ANY:
        return True
    if isinstance(supported, MultipleOf):
        return any(size % supported.base == 0 for size in sizes)
    return any(size in supported.values for size in sizes)


def best_by_enumeration(attention: list[Caps], kv: list[Caps], ops: Caps, page_sizes: list[int]) -> Any:
    """(decode, prefill, kv) indices of the lexicographically best solution over every page size, layout and triple."""
    solutions = []
    for page, layout in itertools.product(page_sizes, ("HND", "NHD")):

        def fits(box: Caps, page: int = page, layout: str = layout) -> bool:
            return pages_fit(box.page_sizes, page) and layout in box.kv_layouts

        if fits(ops):
            solutions += [
                (decode, prefill, place)
                for decode, prefill, place in itertools.product(
                    range(len(attention)), range(len(attention)), range(len(kv))
                )
                if fits(attention[decode])
                and fits(attention[prefill])
                and fits(kv[place])
                and "decode" in attention[decode].phases
                and "prefill" in attention[prefill].phases
            ]
    return min(solutions, default=None)


@given(
    attention=st.lists(boxes, min_size=1, max_size=3),
    kv=st.lists(boxes, min_size=1, max_size=2),
    op_pages=pages,
    page_size=st.sampled_from(["auto", 1, 4, 6, 12]),
)
def test_the_joint_solve_is_the_best_of_all_combinations(
    attention: list[Caps], kv: list[Caps], op_pages: Any, page_size: Any
) -> None:
    ops = Caps(
        devices=ANY,
        sm=ANY,
        dtypes=ANY,
        kv_dtypes=ANY,
        head_dims=ANY,
        page_sizes=op_pages,
        kv_layouts=("NHD", "HND"),
        graph="always",
        ops=("rms_norm", "add_rms_norm", "allreduce_add_rms_norm", "qk_norm_rope_store", "act_and_mul", "sample"),
    )
    query = PlanQuery(MODEL, CPU, "bfloat16", page_size=page_size, kv_layouts=("NHD", "HND"))
    solution = solve(query, registry_of(attention, kv, ops), None)
    expected = best_by_enumeration(attention, kv, ops, list(range(1, 13)) if page_size == "auto" else [page_size])
    if expected is None:
        assert solution.conflict and not solution.chosen
        return
    names = [verdict.candidate.spec.name for verdict in solution.chosen.values()]
    assert names[:3] == [f"a{expected[0]}", f"a{expected[1]}", f"k{expected[2]}"]
    served = [attention[expected[0]], attention[expected[1]], kv[expected[2]], ops]
    assert all(pages_fit(box.page_sizes, solution.joint.page_size) for box in served)
    assert all(solution.joint.kv_layout in box.kv_layouts for box in served)
