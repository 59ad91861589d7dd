"""What minisgl-cuda declares."""

from __future__ import annotations

import pytest

from minisgl_core.modelconfig.geometries import geometry
from minisgl_core.plugin_api import OP_NAMES
from minisgl_core.registry import DeviceFacts, PlanQuery, resolve_plan
from minisgl_core.registry.matching import match
from minisgl_core.registry.query import Requirement
from minisgl_cuda.plugin import (
    minisgl_attention_backends,
    minisgl_graph_runners,
    minisgl_kv_kernels,
    minisgl_layer_ops,
    minisgl_linears,
)

HOPPER = DeviceFacts("cuda", sm=90)
(DECODE,) = minisgl_attention_backends()
(GRAPH,) = minisgl_graph_runners()
OPS = minisgl_layer_ops()
(SKINNY,) = minisgl_linears()
ALL = (DECODE, GRAPH, SKINNY, *OPS, *minisgl_kv_kernels())


@pytest.mark.parametrize("spec", ALL, ids=lambda spec: f"{spec.role}:{spec.name}{spec.variant}")
def test_a_cpu_is_refused_by_name(spec) -> None:
    reasons = match(spec, Requirement(device=DeviceFacts("cpu")))[1]
    assert [(reason.code, reason.wanted, reason.supported) for reason in reasons] == [("device", "cpu", "cuda")]


def test_graphs_capture_and_only_capture() -> None:
    assert match(GRAPH, Requirement(device=HOPPER, capture=True))[1] == []
    assert [reason.code for reason in match(GRAPH, Requirement(device=HOPPER, no_capture=True))[1]] == ["graph"]


def test_kv_kernels_prefer_the_compiler_to_triton() -> None:
    specs = minisgl_kv_kernels()
    assert [(spec.name, spec.variant) for spec in specs] == [("cuda", "cpp"), ("cuda", "triton")]
    assert "exec:nvcc" in specs[0].requires
    assert "import:triton" in specs[1].requires


def test_decode_attention_is_for_decode_only_and_without_host_plan() -> None:
    required = {
        "device": HOPPER,
        "dtype": "bfloat16",
        "kv_dtype": "bfloat16",
        "head_dim": 128,
        "gqa_ratio": 4,
        "page_size": 16,
        "kv_layout": "NHD",
        "capture": True,
    }
    assert match(DECODE, Requirement(phase="decode", **required))[1] == []
    assert [reason.code for reason in match(DECODE, Requirement(phase="prefill", **required))[1]] == ["phase"]
    assert {caps.host_plan for caps in DECODE.caps} == {False}


def test_operations_are_known_to_the_core() -> None:
    offered = {spec.variant: {name for caps in spec.caps for name in caps.ops} for spec in OPS}
    assert offered["triton"] <= set(OP_NAMES)
    assert offered["triton"] - offered["cpp"] == {"sample"} and offered["cpp"] < offered["triton"]
    assert [caps.per_row_seed for caps in OPS[1].caps] == [True]


def _store_requirement(dtype: str, kv_dtype: str) -> Requirement:
    return Requirement(
        device=HOPPER,
        dtype=dtype,
        kv_dtype=kv_dtype,
        head_dim=128,
        page_size=16,
        kv_layout="NHD",
        capture=True,
        op="qk_norm_rope_store",
    )


def test_compiled_operations_want_a_pool_of_the_models_dtype() -> None:
    cpp, triton = OPS
    assert match(cpp, _store_requirement("float16", "float16"))[1] == []
    assert match(cpp, _store_requirement("float16", "bfloat16"))[1] != []
    assert match(triton, _store_requirement("float16", "bfloat16"))[1] == []


class Machine:
    """An environment in which all requirements are met but those named."""

    def __init__(self, *missing: str) -> None:
        self._missing = missing

    def version(self, distribution: str) -> str | None:
        return None if distribution in self._missing else "99"

    def has_module(self, module: str) -> bool:
        return module not in self._missing

    def has_program(self, program: str) -> bool:
        return program not in self._missing


@pytest.mark.parametrize(
    ("missing", "layer_ops", "sample"),
    [((), "cuda/cpp", "cuda/triton"), (("nvcc",), "cuda/triton", "cuda/triton"), (("triton",), "cuda/cpp", "composed")],
)
def test_each_operation_comes_from_the_first_variant_that_offers_it(
    missing: tuple[str, ...], layer_ops: str, sample: str
) -> None:
    query = PlanQuery(
        geometry("qwen3-0.6b"),
        HOPPER,
        "bfloat16",
        allow=["minisgl-cuda", "minisgl-cpu-sim"],
        backends={"attention": "torch", "kv": ["cuda", "torch"]},
    )
    plan = resolve_plan(query, environment=Machine(*missing), prober=lambda requests: {})
    layer = OPS[0].caps[0].ops
    found = {op: plan.choice("ops", op=op).label.partition("@")[0] for op in (*layer, "sample")}
    assert found == {**dict.fromkeys(layer, layer_ops), "sample": sample}
