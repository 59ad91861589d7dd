"""The right backends pass the kit, every check a test of its own."""

from __future__ import annotations

import pytest

from minisgl_core.testing import AttentionSuite, CommSuite, GraphSuite, KVSuite, LinearSuite, MoESuite, OpsSuite

pytest.importorskip("minisgl_cpu_sim")


class TestTorchAttention(AttentionSuite):
    spec = "attention:torch"
    device = "cpu"


class TestCpuAttention(AttentionSuite):
    spec = "attention:cpu"
    device = "cpu"


class TestTorchKV(KVSuite):
    spec = "kv:torch"
    device = "cpu"


class TestCpuKV(KVSuite):
    spec = "cpu"  # the suite knows its role
    device = "cpu"


class TestTorchMoE(MoESuite):
    spec = "moe:torch"
    device = "cpu"


class TestCpuMoE(MoESuite):
    spec = "moe:cpu@minisgl-cpu-sim"
    device = "cpu"


class TestComposedOps(OpsSuite):
    spec = "ops:composed"
    device = "cpu"


class TestCpuOps(OpsSuite):
    spec = "ops:cpu"
    device = "cpu"


class TestPlainLinear(LinearSuite):
    spec = "linear:plain"
    device = "cpu"


class TestCpuLinear(LinearSuite):
    spec = "linear:cpu"
    device = "cpu"


class TestEmulatedGraph(GraphSuite):
    spec = "graph:emulated"
    device = "cpu"


class TestEagerRunner(GraphSuite):
    spec = "graph:eager"
    device = "cpu"


class TestTorchDist(CommSuite):
    spec = "comm:torch_dist"
    device = "cpu"
