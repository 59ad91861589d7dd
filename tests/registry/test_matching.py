from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minisgl_core.plugin_api import ANY, BackendSpec, Caps, MultipleOf, OneOf
from minisgl_core.registry import DeviceFacts
from minisgl_core.registry.matching import fits, kernel_page_size, match
from minisgl_core.registry.query import Requirement

CAPS = Caps(
    devices=("cuda",),
    sm=(80, 90),
    dtypes=("bfloat16", "float16"),
    kv_dtypes=("bfloat16",),
    head_dims=OneOf(64, 128),
    gqa_ratios=OneOf(1, 2, 4, 8),
    page_sizes=MultipleOf(16),
    kv_layouts=("NHD",),
    phases=("decode",),
    graph="decode",
    features=frozenset({"window"}),
    ops=("sample",),
    formats=("plain",),
    architectures=("LlamaForCausalLM",),
)
REQUIRED = Requirement(
    device=DeviceFacts("cuda", sm=90),
    dtype="bfloat16",
    kv_dtype="bfloat16",
    head_dim=128,
    gqa_ratio=2,
    page_size=16,
    kv_layout="NHD",
    phase="decode",
    capture=True,
    features=frozenset({"window"}),
    op="sample",
    format="plain",
    architecture="LlamaForCausalLM",
)


def spec_of(*sets: Caps) -> BackendSpec:
    return BackendSpec(role="attention", name="x", factory="a.b:C", caps=sets)


def test_a_requirement_that_fits_has_no_reasons() -> None:
    assert match(spec_of(CAPS), REQUIRED) == (CAPS, [])


OUTSIDE: dict[str, tuple[dict[str, Any], str]] = {
    "device": ({"device": DeviceFacts("cpu")}, "devices: wanted cpu, supported cuda"),
    "sm above": ({"device": DeviceFacts("cuda", sm=100)}, "sm: wanted sm100, supported sm80 to sm90"),
    "sm below": ({"device": DeviceFacts("cuda", sm=75)}, "sm: wanted sm75, supported sm80 to sm90"),
    "sm unknown": ({"device": DeviceFacts("cuda")}, "sm: wanted an unknown capability, supported sm80 to sm90"),
    "dtype": ({"dtype": "float32"}, "dtypes: wanted float32, supported bfloat16, float16"),
    "kv_dtype": (
        {"kv_dtype": "float8_e4m3fn"},
        "kv_dtypes: wanted float8_e4m3fn, supported bfloat16",
    ),
    "head_dim": ({"head_dim": 96}, "head_dims: wanted 96, supported 64, 128"),
    "gqa_ratio": ({"gqa_ratio": 7}, "gqa_ratios: wanted 7, supported 1, 2, 4, 8"),
    "page_size": (
        {"page_size": 8},
        "page_sizes: wanted one that divides 8, supported multiples of 16",
    ),
    "kv_layout": ({"kv_layout": "HND"}, "kv_layouts: wanted HND, supported NHD"),
    "phase": ({"phase": "prefill"}, "phases: wanted prefill, supported decode"),
    "feature": (
        {"features": frozenset({"softcap"})},
        "features: wanted softcap, supported window",
    ),
    "op": ({"op": "route"}, "ops: wanted route, supported sample"),
    "format": ({"format": "fp8"}, "formats: wanted fp8, supported plain"),
    "architecture": ({"architecture": "X"}, "architectures: wanted X, supported LlamaForCausalLM"),
    "no_capture": (
        {"capture": False, "no_capture": True},
        "graph: wanted a runner that never captures, supported decode",
    ),
}


@pytest.mark.parametrize("case", OUTSIDE)
def test_each_field_just_outside_the_caps_is_one_reason(case: str) -> None:
    change, text = OUTSIDE[case]
    caps, reasons = match(spec_of(CAPS), replace(REQUIRED, **change))
    assert caps is None
    assert [str(reason) for reason in reasons] == [text]
    assert [fits(spec_of(*sets), replace(REQUIRED, **change)) for sets in ((CAPS,), ())] == [False, False]
    wide = replace(CAPS, **_everything(reasons[0].field))
    assert fits(spec_of(CAPS, wide), replace(REQUIRED, **change)) and fits(spec_of(CAPS), REQUIRED)
    assert match(spec_of(replace(CAPS, **_everything(reasons[0].field))), replace(REQUIRED, **change))[0] is not None


def _everything(field: str) -> dict[str, Any]:
    """The caps field widened until it holds any of the values above."""
    wide: dict[str, Any] = {
        "kv_layouts": ("NHD", "HND"),
        "phases": ("prefill", "decode"),
        "ops": ("sample", "route"),
        "formats": ("plain", "fp8"),
        "architectures": ("LlamaForCausalLM", "X"),
        "graph": "never",
    }
    return {field: wide.get(field, ANY)}


@pytest.mark.parametrize(
    "field", [name for name in Caps.__dataclass_fields__ if name in OUTSIDE or f"{name[:-1]}" in OUTSIDE]
)
def test_what_is_not_declared_is_unsupported(field: str) -> None:
    default: Any = Caps.__dataclass_fields__[field].default
    undeclared = replace(CAPS, **{field: default})
    caps, reasons = match(spec_of(undeclared), REQUIRED)
    assert caps is None and [reason.field for reason in reasons] == [field]


def test_an_empty_requirement_fits_anything() -> None:
    assert match(spec_of(Caps()), Requirement())[0] == Caps()


def test_all_reasons_are_collected() -> None:
    far = replace(REQUIRED, head_dim=96, gqa_ratio=7)
    _, reasons = match(spec_of(CAPS), replace(far, dtype="float32"))
    assert [reason.code for reason in reasons] == ["dtype", "head_dim", "gqa_ratio"]


def test_any_capability_set_suffices_and_reasons_come_from_the_nearest() -> None:
    small = replace(CAPS, head_dims=OneOf(32), gqa_ratios=OneOf(16))
    assert match(spec_of(small, CAPS), REQUIRED) == (CAPS, [])
    _, reasons = match(spec_of(small, replace(CAPS, dtypes=("float16",))), REQUIRED)
    assert [reason.code for reason in reasons] == ["dtype"]


def test_a_spec_without_caps_can_do_nothing() -> None:
    _, reasons = match(spec_of(), REQUIRED)
    assert [str(reason) for reason in reasons] == ["caps: wanted a capability set, supported none declared"]


@pytest.mark.parametrize(
    ("supported", "pool", "kernel"),
    [
        (ANY, 48, 48),
        (None, 16, None),
        (OneOf(1), 16, 1),
        (OneOf(16, 64), 64, 64),
        (OneOf(16, 64), 128, 64),
        (OneOf(16, 64), 8, None),
        (OneOf(), 8, None),
        (MultipleOf(256), 512, 512),
        (MultipleOf(256), 128, None),
    ],
)
def test_case_68_a_kernels_page_fits_if_it_divides_the_pools(supported: Any, pool: Any, kernel: Any) -> None:
    assert kernel_page_size(supported, pool) == kernel


@given(values=st.lists(st.integers(1, 64), max_size=4), pool=st.integers(1, 256))
def test_the_kernels_page_is_the_largest_supported_divisor(values: list[int], pool: int) -> None:
    divisors = [size for size in range(1, pool + 1) if pool % size == 0]
    listed = [size for size in divisors if size in values]
    assert kernel_page_size(OneOf(*values), pool) == (listed[-1] if listed else None)
    for base in values:
        multiples = [size for size in divisors if size % base == 0]
        assert kernel_page_size(MultipleOf(base), pool) == (multiples[-1] if multiples else None)
