from __future__ import annotations

from typing import Any

import pytest

from minisgl_core.errors import BackendError, ConfigError
from minisgl_core.plugin_api import ANY, BackendSpec, Caps, MultipleOf, OneOf
from minisgl_core.registry import DeviceFacts

CPU = DeviceFacts("cpu")
H200 = DeviceFacts("cuda", sm=90)


CASE_1 = [(9, 3), (15, 5), (14, 2), (12, 2), (40, 8), (24, 4), (28, 4), (64, 4), (8, 1), (7, 7)]


@pytest.mark.parametrize(("q_heads", "kv_heads"), CASE_1)
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
        BackendError, match=r"features: wanted window, supported none declared \(max_seq_len_override=8 would do\)"
    ):
        resolve(model=model, max_seq_len=9)
    world.plugin("q", make_spec("attention", "windowed", features=frozenset({"window"})))
    assert resolve(model=model).choice("attention", phase="decode").name == "windowed"


def test_an_unknown_architecture_lists_the_known_ones(cpu_sim: None, resolve: Any, make_model: Any) -> None:
    with pytest.raises(BackendError, match=r"^unsupported architecture 'GPT9ForCausalLM'; known: Llama[\w, ]*$"):
        resolve(model=make_model(architecture="GPT9ForCausalLM"))


def test_the_facts_of_the_set_that_fits_are_in_the_choice(world: Any, resolve: Any) -> None:
    base: dict[str, Any] = {
        "devices": ("cpu",),
        "kv_dtypes": ANY,
        "gqa_ratios": ANY,
        "page_sizes": ANY,
        "head_dims": ANY,
        "kv_layouts": ("NHD",),
    }
    flags: dict[str, Any] = {"host_plan": True, "finite_tail": True, "tolerance": 0.01}
    planned = Caps(**base, dtypes=("bfloat16",), phases=("prefill", "decode"), **flags)
    planless = Caps(**base, dtypes=("float16",), phases=("prefill", "decode"))
    world.plugin(
        "p",
        BackendSpec("attention", "a", "x.y:Z", caps=(planned, planless), options="x.y:Options"),
        BackendSpec("kv", "k", "x.y:K", caps=(Caps(**base, dtypes=ANY),)),
    )
    first = resolve(backends={"attention": "a"}, options={"attention:a": {"depth": 3}}).choice(
        "attention", phase="decode"
    )
    assert first.tolerance == 0.01
    assert (first.host_plan, first.finite_tail, dict(first.options)) == (True, True, {"depth": 3})
    second = resolve(dtype="float16").choice("attention", phase="decode")
    assert (second.host_plan, second.finite_tail, second.tolerance) == (False, False, 0.0)
    assert second.options_model == "x.y:Options"


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"attention:tprch": {}}, "did you mean 'attention:torch'"),
        ({"attention:torch": {"x": 1}}, "takes no options"),
        ({"nonsense": {}}, "belongs to no installed backend"),
        ({"attention:torch": 3}, "give a table"),
    ],
)
def test_options_of_no_backend_are_refused(cpu_sim: None, resolve: Any, options: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        resolve(options=options)


@pytest.mark.parametrize("page_size", [0, -16])
def test_a_page_size_that_is_not_positive_is_refused(cpu_sim: None, resolve: Any, page_size: int) -> None:
    with pytest.raises(ConfigError, match=f"page_size {page_size} is not positive"):
        resolve(page_size=page_size)
