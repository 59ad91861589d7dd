"""Wrong in places where small and short tests do not look: late, large, sometimes, or outside the arithmetic."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import torch
from mutants_attention import Right

from minisgl_core.builtin.linear import PlainLinear
from minisgl_core.plugin_api import LayerFacts
from minisgl_cpu_sim.pure.kv import TorchKV

# Late.


class WrongFromCall100(Right):
    calls = 0

    def forward(self, q, k, v, layer, batch):
        self.calls += 1
        out = super().forward(q, k, v, layer, batch)
        return out * 1.01 if self.calls > 100 else out


class KeepsMemoryOfEachCall(Right):
    """100 kB that are no tensor."""

    def forward(self, q, k, v, layer, batch):
        self.kept = [*getattr(self, "kept", []), bytes(100_000)]
        return super().forward(q, k, v, layer, batch)


class KeepsATableOfEachLength(Right):
    """Of 4 kB, which equal steps fill once."""

    def prepare_metadata(self, batch):
        tables = self.__dict__.setdefault("tables", {})
        for length in batch.view.kv_lens_host or ():
            if length not in tables:
                tables[length] = np.ones(512)


class DiffersInOneOfTwentyCalls(Right):
    """By less than the tolerance."""

    random = None

    def forward(self, q, k, v, layer, batch):
        self.random = self.random or np.random.default_rng(3)
        out = super().forward(q, k, v, layer, batch)
        return out + 5e-5 if self.random.random() < 0.05 else out


# Large.


class CannotDo17KVHeads(Right):
    """One block per head, 16 at most."""

    def expand(self, x):
        return super().expand(torch.cat((x[:, :, :16], x[:, :, :16]), dim=2)[:, :, : x.shape[2]])


class PairsOddHeads(Right):
    """Reads kv heads in pairs: the last of an odd number is lost where query heads are odd too."""

    def expand(self, x):
        if x.shape[2] % 2 and self.setup.q_heads % 2 and x.shape[2] > 1:
            x = torch.cat((x[:, :, :-1], x[:, :, :1]), dim=2)
        return super().expand(x)


class ForgetsRowsBeyond64(Right):
    def forward(self, q, k, v, layer, batch):
        out = super().forward(q, k, v, layer, batch)
        if batch.phase == "decode":
            out[64:] = 0
        return out


class WindowsOf1024AtMost(Right):
    def facts(self, layer):
        facts = super().facts(layer)
        return facts if facts.window is None else LayerFacts(facts.scale, min(facts.window, 1024), facts.softcap)


class FactsOfEightLayers(Right):
    def facts(self, layer):
        return super().facts(layer % 8)


class ForgetsDimsBeyond512(Right):
    def forward(self, q, k, v, layer, batch):
        q = torch.cat((q[..., :512], torch.zeros_like(q[..., 512:])), dim=-1)
        return super().forward(q, k, v, layer, batch)


class PagesOf256AtMost(Right):
    def slots(self, view):
        slots = super().slots(view)
        return slots // view.page_size * view.page_size + slots % view.page_size % 256


class SlotsIn16Bits(Right):
    def slots(self, view):
        return super().slots(view).to(torch.int16).long()


class StoresSlotsIn16Bits(TorchKV):
    def store(self, k_cache, v_cache, k, v, out_loc):
        super().store(k_cache, v_cache, k, v, out_loc.to(torch.int16).long())


class Stores1024RowsAtMost(TorchKV):
    def store(self, k_cache, v_cache, k, v, out_loc):
        super().store(k_cache, v_cache, k[:1024], v[:1024], out_loc[:1024])


class SumsThe8192FirstColumns(PlainLinear):
    def forward(self, x, weights, bias=None):
        return super().forward(x[:, :8192], weights[:, :8192], bias)


class Numbers65536Outputs(PlainLinear):
    def forward(self, x, weights, bias=None):
        out = super().forward(x, weights, bias)
        out[:, 65536:] = 0
        return out


class KeepsEveryInput(PlainLinear):
    """As bytes, which are no tensor."""

    def forward(self, x, weights, bias=None):
        self.kept = [*getattr(self, "kept", []), bytes(len(x) * 64)]
        return super().forward(x, weights, bias)


class OffBySixPercentInBfloat16(Right):
    """More than roundings cost."""

    def forward(self, q, k, v, layer, batch):
        out = super().forward(q, k, v, layer, batch)
        return out * 1.06 if out.dtype == torch.bfloat16 else out


# Outside the arithmetic.


class PatchesTheCore(Right):
    def __init__(self, setup: Any, options: object = None) -> None:
        super().__init__(setup, options)
        LayerFacts.__repr__ = lambda self: "facts"


class ChangesTheEnvironment(Right):
    def __init__(self, setup: Any, options: object = None) -> None:
        super().__init__(setup, options)
        os.environ["OMP_SCHEDULE"] = "static"
