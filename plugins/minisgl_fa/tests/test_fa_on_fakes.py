"""The plugin's own code on fake libraries: the conformance kit over CPU tensors, per variant."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch

from minisgl_core.plugin_api import ANY, BackendSpec, LayerFacts, OneOf
from minisgl_core.testing import AttentionCase, AttentionSuite
from minisgl_core.testing.rig import Rig
from minisgl_core.testing.subject import Subject
from minisgl_cpu_sim.fakes import flash_attn_interface, inject, on_cpu
from minisgl_fa.plugin import minisgl_attention_backends

SPECS = {spec.variant: spec for spec in minisgl_attention_backends()}


def _spec(variant: str, **changes: Any) -> BackendSpec:
    """One box: float32, which the fakes compute exactly."""
    spec = on_cpu(SPECS[variant])
    return replace(spec, caps=(replace(spec.caps[0], **changes),))


@pytest.fixture(autouse=True)
def _fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    inject(monkeypatch)


class TestFlashAttention3(AttentionSuite):
    spec = _spec("fa3")


class TestFlashAttention3WithoutAScheduleAndInHalf(AttentionSuite):
    spec = _spec("fa3", dtypes=("bfloat16",), kv_dtypes=("bfloat16",), gqa_ratios=ANY)
    options: ClassVar[Mapping[str, Any]] = {"schedule_once": False, "decode_num_splits": 4, "pack_gqa": True}


class TestFlashAttention4(AttentionSuite):
    spec = _spec("fa4")


class TestFlashAttention2(AttentionSuite):
    spec = _spec("fa2")


class TestFlashAttention3AlwaysPaged(AttentionSuite):
    spec = _spec("fa3", head_dims=OneOf(64), gqa_ratios=OneOf(4), page_sizes=OneOf(16), phases=("prefill",))
    options: ClassVar[Mapping[str, Any]] = {"unpaged_prefill": False}


FRESH = ((70, 70), (1, 1), (33, 33))
ONE_CACHED = ((70, 70), (1, 2), (33, 33))


@pytest.mark.parametrize(
    ("phase", "rows", "options", "unpaged"),
    [
        ("prefill", FRESH, {}, True),
        ("prefill", FRESH, {"schedule_once": False, "prefill_num_splits": 2, "pack_gqa": True}, True),
        ("prefill", FRESH, {"unpaged_prefill": False}, False),
        ("prefill", ONE_CACHED, {}, False),
        ("decode", ((1, 1), (1, 1)), {}, False),
    ],
)
def test_prefill_without_any_prefix_leaves_the_pool_alone(
    monkeypatch: pytest.MonkeyPatch, phase: Any, rows: Any, options: dict[str, Any], unpaged: bool
) -> None:
    called: list[str] = []
    for name in ("flash_attn_varlen_func", "flash_attn_with_kvcache"):
        real = getattr(flash_attn_interface, name)

        def spy(*args: Any, real: Any = real, name: str = name, **given: Any) -> Any:
            called.append(name)
            return real(*args, **given)

        monkeypatch.setattr(flash_attn_interface, name, spy)
    layers = (LayerFacts(0.1), LayerFacts(0.2, window=20))
    case = AttentionCase(name="fresh", dtype="float32", head_dim=64, layers=layers, rows=rows, phase=phase)
    rig = Rig("cpu")
    with rig.active():
        case.run(Subject(_spec("fa3"), options=options), rig)
    assert set(called) == {"flash_attn_varlen_func" if unpaged else "flash_attn_with_kvcache"}
    assert len(called) >= len(layers)
