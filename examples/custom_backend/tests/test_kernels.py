"""A kernel that bypasses torch's dispatcher is recorded once it is registered."""

import numpy as np
import torch
from minisgl_core.plugin_api import KernelLibrary
from minisgl_cpu_sim.graph import EmulatedGraph, strict_check

library = KernelLibrary("minisgl_blocked")  # one per plugin, at module level


def launch(out: torch.Tensor, x: torch.Tensor) -> None:
    """Stands in for a kernel launch: it writes memory without torch."""
    np.multiply(x.numpy(), 2, out=out.numpy())


double = library.register("double(Tensor(a!) out, Tensor x) -> ()", launch)


def test_the_kernel_is_replayed() -> None:
    x, out = torch.ones(4), torch.empty(4)

    def step() -> torch.Tensor:
        double(out, x + 1)
        return out - 1

    graph = EmulatedGraph.capture(step, strict=True)
    x.fill_(3)
    assert strict_check(graph, step).tolist() == [7.0] * 4
