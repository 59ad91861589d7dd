"""The plugin's own code on fake libraries: the conformance kit over CPU tensors, per variant."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from minisgl_core.plugin_api import ANY, BackendSpec, CannotRun, LayerFacts, OneOf
from minisgl_core.testing import AttentionCheck, AttentionSuite
from minisgl_core.testing.backend_under_test import BackendUnderTest
from minisgl_core.testing.device_fixture import DeviceFixture
from minisgl_cpu_sim.fakes import flash_attn_interface, inject, on_cpu
from minisgl_fa.fa3 import Operator
from minisgl_fa.plugin import minisgl_attention_backends

SPECS = {spec.variant: spec for spec in minisgl_attention_backends()}


def _spec(variant: str, **changes: Any) -> BackendSpec:
    """One capability set: float32, which the fakes compute exactly."""
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
    called: list[int] = []
    real = flash_attn_interface.flash_attn_3_gpu.fwd.default

    def spy(q: torch.Tensor, k: torch.Tensor, *rest: Any) -> Any:
        called.append(k.dim())
        return real(q, k, *rest)

    operator = SimpleNamespace(default=spy)
    spy._schema = real._schema  # type: ignore[attr-defined]
    monkeypatch.setattr(flash_attn_interface, "flash_attn_3_gpu", SimpleNamespace(fwd=operator))
    layers = (LayerFacts(0.1), LayerFacts(0.2, window=20))
    check = AttentionCheck(name="fresh", dtype="float32", head_dim=64, layers=layers, rows=rows, phase=phase)
    fixture = DeviceFixture("cpu")
    with fixture.active():
        check.run(BackendUnderTest(_spec("fa3"), options=options), fixture)
    assert set(called) == {3 if unpaged else 4}  # (N, K, D) rows, or caches of pages
    assert len(called) >= len(layers)


def test_layers_with_the_same_facts_share_a_call_and_those_of_a_window_a_schedule(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    schedules: list[Any] = []
    calls: list[tuple[Any, ...]] = []
    real, plan = flash_attn_interface.flash_attn_3_gpu.fwd.default, flash_attn_interface.get_scheduler_metadata

    def spy(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any) -> Any:
        calls.append(rest)
        return real(q, k, v, *rest)

    def planned(*args: Any, **given: Any) -> torch.Tensor:
        schedules.append(given["window_size"])
        return plan(*args, **given)

    spy._schema = real._schema  # type: ignore[attr-defined]
    monkeypatch.setattr(flash_attn_interface, "flash_attn_3_gpu", SimpleNamespace(fwd=SimpleNamespace(default=spy)))
    monkeypatch.setattr(flash_attn_interface, "get_scheduler_metadata", planned)
    wide, narrow = LayerFacts(0.1), LayerFacts(0.1, window=20)
    layers = (wide, narrow, LayerFacts(0.2), narrow)
    check = AttentionCheck(name="four", dtype="float32", head_dim=64, layers=layers, rows=((1, 40), (1, 3)))
    fixture = DeviceFixture("cpu")
    with fixture.active():
        check.run(BackendUnderTest(_spec("fa3")), fixture)
    assert schedules == [(-1, -1), (19, 0)]
    first, second, third, fourth = calls[:4]
    assert second is not first and all(a is b for a, b in zip(second, fourth, strict=True))
    schedule = next(place for place, a in enumerate(real._schema.arguments[3:]) if a.name == "scheduler_metadata")
    assert first[schedule] is third[schedule] is not second[schedule]


def _library_with(schema: str, name: str = "flash_attn_3_cuda") -> Any:
    operator = SimpleNamespace(default=SimpleNamespace(_schema=torch._C.parse_schema(schema)))
    return SimpleNamespace(**{name: SimpleNamespace(fwd=operator)})


def test_arguments_are_laid_out_as_the_installed_operator_wants_them() -> None:
    older = (
        "fwd(Tensor q, Tensor k, Tensor v, Tensor? k_new, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, "
        "Tensor? seqused_k, int? max_seqlen_q, int? max_seqlen_k, Tensor? page_table, float softmax_scale, "
        "bool is_causal, int window_size_left = -1, int window_size_right = -1, "
        "Tensor? scheduler_metadata = None, int num_splits = 0, bool? pack_gqa = None, int sm_margin = 0) -> Tensor"
    )
    operator = Operator(_library_with(older))
    laid_out = operator.after_qkv(softmax_scale=0.5, max_seqlen_q=7, is_causal=True, num_splits=3)
    assert laid_out == (None, None, None, None, 7, None, None, 0.5, True, -1, -1, None, 3)
    newer = Operator(flash_attn_interface)
    assert newer.after_qkv(k_new=1) == (1,)
    assert len(newer.after_qkv(sinks=None)) == len(newer.run._schema.arguments) - 3


@pytest.mark.parametrize("library", [SimpleNamespace(), SimpleNamespace(flash_attn_3_cuda=SimpleNamespace(fwd=max))])
def test_a_library_without_the_operator_is_refused(library: Any) -> None:
    with pytest.raises(CannotRun, match=r"flash_attn_3\.fwd"):
        Operator(library)


def test_a_library_whose_operator_lacks_an_argument_is_refused() -> None:
    lacking = "fwd(Tensor q, Tensor k, Tensor v, float softmax_scale) -> Tensor"
    with pytest.raises(CannotRun, match="page_table"):
        Operator(_library_with(lacking))
