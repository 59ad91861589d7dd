"""The right attention backends pass the kit, both ways in."""

from __future__ import annotations

import pytest

from minisgl_core.testing import AttentionSuite

pytest.importorskip("minisgl_cpu_sim")


class TestTorchAttention(AttentionSuite):
    spec = "attention:torch"
    device = "cpu"


class TestCpuAttention(AttentionSuite):
    spec = "attention:cpu"
    device = "cpu"
