"""What FlashInfer declares, as facts that resolving reads."""

from __future__ import annotations

import pytest

from minisgl_core.registry import DeviceFacts
from minisgl_core.registry.matching import match
from minisgl_core.registry.query import Requirement
from minisgl_flashinfer.plugin import minisgl_attention_backends, minisgl_layer_ops

(ATTENTION,) = minisgl_attention_backends()
(SAMPLING,) = minisgl_layer_ops()


def _requirement(**facts: object) -> Requirement:
    asked = {
        "device": DeviceFacts("cuda", sm=90),
        "dtype": "bfloat16",
        "kv_dtype": "bfloat16",
        "head_dim": 128,
        "gqa_ratio": 5,
        "page_size": 16,
        "kv_layout": "NHD",
        "phase": "prefill",
        **facts,
    }
    return Requirement(**asked)  # type: ignore[arg-type]


def _codes(**facts: object) -> list[str]:
    return [reason.code for reason in match(ATTENTION, _requirement(**facts))[1]]


@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize("sm", [80, 90, 100, 121])
def test_it_serves_both_phases_from_ampere_on(phase: str, sm: int) -> None:
    assert _codes(phase=phase, device=DeviceFacts("cuda", sm=sm), features=frozenset({"window", "softcap"})) == []


@pytest.mark.parametrize(
    ("facts", "code"),
    [
        ({"device": DeviceFacts("cpu")}, "device"),
        ({"device": DeviceFacts("cuda", sm=75)}, "sm"),
        ({"dtype": "float32"}, "dtype"),
        ({"head_dim": 96}, "head_dim"),
        ({"features": frozenset({"sinks"})}, "feature"),
    ],
)
def test_just_outside_is_refused(facts: dict[str, object], code: str) -> None:
    assert _codes(**facts) == [code]


def test_it_plans_on_the_host_in_both_phases() -> None:
    assert {caps.host_plan for caps in ATTENTION.caps} == {True}


def test_its_sampling_does_not_promise_a_seed_per_row() -> None:
    assert [caps.per_row_seed for caps in SAMPLING.caps] == [False]
    assert [caps.ops for caps in SAMPLING.caps] == [("sample",)]


def test_queries_and_cache_are_of_one_dtype() -> None:
    assert _codes(dtype="float16", kv_dtype="float16") == []
    assert _codes(dtype="float16") in (["dtype"], ["kv_dtype"])
