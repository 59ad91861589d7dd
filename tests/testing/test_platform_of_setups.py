"""Engine and kit pass the same platform to a backend, in every Setup that has one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from minisgl_core.builtin.devices import detect_device
from minisgl_core.builtin.platform import CpuPlatform
from minisgl_core.engine import EngineConfig
from minisgl_core.engine.backend_factory import BackendFactory
from minisgl_core.engine.plan_resolution import make_plan
from minisgl_core.modelconfig import read_model_config
from minisgl_core.plugin_api import API_VERSIONS, LinearSetup, MoESetup
from minisgl_core.testing import DeviceFixture
from minisgl_core.testing.linear import LinearCheck
from minisgl_core.testing.moe import MoECheck


def test_the_engines_setups_name_its_platform(tiny: Callable[[str], Path]) -> None:
    path = tiny("moe")
    config, model, platform = EngineConfig(str(path), device="cpu"), read_model_config(str(path)), CpuPlatform()
    backends = BackendFactory(config, make_plan(config, model), model, torch.float32, 64, platform)
    made: list[Any] = [backends.linear_setup(), backends.moe_setup(), backends.kv_setup(), backends.attention_setup(1)]
    assert [setup.platform for setup in made] == [platform] * 4


@pytest.mark.parametrize("check", [LinearCheck(name="one"), MoECheck(name="one")], ids=["linear", "moe"])
def test_the_kits_setups_do_too(check: Any) -> None:
    fixture = DeviceFixture(detect_device("cpu"))
    under_test: Any = SimpleNamespace(build=lambda setup, caps: setup)
    assert check.build(under_test, fixture, None).platform is fixture.platform


def test_it_may_be_left_out_as_in_version_1_0() -> None:
    linear = LinearSetup(torch.device("cpu"), torch.float32, 64)
    moe = MoESetup(torch.device("cpu"), torch.float32, 8, 2, 64, 32, 1, 128)
    assert linear.platform is None and moe.platform is None
    assert replace(linear, platform=CpuPlatform()).platform is not None
    assert (API_VERSIONS["linear"], API_VERSIONS["moe"]) == ("1.2", "1.1")
