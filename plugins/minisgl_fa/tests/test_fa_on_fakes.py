"""The plugin's own code on fake libraries: the conformance kit over CPU tensors, per variant."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch

from minisgl_core.plugin_api import ANY, BackendSpec
from minisgl_core.testing import AttentionSuite
from minisgl_cpu_sim.fakes import inject, on_cpu
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
