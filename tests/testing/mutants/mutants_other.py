"""Wrong backends of the other roles: each changes one thing of a right one."""

from __future__ import annotations

from typing import Any

import torch

from minisgl_core.builtin.comm import TorchDistCommunicator
from minisgl_core.builtin.linear import PlainLinear
from minisgl_core.builtin.ops import ComposedOps, filter_mask, gumbel_noise
from minisgl_cpu_sim.graph import EmulatedGraphRunner
from minisgl_cpu_sim.pure.kv import TorchKV
from minisgl_cpu_sim.pure.linear import FusedTorchLinear

# kv


class OffsetOverflows(TorchKV):
    """Element offsets in 16 bits: a small pool shows what 32 bits do to a large one."""

    def store(self, k_cache, v_cache, k, v, out_loc):
        row = k_cache.shape[2] * k_cache.shape[3]
        super().store(k_cache, v_cache, k, v, out_loc.long() * row % 2**16 // row)


class WritesOneRowTooMany(TorchKV):
    def store(self, k_cache, v_cache, k, v, out_loc):
        middle = len(out_loc) // 2
        super().store(k_cache, v_cache, k, v, out_loc)
        super().store(k_cache, v_cache, k[:1], v[:1], out_loc[middle : middle + 1] + 1)


class WrongPageStride(TorchKV):
    def store(self, k_cache, v_cache, k, v, out_loc):
        size = k_cache.shape[1]
        slots = out_loc // size * (size - 1 or 1) + out_loc % size
        super().store(k_cache, v_cache, k, v, slots)


class TakesKToBeContiguous(TorchKV):
    def store(self, k_cache, v_cache, k, v, out_loc):
        k = k.as_strided(k.shape, (k.shape[1] * k.shape[2], k.shape[2], 1))
        super().store(k_cache, v_cache, k, v, out_loc)


class SwapsKAndV(TorchKV):
    def store(self, k_cache, v_cache, k, v, out_loc):
        super().store(v_cache, k_cache, k, v, out_loc)


class IndexIgnoresStart(TorchKV):
    def index(self, table, ids, start, rows):
        return super().index(table, ids - (start > 0) * (start - 1), 0, rows)


class IndexMultipliesByZero(TorchKV):
    def index(self, table, ids, start, rows):
        local = ids.long() - start
        own = (local >= 0) & (local < rows)
        return table[local.clamp(0, rows - 1)] * own[:, None].to(table.dtype)


class MatchStopsEarly(TorchKV):
    def match_len(self, a, b):
        return super().match_len(a, b) // 16 * 16


class RowsOfTheLastInstance(TorchKV):
    """Keeps in the class how wide a row of the pool is."""

    def __init__(self, setup: Any, options: object = None) -> None:
        super().__init__(setup, options)
        RowsOfTheLastInstance.row = setup.kv_heads * setup.head_dim

    def store(self, k_cache, v_cache, k, v, out_loc):
        row = k_cache.shape[2] * k_cache.shape[3]
        super().store(k_cache, v_cache, k, v, out_loc.long() * self.row // row % (k_cache.numel() // row))


# ops


class NormInLowPrecision(ComposedOps):
    def rms_norm(self, x, weight, eps):
        low = x.half()
        return (low * torch.rsqrt(low.square().mean(-1, keepdim=True) + eps) * weight.half()).to(x.dtype)


class EpsOutsideTheRoot(ComposedOps):
    def rms_norm(self, x, weight, eps):
        wide = x.float()
        return (wide / (wide.square().mean(-1, keepdim=True).sqrt() + eps) * weight.float()).to(x.dtype)


class ReturnsTheOldResidual(ComposedOps):
    def add_rms_norm(self, x, residual, weight, eps):
        return super().add_rms_norm(x, residual, weight, eps)[0], residual


class RopePairsInterleaved(ComposedOps):
    def qk_norm_rope_store(self, qkv, args, positions, out_loc):
        s, half = self._s, args.cos_sin.shape[1] // 2
        order = torch.arange(s.head_dim)
        order[: 2 * half] = torch.cat((torch.arange(0, 2 * half, 2), torch.arange(1, 2 * half, 2)))
        heads = qkv.view(len(qkv), -1, s.head_dim).clone()
        rotated = s.q_heads + s.kv_heads
        heads[:, :rotated] = heads[:, :rotated][..., order]
        q_weight, k_weight = (None if w is None else w[order] for w in (args.q_weight, args.k_weight))
        args = args._replace(q_weight=q_weight, k_weight=k_weight)
        return super().qk_norm_rope_store(heads, args, positions, out_loc)


class RotatesTheWholeHead(ComposedOps):
    """Ignores a partial rotary width: the angles are stretched over the head."""

    def qk_norm_rope_store(self, qkv, args, positions, out_loc):
        cos, sin = args.cos_sin.chunk(2, dim=-1)
        times = self._s.head_dim // args.cos_sin.shape[1]
        whole = torch.cat((cos.repeat(1, times), sin.repeat(1, times)), dim=-1)
        return super().qk_norm_rope_store(qkv, args._replace(cos_sin=whole), positions, out_loc)


class StoresTheUnrotatedKey(ComposedOps):
    def qk_norm_rope_store(self, qkv, args, positions, out_loc):
        s = self._s
        found = super().qk_norm_rope_store(qkv, args, positions, out_loc)
        _, k, v = qkv.view(len(qkv), -1, s.head_dim).split((s.q_heads, s.kv_heads, s.kv_heads), dim=1)
        s.kv.store(args.k_cache, args.v_cache, k, v, out_loc)
        return found


class PositionsOffByOne(ComposedOps):
    def qk_norm_rope_store(self, qkv, args, positions, out_loc):
        return super().qk_norm_rope_store(qkv, args, (positions - 1).clamp(min=0), out_loc)


class SwapsGateAndUpOfTheActivation(ComposedOps):
    def act_and_mul(self, x):
        return super().act_and_mul(torch.cat(x.chunk(2, dim=-1)[::-1], dim=-1))


class RouteNeverRenormalises(ComposedOps):
    def route(self, logits, top_k, renormalize):
        return super().route(logits, top_k, False)


class RouteSmallestFirst(ComposedOps):
    def route(self, logits, top_k, renormalize):
        ids, weights = super().route(logits, top_k, renormalize)
        return ids.flip(-1), weights.flip(-1)


class SampleIgnoresTheSeed(ComposedOps):
    def sample(self, logits, args, mode):
        zeros = torch.zeros_like(args.seed_lo)
        return super().sample(logits, args._replace(seed_lo=zeros, seed_hi=zeros), mode)


class SampleTakesRowZerosSeed(ComposedOps):
    def sample(self, logits, args, mode):
        same = {name: getattr(args, name)[:1].expand(len(logits)) for name in ("seed_lo", "seed_hi")}
        return super().sample(logits, args._replace(**same), mode)


class TiesToTheHighestId(ComposedOps):
    def sample(self, logits, args, mode):
        found = super().sample(logits, args, mode)
        highest = logits.shape[1] - 1 - logits.flip(-1).argmax(-1).to(torch.int32)
        return torch.where((args.temperature > 0) | (found < 0), found, highest)


class TopPKeepsOneMore(ComposedOps):
    def sample(self, logits, args, mode):
        if mode != "filtered":
            return super().sample(logits, args, mode)
        warm = args.temperature > 0
        scaled = (logits.float() - logits.float().amax(-1, keepdim=True)) / torch.where(warm, args.temperature, 1.0)[
            :, None
        ]
        probs = scaled.softmax(-1)
        keep = filter_mask(probs, args.top_k, args.top_p, args.min_p)
        following = probs.masked_fill(keep, -1).argmax(-1, keepdim=True)
        keep.scatter_(1, following, True)
        scores = scaled + gumbel_noise(args.seed_lo, args.seed_hi, args.positions, logits.shape[1])
        drawn = scores.masked_fill(~keep, -torch.inf).argmax(-1).to(torch.int32)
        greedy = super().sample(logits, args, "greedy")
        return torch.where(warm & (greedy >= 0), drawn, greedy)


class NanRowsGiveAToken(ComposedOps):
    def sample(self, logits, args, mode):
        return super().sample(logits.nan_to_num(), args, mode)


class RoutesOnceForAnAddress(ComposedOps):
    key = None

    def route(self, logits, top_k, renormalize):
        key = (logits.data_ptr(), logits.shape)
        if key != self.key:
            self.key, self.found = key, super().route(logits, top_k, renormalize)
        return tuple(part.clone() for part in self.found)


class DrawsFromTheProcessNoise(ComposedOps):
    """Right, but it takes from a stream of random numbers that is not its own."""

    def sample(self, logits, args, mode):
        torch.rand(1)
        return super().sample(logits, args, mode)


# linear


class ForgetsTheBias(PlainLinear):
    def forward(self, x, weights, bias=None):
        return super().forward(x, weights, None)


class OneWeightForAllInstances(PlainLinear):
    def prepare_weights(self, weight, *rest):
        OneWeightForAllInstances.prepared = super().prepare_weights(weight, *rest)
        return self.prepared

    def forward(self, x, weights, bias=None):
        return super().forward(x, self.prepared, bias)


class TakesInNothing(PlainLinear):
    """Its caps say otherwise."""


class ForgetsTheResidual(FusedTorchLinear):
    def forward_fused(self, x, weights, bias, norm, act):
        forgotten = norm and norm._replace(residual=torch.zeros_like(norm.residual))
        return super().forward_fused(x, weights, bias, forgotten, act)


class AddsIntoTheResidual(FusedTorchLinear):
    def forward_fused(self, x, weights, bias, norm, act):
        out, total = super().forward_fused(x, weights, bias, norm, act)
        return out, total if total is None else norm.residual.copy_(total)


class SwapsGateAndUp(FusedTorchLinear):
    def forward_fused(self, x, weights, bias, norm, act):
        half = len(weights) // 2
        return super().forward_fused(x, weights.roll(half, 0), None if bias is None else bias.roll(half, 0), norm, act)


class HasItsOwnEps(FusedTorchLinear):
    def forward_fused(self, x, weights, bias, norm, act):
        return super().forward_fused(x, weights, bias, norm and norm._replace(eps=1e-6), act)


class KeepsTheFirstGains(FusedTorchLinear):
    def forward_fused(self, x, weights, bias, norm, act):
        self._gains = getattr(self, "_gains", norm and norm.weight.clone())
        return super().forward_fused(x, weights, bias, norm and norm._replace(weight=self._gains), act)


class NormsWithoutSayingSo(FusedTorchLinear):
    def forward_fused(self, x, weights, bias, norm, act):
        return super().forward_fused(x, weights, bias, norm, act)[0], None


# graph


class PadsWithALiveRow(EmulatedGraphRunner):
    def replay(self, batch):
        self._host.input_buffers()["rows"][batch.size : batch.padded_size] = 0
        return super().replay(batch)


class ForgetsASize(EmulatedGraphRunner):
    def __init__(self, setup: Any, options: Any = None) -> None:
        super().__init__(setup, options)
        self._sizes = self._sizes[:-1]


class RunsTheStepAtReplay(EmulatedGraphRunner):
    def replay(self, batch):
        self._host.prepare_replay(batch)
        return self._host.step(batch)


class OneGraphForAllModes(EmulatedGraphRunner):
    def replay(self, batch):
        self._host.prepare_replay(batch)
        return self._graphs[(batch.padded_size, "greedy")].replay()


class SkipsTheHostPlan(EmulatedGraphRunner):
    def replay(self, batch):
        return self._graphs[(batch.padded_size, batch.mode)].replay()


class ReplaysPrefill(EmulatedGraphRunner):
    def can_replay(self, batch):
        return batch.padded_size in self._sizes


class OneSetOfGraphsForAllRunners(EmulatedGraphRunner):
    shared: Any = None

    def capture(self):
        super().capture()
        OneSetOfGraphsForAllRunners.shared = self._graphs

    def replay(self, batch):
        self._host.prepare_replay(batch)
        return self.shared[(batch.padded_size, batch.mode)].replay()


# comm


class GathersInTheWrongOrder(TorchDistCommunicator):
    def all_gather(self, x):
        return torch.cat(super().all_gather(x).chunk(self.size, dim=-1)[::-1], dim=-1)
