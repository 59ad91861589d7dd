"""Experts cut between ranks: each rank loads its own part of every expert, from either layout of the checkpoint."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from minisgl_core.checkpoint import load_weights
from minisgl_core.distributed import DistributedInfo
from minisgl_core.layers import mlp

EXPERTS, FULL, HIDDEN = 3, 6, 4


class Memory:
    """A WeightSource over a dict."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.tensors = tensors

    def names(self) -> frozenset[str]:
        return frozenset(self.tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.tensors[name].shape)

    def dtype(self, name: str) -> str:
        return "float32"

    def order(self, names: Any) -> list[str]:
        return sorted(names)

    def read(self, name: str, index: tuple[slice, ...]) -> torch.Tensor:
        return self.tensors[name][index]


def load(rank: int, size: int, tensors: dict[str, torch.Tensor]) -> mlp.Experts:
    moe = SimpleNamespace(num_experts=EXPERTS, intermediate_size=FULL)
    config = SimpleNamespace(moe=moe, hidden_size=HIDDEN)
    kind = {"dtype": torch.float32, "device": torch.device("cpu")}
    ctx: Any = SimpleNamespace(config=config, tp=DistributedInfo(rank, size), **kind)
    layer = mlp.Experts(ctx, 0)
    source: Any = Memory(tensors)
    load_weights(list(layer.weight_targets("e.", source.names())), source, progress=False)
    return layer


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("fused", [False, True], ids=["per expert", "fused"])
def test_each_rank_loads_its_own_rows_of_every_expert(size: int, fused: bool) -> None:
    gate, up, down = (torch.randn(EXPERTS, FULL, HIDDEN, generator=torch.Generator().manual_seed(i)) for i in range(3))
    down = down.transpose(1, 2).contiguous()  # (E, hidden, I)
    if fused:
        tensors = {"e.gate_up_proj": torch.cat([gate, up], 1), "e.down_proj": down}
    else:
        names = {"gate_proj": gate, "up_proj": up, "down_proj": down}
        tensors = {f"e.{i}.{name}.weight": whole[i] for name, whole in names.items() for i in range(EXPERTS)}
    local = FULL // size
    for rank in range(size):
        mine, layer = slice(rank * local, (rank + 1) * local), load(rank, size, tensors)
        assert layer.w13 is not None and layer.w2 is not None
        assert torch.equal(layer.w13, torch.cat([gate[:, mine], up[:, mine]], 1))
        assert torch.equal(layer.w2, down[:, :, mine])
