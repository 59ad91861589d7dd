"""The device-agnostic backends pass the kit on a GPU, captured by the platform's own graphs."""

from __future__ import annotations

import pytest
import torch

from minisgl_core.testing import AttentionSuite, KVSuite, LinearSuite, MoESuite, OpsSuite

pytest.importorskip("minisgl_cpu_sim")
if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

pytestmark = pytest.mark.gpu


class TestTorchAttentionOnGpu(AttentionSuite):
    spec = "attention:torch"
    device = "cuda"


class TestTorchKVOnGpu(KVSuite):
    spec = "kv:torch"
    device = "cuda"


class TestTorchMoEOnGpu(MoESuite):
    spec = "moe:torch"
    device = "cuda"


class TestComposedOpsOnGpu(OpsSuite):
    spec = "ops:composed"
    device = "cuda"


class TestPlainLinearOnGpu(LinearSuite):
    spec = "linear:plain"
    device = "cuda"
