"""The plugin's own code on the fake library: the conformance kit over CPU tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch

from minisgl_core.plugin_api import SampleArgs
from minisgl_core.testing import AttentionSuite, OpsSuite
from minisgl_cpu_sim.fakes import inject, on_cpu
from minisgl_flashinfer.plugin import minisgl_attention_backends, minisgl_layer_ops
from minisgl_flashinfer.sampling import FlashInferSampling

SPEC = on_cpu(minisgl_attention_backends()[0])
FLOAT32 = replace(SPEC, caps=SPEC.caps[:1])
BFLOAT16 = replace(SPEC, caps=SPEC.caps[1:2])
SAMPLING = replace(on_cpu(minisgl_layer_ops()[0]), caps=on_cpu(minisgl_layer_ops()[0]).caps[1:])
"""As declared: its dtypes already have float32."""


@pytest.fixture(autouse=True)
def _fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    inject(monkeypatch, "flashinfer")


class TestFlashInfer(AttentionSuite):
    spec = FLOAT32
    options: ClassVar[Mapping[str, Any]] = {"workspace_mib": 16}


class TestFlashInferOnTensorCores(AttentionSuite):
    spec = BFLOAT16
    options: ClassVar[Mapping[str, Any]] = {"workspace_mib": 16, "use_tensor_cores": True, "prefill_backend": "fa2"}


def test_top_p_stops_where_the_mass_is_just_reached() -> None:
    """Four tokens of a quarter each: two make up one half. The noise of all rows is one, so positions vary in turn."""
    ops, found = FlashInferSampling(None), set()
    one = torch.ones(1)
    for position in range(200):
        ints = torch.tensor([position], dtype=torch.int32)
        args = SampleArgs(one, ints * 0, one / 2, one * 0, ints * 0, ints * 0, ints)
        found.add(int(ops.sample(torch.zeros(1, 4), args, "filtered")))
    assert found == {0, 1}


class TestFlashInferSampling(OpsSuite):
    spec = SAMPLING
