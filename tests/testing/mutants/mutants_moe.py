"""Wrong expert executors: each changes one thing of a right one."""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F

from minisgl_cpu_sim.pure.moe import TorchMoE


class Right:
    """Experts one by one, in float32, in a page of torch."""

    def __init__(self, setup, options=None):
        self.setup = setup

    def prepare_weights(self, layer_id, w13, w2):
        return w13, w2

    def forward(self, x, topk_ids, topk_weights, weights, layer_id):
        out = torch.zeros(x.shape, dtype=torch.float32)
        for expert, (w13, w2) in enumerate(zip(*weights, strict=True)):
            tokens, choices = (topk_ids == expert).nonzero(as_tuple=True)
            gate, up = (x[tokens].float() @ w13.float().T).chunk(2, dim=-1)
            rows = (self.activation(gate) * up) @ w2.float().T
            self.add(out, tokens, rows * topk_weights[tokens, choices, None])
        return out.to(x.dtype)

    def activation(self, gate):
        return F.silu(gate)

    def add(self, out, tokens, rows):
        out.index_add_(0, tokens, rows)

    def close(self):
        pass


# What is computed.


class SwapsGateAndUp(TorchMoE):
    def prepare_weights(self, layer_id, w13, w2):
        gate, up = w13.chunk(2, dim=1)
        return super().prepare_weights(layer_id, torch.cat((up, gate), dim=1), w2)


class ActivatesWithGelu(Right):
    def activation(self, gate):
        return F.gelu(gate)


class ClampsTheGate(Right):
    """At 7, as another family of models does."""

    def activation(self, gate):
        return F.silu(gate.clamp(max=7.0))


class ExponentialOverflows(Right):
    def activation(self, gate):
        return gate * gate.exp() / (1 + gate.exp())


class FlushesSmallGates(Right):
    def activation(self, gate):
        return F.silu(torch.where(gate.abs() < 2.0**-6, 0.0, gate))


class WeighsBeforeTheActivation(Right):
    def forward(self, x, topk_ids, topk_weights, weights, layer_id):
        parts = [
            super(WeighsBeforeTheActivation, self).forward(
                x * topk_weights[:, choice, None].to(x.dtype).nan_to_num(),
                topk_ids[:, choice : choice + 1],
                torch.ones_like(topk_weights[:, :1]),
                weights,
                layer_id,
            )
            for choice in range(topk_ids.shape[1])
        ]
        return torch.stack(parts).float().sum(0).to(x.dtype)


class NormalisesTheWeights(TorchMoE):
    def forward(self, x, topk_ids, topk_weights, weights, layer_id):
        topk_weights = topk_weights / topk_weights.sum(-1, keepdim=True)
        return super().forward(x, topk_ids, topk_weights, weights, layer_id)


class RoundsTheWeights(TorchMoE):
    def forward(self, x, topk_ids, topk_weights, weights, layer_id):
        return super().forward(x, topk_ids, topk_weights.bfloat16().float(), weights, layer_id)


class SumsInHalfPrecision(Right):
    def add(self, out, tokens, rows):
        out[tokens] = (out[tokens].half() + rows.half()).float()


class RepacksTheExpertsInHalfPrecision(Right):
    def prepare_weights(self, layer_id, w13, w2):
        return super().prepare_weights(layer_id, w13.bfloat16(), w2.bfloat16())


# Which experts, and for whom.


class ForgetsEmptyExperts(TorchMoE):
    """Numbers the experts that have tokens, and takes the weights of those numbers."""

    def forward(self, x, topk_ids, topk_weights, weights, layer_id):
        used = topk_ids[topk_ids >= 0].unique()
        dense = torch.where(topk_ids < 0, -1, torch.searchsorted(used, topk_ids).to(torch.int32)).to(torch.int32)
        return super().forward(x, dense, topk_weights, weights, layer_id)


class ForgetsTheLastExpert(TorchMoE):
    def forward(self, x, topk_ids, topk_weights, weights, layer_id):
        kept = topk_ids.masked_fill(topk_ids == len(weights[0]) - 1, -1)
        return super().forward(x, kept, topk_weights, weights, layer_id)


class ForgetsWhatIsBeyondABlock(TorchMoE):
    """An expert takes 64 tokens."""

    def forward(self, x, topk_ids, topk_weights, weights, layer_id):
        kept = topk_ids.clone()
        for expert in kept.unique().tolist():
            kept.view(-1)[(topk_ids.flatten() == expert).nonzero().flatten()[64:]] = -1
        return super().forward(x, kept, topk_weights, weights, layer_id)


