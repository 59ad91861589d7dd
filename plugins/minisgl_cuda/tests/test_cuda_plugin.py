"""What minisgl-cuda declares."""

from __future__ import annotations

import pytest

from minisgl_core.plugin_api import OP_NAMES
from minisgl_core.registry import DeviceFacts
from minisgl_core.registry.matching import match
from minisgl_core.registry.query import Need
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
(OPS,) = minisgl_layer_ops()
(SKINNY,) = minisgl_linears()
ALL = (DECODE, GRAPH, OPS, SKINNY, *minisgl_kv_kernels())


@pytest.mark.parametrize("spec", ALL, ids=lambda spec: f"{spec.role}:{spec.name}{spec.variant}")
def test_a_cpu_is_refused_by_name(spec) -> None:
    reasons = match(spec, Need(device=DeviceFacts("cpu")))[1]
    assert [(reason.code, reason.wanted, reason.supported) for reason in reasons] == [("device", "cpu", "cuda")]


def test_graphs_capture_and_only_capture() -> None:
    assert match(GRAPH, Need(device=HOPPER, capture=True))[1] == []
    assert [reason.code for reason in match(GRAPH, Need(device=HOPPER, no_capture=True))[1]] == ["graph"]


def test_kv_kernels_prefer_the_compiler_to_triton() -> None:
    specs = minisgl_kv_kernels()
    assert [(spec.name, spec.variant) for spec in specs] == [("cuda", "cpp"), ("cuda", "triton")]
    assert "exec:nvcc" in specs[0].requires
    assert "import:triton" in specs[1].requires


def test_decode_attention_is_for_decode_only_and_without_host_plan() -> None:
    need = {
        "device": HOPPER,
        "dtype": "bfloat16",
        "kv_dtype": "bfloat16",
        "head_dim": 128,
        "gqa_ratio": 4,
        "page_size": 16,
        "kv_layout": "NHD",
        "capture": True,
    }
    assert match(DECODE, Need(phase="decode", **need))[1] == []
    assert [reason.code for reason in match(DECODE, Need(phase="prefill", **need))[1]] == ["phase"]
    assert [box.host_plan for box in DECODE.caps] == [()]


def test_operations_are_known_to_the_core() -> None:
    offered = {name for box in OPS.caps for name in box.ops}
    assert offered <= set(OP_NAMES)
    assert [box.per_row_seed for box in OPS.caps] == [True]
