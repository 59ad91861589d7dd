"""What the fused experts declare."""

from __future__ import annotations

import pytest

from minisgl_core.registry import DeviceFacts
from minisgl_core.registry.matching import match
from minisgl_core.registry.query import Requirement
from minisgl_moe.plugin import minisgl_layer_ops, minisgl_moe_executors

(EXECUTOR,) = minisgl_moe_executors()
(ROUTING,) = minisgl_layer_ops()


@pytest.mark.parametrize("sm", [80, 90, 100])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_experts_run_inside_graphs_from_ampere_on(sm: int, dtype: str) -> None:
    required = Requirement(device=DeviceFacts("cuda", sm=sm), dtype=dtype, capture=True)
    assert match(EXECUTOR, required)[1] == []


@pytest.mark.parametrize(
    ("required", "code"),
    [
        (Requirement(device=DeviceFacts("cpu"), dtype="bfloat16"), "device"),
        (Requirement(device=DeviceFacts("cuda", sm=75), dtype="bfloat16"), "sm"),
        (Requirement(device=DeviceFacts("cuda", sm=90), dtype="float64"), "dtype"),
    ],
)
def test_just_outside_is_refused(required: Requirement, code: str) -> None:
    assert [reason.code for reason in match(EXECUTOR, required)[1]] == [code]


def test_both_need_triton() -> None:
    assert "import:triton" in EXECUTOR.requires
    assert "import:triton" in ROUTING.requires
    assert [caps.ops for caps in ROUTING.caps] == [("route",)]