class ForgetsTheFifthExpertOfAToken(TorchMoE):
    def forward(self, x, topk_ids, topk_weights, weights, layer_id):
        kept = topk_ids.clone()
        kept[:, 4:] = -1
        return super().forward(x, kept, topk_weights, weights, layer_id)


class NumbersExpertsInSixBits(TorchMoE):
    def forward(self, x, topk_ids, topk_weights, weights, layer_id):
        return super().forward(x, torch.where(topk_ids < 0, -1, topk_ids % 64), topk_weights, weights, layer_id)


class CountsPadding(TorchMoE):
    def forward(self, x, topk_ids, topk_weights, weights, layer_id):
        return super().forward(
            x.nan_to_num(1.0), topk_ids.clamp(min=0), topk_weights.nan_to_num(1.0), weights, layer_id
        )


class CountsPaddingForTheLastExpert(TorchMoE):
    """Indexes with -1."""

    def forward(self, x, topk_ids, topk_weights, weights, layer_id):
        return super().forward(
            x.nan_to_num(1.0), topk_ids % len(weights[0]), topk_weights.nan_to_num(1.0), weights, layer_id
        )


class MultipliesPaddingByZero(TorchMoE):
    def forward(self, x, topk_ids, topk_weights, weights, layer_id):
        out = super().forward(x, topk_ids.clamp(min=0), topk_weights * (topk_ids >= 0), weights, layer_id)
        return out * (topk_ids >= 0).any(-1, keepdim=True)


# Memory and state.


class AnswersIntoX(TorchMoE):
    def forward(self, x, topk_ids, topk_weights, weights, layer_id):
        return x.copy_(super().forward(x, topk_ids, topk_weights, weights, layer_id))


class SortsTheIdsInPlace(TorchMoE):
    def forward(self, x, topk_ids, topk_weights, weights, layer_id):
        out = super().forward(x, topk_ids, topk_weights, weights, layer_id)
        topk_ids.copy_(topk_ids.sort(-1).values)
        return out


class OneBufferForAllResults(TorchMoE):
    buffer = None

    def forward(self, x, topk_ids, topk_weights, weights, layer_id):
        out = super().forward(x, topk_ids, topk_weights, weights, layer_id)
        if self.buffer is None or self.buffer.shape != out.shape:
            self.buffer = torch.empty_like(out)
        return self.buffer.copy_(out)


class KeepsEveryResult(TorchMoE):
    def forward(self, x, topk_ids, topk_weights, weights, layer_id):
        out = super().forward(x, topk_ids, topk_weights, weights, layer_id)
        self.kept = [*getattr(self, "kept", []), out]
        return out.clone()


class WeightsOfTheFirstLayerPrepared(TorchMoE):
    first = None

    def prepare_weights(self, layer_id, w13, w2):
        self.first = self.first or super().prepare_weights(layer_id, w13, w2)
        return self.first


class WeightsOfTheLastInstance(TorchMoE):
    """Keeps the layers' weights in the class."""

    layers: ClassVar[dict] = {}

    def prepare_weights(self, layer_id, w13, w2):
        self.layers[layer_id] = super().prepare_weights(layer_id, w13, w2)

    def forward(self, x, topk_ids, topk_weights, weights, layer_id):
        return super().forward(x, topk_ids, topk_weights, self.layers[layer_id], layer_id)


class RoutingOfTheFirstLayer(TorchMoE):
    """Sorts the tokens once per step: every layer after the first takes its order."""

    def forward(self, x, topk_ids, topk_weights, weights, layer_id):
        if layer_id == 0:
            self.ids = topk_ids.clone()
        topk_ids = getattr(self, "ids", topk_ids)
        return super().forward(x, topk_ids, topk_weights, weights, layer_id)


class RoutingOfTheSameAddress(TorchMoE):
    """Sorts the tokens again only if the ids lie elsewhere."""

    key = None

    def forward(self, x, topk_ids, topk_weights, weights, layer_id):
        key = (topk_ids.data_ptr(), topk_ids.shape)
        if key != self.key:
            self.key, self.ids = key, topk_ids.clone()
        return super().forward(x, self.ids, topk_weights, weights, layer_id)
