"""What a check may not change of its process."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any
from unittest import SkipTest

import numpy as np
import pytest
import torch

from minisgl_core.testing import Mismatch
from minisgl_core.testing.hygiene import SETTINGS, same_process


def _change_everything() -> None:
    torch.set_default_dtype(torch.float16)
    torch.set_default_device("meta")
    torch.set_num_threads(torch.get_num_threads() + 1)
    torch.use_deterministic_algorithms(True)
    torch.set_grad_enabled(False)
    torch.set_float32_matmul_precision("medium")
    torch.rand(1, device="cpu")
    random.random()
    np.random.rand()


CHANGES = (
    r"torch's default dtype from torch\.float32 to torch\.float16",
    r"torch's default device from cpu to meta",
    r"torch's number of threads from \d+ to \d+",
    r"torch's deterministic algorithms from off to on",
    r"torch's grad mode from True to False",
    r"the precision of float32 products from highest to medium",
    r"torch's random state",
    r"Python's random state",
    r"NumPy's random state",
)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad, torch.inference_mode])
def test_what_a_block_changes_of_the_process_is_named_and_put_back(mode: Callable[[], Any]) -> None:
    with mode():
        before = [torch.is_grad_enabled(), *(setting.get() for setting in SETTINGS)]
        said = f"^it changed what the whole process shares: {', '.join(CHANGES)}$"
        with pytest.raises(Mismatch, match=said), same_process():
            _change_everything()
        assert [torch.is_grad_enabled(), *(setting.get() for setting in SETTINGS)] == before


def _fail(error: Exception) -> None:
    with same_process():
        torch.set_default_dtype(torch.float16)
        raise error


def test_a_failure_that_may_follow_from_a_change_is_reported_with_it() -> None:
    with pytest.raises(Mismatch, match=r"default dtype from torch.float32 to torch.float16; then: ValueError: wrong$"):
        _fail(ValueError("wrong"))
    with pytest.raises(Mismatch, match=r"to torch.float16; then: the sum is wrong$"):
        _fail(Mismatch("the sum is wrong"))
    with pytest.raises(SkipTest):
        _fail(SkipTest())
    assert torch.get_default_dtype() == torch.float32


def test_a_failure_without_a_change_stays_what_it_is() -> None:
    with pytest.raises(ValueError, match=r"^wrong$"), same_process():
        raise ValueError("wrong")
    with same_process():
        torch.rand(1, generator=torch.Generator().manual_seed(1))
