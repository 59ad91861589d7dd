"""The plugin's own code on the fake library: the conformance kit over CPU tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch

from minisgl_core.testing import AttentionSuite, OpsSuite
from minisgl_cpu_sim.fakes import inject, on_cpu
from minisgl_flashinfer.plugin import minisgl_attention_backends, minisgl_layer_ops

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


class TestFlashInferSampling(OpsSuite):
    spec = SAMPLING
