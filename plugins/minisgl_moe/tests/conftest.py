"""Random layers of experts, and the float64 sum that they are checked with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from minisgl_core.builtin.platform import CudaPlatform
from minisgl_core.plugin_api import MoESetup


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)


@dataclass
class Layer:
    """One layer's weights and the executor's setup. Random numbers come from the host: the same on every device."""

    experts: int
    top_k: int
    hidden: int
    inner: int
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    max_tokens: int = 64
    seed: int = 0

    def __post_init__(self) -> None:
        self._random = torch.Generator(device=self.device).manual_seed(self.seed)
        self.w13 = self.randn(self.experts, 2 * self.inner, self.hidden, scale=self.hidden**-0.5)
        self.w2 = self.randn(self.experts, self.hidden, self.inner, scale=self.inner**-0.5)

    def randn(self, *shape: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(*shape, generator=self._random, device=self.device) * scale).to(self.dtype)

    def setup(self) -> MoESetup:
        return MoESetup(
            device=torch.device(self.device),
            dtype=self.dtype,
            num_experts=self.experts,
            top_k=self.top_k,
            hidden_size=self.hidden,
            intermediate_size=self.inner,
            num_layers=1,
            max_tokens=self.max_tokens,
            platform=CudaPlatform(0) if self.device == "cuda" else None,
        )

    def ids(self, tokens: int) -> torch.Tensor:
        """Each token's own experts, (T, k) int32."""
        scores = torch.rand(tokens, self.experts, generator=self._random, device=self.device)
        return scores.topk(self.top_k).indices.to(torch.int32)

    def shares(self, tokens: int) -> torch.Tensor:
        """Routing weights, (T, k) float32; they need not add up to one."""
        return torch.rand(tokens, self.top_k, generator=self._random, device=self.device) + 0.1

    def expected(self, x: torch.Tensor, ids: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        """The sum by its definition, expert by expert, in float64: (T, H)."""
        out = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
        for expert in range(self.experts):
            tokens, choices = (ids == expert).nonzero(as_tuple=True)
            gate, up = (x[tokens].double() @ self.w13[expert].double().T).chunk(2, dim=-1)
            rows = (gate * torch.sigmoid(gate) * up) @ self.w2[expert].double().T
            out.index_add_(0, tokens, rows * shares[tokens, choices, None].double())
        return out


@pytest.fixture(scope="session")
def layer() -> Callable[..., Any]:
    """``layer(experts, top_k, hidden, inner, ...)`` -> :class:`Layer`."""
    return Layer
