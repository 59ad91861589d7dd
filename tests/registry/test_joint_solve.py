from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minisgl_core.errors import BackendError
from minisgl_core.modelconfig import ModelConfig, RopeConfig
from minisgl_core.plugin_api import ANY, GRAMMAR_KINDS, PARSER_PARTS, BackendSpec, Caps, MultipleOf, OneOf
from minisgl_core.registry import Candidate, DeviceFacts, PlanQuery, PluginRecord, Registry
from minisgl_core.registry.solve import solve

CPU = DeviceFacts("cpu")
H200 = DeviceFacts("cuda", sm=90)


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
    with pytest.raises(BackendError, match=r"cuda_graph_max_bs=0 would do"):
        resolve(graph=True, backends={"attention": "never"})


def test_the_layout_is_one_that_the_engine_can_allocate(world: Any, make_spec: Any, resolve: Any) -> None:
    world.plugin("p", make_spec("attention", "a", kv_layouts=("HND", "NHD")), make_spec("kv", "k"))
    assert resolve().kv_layout == "NHD"
    with pytest.raises(BackendError, match="kv_layouts: wanted HND"):
        resolve(kv_layouts=("HND",), backends={"ops": "composed"})


MODEL = ModelConfig(
    "Qwen3ForCausalLM", "qwen3", 512, 1024, 2, 16, 8, 128, 3072, 1e-6, RopeConfig(1e6, 128), 4096, True, "bfloat16"
)
BUILT_IN = {
    "graph": Caps(devices=ANY, sm=ANY),
    "comm": Caps(devices=ANY, sm=ANY, dtypes=ANY, graph="decode"),
    "platform": Caps(devices=ANY, sm=ANY),
    "models": Caps(architectures=("Qwen3ForCausalLM",)),
    "grammar": Caps(grammars=GRAMMAR_KINDS),
    "parser": Caps(ops=PARSER_PARTS, templates=ANY),
    "linear": Caps(devices=ANY, sm=ANY, dtypes=ANY, graph="decode", formats=("plain",)),
}

pages = st.one_of(
    st.just(ANY),
    st.builds(MultipleOf, st.sampled_from([1, 2, 3, 4])),
    st.lists(st.sampled_from([1, 2, 3, 4, 6]), min_size=1, max_size=2, unique=True).map(lambda v: OneOf(*v)),
)
capability_sets = st.builds(
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
    specs = [BackendSpec("attention", f"a{index}", "x:Y", caps=(caps,)) for index, caps in enumerate(attention)]
    specs += [BackendSpec("kv", f"k{index}", "x:Y", caps=(caps,)) for index, caps in enumerate(kv)]
    specs += [BackendSpec(role, role, "x:Y", caps=(caps,)) for role, caps in BUILT_IN.items()]  # type: ignore[arg-type]
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

        def fits(caps: Caps, page: int = page, layout: str = layout) -> bool:
            return pages_fit(caps.page_sizes, page) and layout in caps.kv_layouts

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
    attention=st.lists(capability_sets, min_size=1, max_size=3),
    kv=st.lists(capability_sets, min_size=1, max_size=2),
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
        graph="decode",
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
    assert all(pages_fit(caps.page_sizes, solution.joint.page_size) for caps in served)
    assert all(solution.joint.kv_layout in caps.kv_layouts for caps in served)
