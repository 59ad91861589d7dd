"""Which FlashAttention serves which device, head and page."""

from __future__ import annotations

import pytest

from minisgl_core.plugin_api import BackendSpec
from minisgl_core.registry import DeviceFacts
from minisgl_core.registry.matching import match
from minisgl_core.registry.query import Requirement
from minisgl_fa.plugin import minisgl_attention_backends

SPECS = {spec.variant: spec for spec in minisgl_attention_backends()}


def _requirement(sm: int, page_size: int = 256, **facts: object) -> Requirement:
    asked = {
        "dtype": "bfloat16",
        "kv_dtype": "bfloat16",
        "head_dim": 128,
        "gqa_ratio": 7,
        "kv_layout": "NHD",
        "phase": "decode",
        "capture": True,
        **facts,
    }
    return Requirement(device=DeviceFacts("cuda", sm=sm), page_size=page_size, **asked)  # type: ignore[arg-type]


def _codes(spec: BackendSpec, required: Requirement) -> list[str]:
    return [reason.code for reason in match(spec, required)[1]]


def test_the_variants_come_in_the_order_of_choice() -> None:
    assert list(SPECS) == ["fa3", "fa4", "fa2"]
    assert {spec.name for spec in SPECS.values()} == {"fa"}


@pytest.mark.parametrize(("sm", "variant"), [(80, "fa2"), (86, "fa2"), (89, "fa2"), (90, "fa3"), (100, "fa4")])
def test_each_device_has_one_variant(sm: int, variant: str) -> None:
    assert [name for name, spec in SPECS.items() if not _codes(spec, _requirement(sm))] == [variant]


@pytest.mark.parametrize("sm", [75, 120])
def test_other_devices_have_none(sm: int) -> None:
    assert all(_codes(spec, _requirement(sm)) == ["sm"] for spec in SPECS.values())


def test_a_cpu_has_none() -> None:
    required = Requirement(device=DeviceFacts("cpu"))
    assert all(_codes(spec, required) == ["device"] for spec in SPECS.values())


def test_fa3_takes_any_page_size() -> None:
    assert [size for size in (1, 3, 16, 64, 256) if _codes(SPECS["fa3"], _requirement(90, size))] == []


def test_fa2_takes_multiples_of_256_and_says_so() -> None:
    assert [size for size in (16, 128, 256, 384, 512) if _codes(SPECS["fa2"], _requirement(80, size))] == [16, 128, 384]
    (reason,) = match(SPECS["fa2"], _requirement(80, 16))[1]
    assert reason.supported == "multiples of 256"


def test_fa4_takes_pages_of_128_and_pools_that_they_divide() -> None:
    assert [size for size in (16, 64, 128, 256) if _codes(SPECS["fa4"], _requirement(100, size))] == [16, 64]


def test_fa3_has_windows_and_no_softcap() -> None:
    assert _codes(SPECS["fa3"], _requirement(90, features=frozenset({"window"}))) == []
    assert _codes(SPECS["fa3"], _requirement(90, features=frozenset({"softcap"}))) == ["feature"]


def test_float32_is_refused() -> None:
    assert _codes(SPECS["fa3"], _requirement(90, dtype="float32", kv_dtype="float32")) == ["dtype", "kv_dtype"]


def test_no_variant_plans_on_the_host() -> None:
    assert {caps.host_plan for spec in SPECS.values() for caps in spec.caps} == {False}


@pytest.mark.parametrize("variant", ["fa3", "fa4", "fa2"])
def test_queries_and_cache_are_of_one_dtype(variant: str) -> None:
    sm, page_size = {"fa3": (90, 16), "fa4": (100, 128), "fa2": (80, 256)}[variant]
    assert _codes(SPECS[variant], _requirement(sm, page_size, dtype="float16", kv_dtype="float16")) == []
    assert _codes(SPECS[variant], _requirement(sm, page_size, dtype="float16")) in (["dtype"], ["kv_dtype"])


def test_it_is_refused_without_its_library() -> None:
    """Each variant needs its own module, and nothing else that a plain installation lacks."""
    needed = {name: [item for item in spec.requires if "flash_attn" in item] for name, spec in SPECS.items()}
    assert needed == {
        "fa3": ["import:flash_attn_interface"],
        "fa4": ["import:flash_attn.cute"],
        "fa2": ["import:flash_attn.flash_attn_interface"],
    }
