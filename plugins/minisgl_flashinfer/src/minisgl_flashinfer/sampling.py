"""FlashInfer's sorting-free sampling as the op ``sample``. B rows, V vocabulary.

It draws from probabilities with one seed for all rows, so the result of a request depends on the other rows: the spec
does not declare ``per_row_seed``. The set of tokens that may be drawn is exactly that of the op; where FlashInfer's
filters keep or drop all tokens of one probability together, ties are resolved here.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch

from .compiling import refuse_if_missing

if TYPE_CHECKING:
    from minisgl_core.plugin_api import OpsSetup, SampleArgs, SamplingMode

__all__ = ["FlashInferSampling"]


class FlashInferSampling:
    """The op ``sample``."""

    def __init__(self, setup: OpsSetup, options: Any = None) -> None:
        self._library: Any = import_module("flashinfer")

    def sample(self, logits: torch.Tensor, args: SampleArgs, mode: SamplingMode) -> torch.Tensor:
        """Logits (B, V) -> ids (B,) int32; -1 for a row whose maximum is NaN."""
        try:
            return self._sample(logits, args, mode)
        except RuntimeError as error:
            refuse_if_missing(error)
            raise

    def _sample(self, logits: torch.Tensor, args: SampleArgs, mode: SamplingMode) -> torch.Tensor:
        logits = logits.float()
        top, ids = logits.max(dim=-1)
        if mode != "greedy":
            warm = args.temperature > 0
            divisor = torch.where(warm, args.temperature, 1.0)
            probs = torch.softmax((logits - top[:, None]) / divisor[:, None], dim=-1)
            if mode == "filtered":
                probs = self._filtered(probs, args)
            ids = torch.where(warm, self._draw(probs, args), ids)
        return torch.where(top.isnan(), -1, ids).to(torch.int32)

    def _draw(self, probs: torch.Tensor, args: SampleArgs) -> torch.Tensor:
        """Draw one token per row. Seeds and positions are summed, so that the noise changes when those
        of any row do.
        """
        seeds = args.seed_lo.to(torch.int64) + (args.seed_hi.to(torch.int64) << 32)
        offset = args.positions.to(torch.int64).sum(0, keepdim=True)
        drawn: torch.Tensor = self._library.sampling_from_probs(probs, seed=seeds.sum(0, keepdim=True), offset=offset)
        return drawn

    def _filtered(self, probs: torch.Tensor, args: SampleArgs) -> torch.Tensor:
        """(B, V) with 0 for tokens that top-k, then top-p of the rest, then min-p exclude; rows sum to 1."""
        vocab = probs.shape[-1]
        top_k = torch.where((args.top_k <= 0) | (args.top_k > vocab), vocab, args.top_k).contiguous()
        kth = _smallest(probs, self._library.top_k_renorm_probs(probs, top_k) > 0)
        kept = probs.masked_fill(probs < kth, 0)
        keep = self._nucleus(kept, args.top_p) & (probs >= args.min_p[:, None] * probs.amax(-1, keepdim=True))
        chosen = kept.masked_fill(~keep, 0)
        return chosen / chosen.sum(-1, keepdim=True)

    def _nucleus(self, kept: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
        """The most likely tokens whose sum reaches ``top_p`` of that of ``kept``; among equal ones the lower ids; at
        least one.
        """
        total = kept.sum(-1, keepdim=True)
        share = top_p[:, None] * total
        narrowed = self._library.top_p_renorm_probs(kept / total, top_p.contiguous())
        least = torch.minimum(_smallest(kept, narrowed > 0), kept.amax(-1, keepdim=True))  # at least the likeliest
        above, tied = kept > least, kept == least
        before = kept.masked_fill(~above, 0).sum(-1, keepdim=True) + least * (tied.cumsum(-1) - 1)
        inside = above | (tied & ((before < share) | (before == 0)))
        return torch.where(top_p[:, None] >= 1, kept > 0, inside)

    def close(self) -> None:
        """Nothing to free."""


def _smallest(probs: torch.Tensor, among: torch.Tensor) -> torch.Tensor:
    """(B, 1)"""
    return probs.masked_fill(~among, torch.inf).amin(-1, keepdim=True)
