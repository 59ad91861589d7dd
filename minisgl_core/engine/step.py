"""The engine's step: everything from the inputs on the device to the next token on the device.

Graph runners record :meth:`Stepper.step`, so nothing in it may depend on values that the host read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from minisgl_core.core import Batch
from minisgl_core.plugin_api import StepOutput

if TYPE_CHECKING:
    from collections.abc import Mapping

    from minisgl_core.kvcache.pool import PagedKVPool
    from minisgl_core.plugin_api import SamplingMode

    from .dispatch import AttentionDispatcher
    from .logprobs import LogprobRows, TokenLogprobs
    from .sampler import Sampler
    from .scoring import PromptScores
    from .state import DecodeState

__all__ = ["ForwardOutput", "Stepper"]


class ForwardOutput(NamedTuple):
    """A launched pass. What is on the device, in stream order, is valid until the next pass."""

    next_tokens_gpu: torch.Tensor
    """(B,) int32 on the engine's device; -1 = that row's logits were NaN"""
    tokens_host: torch.Tensor
    """(B,) int32: the same, being copied to the host; a later pass reuses this memory."""
    logits: torch.Tensor
    """(B, V)"""
    copied: Any
    logprob_rows: LogprobRows | None
    prompt_scores: PromptScores | None

    @property
    def next_tokens_cpu(self) -> torch.Tensor:
        """(B,) int32 on the host, waited for. Copy what must be kept: a few passes later the memory is reused."""
        self.wait()
        return self.tokens_host

    def wait(self) -> None:
        """Until the tokens are on the host."""
        self.copied.synchronize()

    def logprobs(self) -> list[TokenLogprobs | None] | None:
        """One entry per row, waited for; None if no row requested them."""
        if self.logprob_rows is None:
            return None
        return self.logprob_rows.collect(self.next_tokens_cpu.tolist())

    def prompt_logprobs(self) -> dict[int, list[TokenLogprobs]]:
        """By row of the batch, for rows that request them: scores of the prompt tokens of this pass, waited for."""
        if self.prompt_scores is None:
            return {}
        self.wait()
        return self.prompt_scores.collect()


class Stepper:
    """Implements ``plugin_api.GraphHost`` for one engine."""

    def __init__(
        self, model: Any, attn: AttentionDispatcher, sampler: Sampler, state: DecodeState, pool: PagedKVPool
    ) -> None:
        self.model, self._pool = model, pool
        self._attn, self._sampler, self._state = attn, sampler, state

    def step(self, batch: Batch) -> StepOutput:
        """Derive metadata, run the model, sample, write the tokens back. What a graph records."""
        self._attn.update_metadata(batch)
        assert batch.view is not None and batch.rows is not None
        logits = self.model.forward(batch)
        next_tokens = self._sampler.sample(logits, batch.rows, batch.view.kv_lens_device, batch.mode)
        self._state.write_back(batch.rows, batch.view.kv_lens_device, next_tokens)
        return StepOutput(logits, next_tokens)

    def postprocess_logits(
        self, logits: torch.Tensor, tokens: torch.Tensor, batch: Batch
    ) -> tuple[torch.Tensor, LogprobRows | None]:
        """What a captured step cannot contain. From logits (B, V) and tokens (B,) int32 of the step: the tokens, those
        of rows with a logits processor sampled again, and the log-probabilities of the rows that request them.
        """
        assert batch.rows is not None
        state, tokens = self._state, tokens.clone()  # the step's own may be a graph's memory
        for places, processed in self._sampler.processed(logits, batch):
            rows = batch.rows.index_select(0, places)
            # The step has moved the lengths on: they now are the positions of the tokens to sample.
            again = self._sampler.sample(processed, rows, state.lengths.index_select(0, rows), batch.mode)
            again = torch.where(tokens.index_select(0, places) < 0, -1, again)  # a mask may hide NaN
            tokens.index_copy_(0, places.long(), again)
            state.last_token.index_put_((rows,), again.clamp(min=0))
            del processed
        return tokens, self._sampler.logprobs(logits, tokens, batch)

    def score_prompts(self, batch: Batch) -> PromptScores | None:
        """The log-probabilities of the prompt tokens of the step, for Reqs that request them."""
        return self._sampler.prompt_logprobs(batch, self.model.logits)

    def make_capture_batch(self, size: int, mode: SamplingMode) -> Batch:
        """A decode batch of ``size`` dummy rows on the fixed buffers."""
        batch = Batch(reqs=[], phase="decode", padded_size=size, mode=mode, captured=True)
        batch.rows = self._state.rows[:size]
        batch.rows.fill_(self._state.dummy_row)
        self._state.forget_rows()
        self._attn.prepare_for_capture(batch)
        return batch

    def prepare_replay(self, batch: Batch) -> None:
        """The host plan, for backends that have one."""
        self._attn.prepare_for_replay(batch)

    def input_buffers(self) -> Mapping[str, torch.Tensor]:
        """Every fixed buffer that a captured step reads."""
        return self._state.buffers()

    def expected_inputs(self, batch: Batch) -> Mapping[str, tuple[torch.Tensor, torch.Tensor]]:
        """What the host's own records say that the buffers hold which ``batch`` reads."""
        state, size = self._state, batch.size
        rows = [req.table_idx for req in batch.reqs]
        padded = rows + [state.dummy_row] * (batch.padded_size - size)
        device = state.rows.device
        expected = {
            "DecodeState.rows": (state.rows[: batch.padded_size], _int32(padded, device)),
            "DecodeState.lengths": (state.lengths[rows], _int32([r.cached_len for r in batch.reqs], device)),
        }
        # Under overlap the newest token may still be on its way to the host; the others can be checked.
        known = [r for r in batch.reqs if r.num_tokens > r.cached_len]
        expected["DecodeState.last_token"] = (
            state.last_token[[r.table_idx for r in known]],
            _int32([int(r.tokens[r.cached_len]) for r in known], device),
        )
        expected["DecodeState.params"] = (state.params[rows], self._sampler.expected_params(rows).to(device))
        for req in batch.reqs:
            slots = state.host_slots(req.table_idx, req.cached_len + 1)
            if (slots >= 0).all():  # rows that were filled through the page table itself have no record to compare
                held = state.page_table[req.table_idx, : len(slots)]
                expected[f"DecodeState.page_table[{req.table_idx}]"] = (held, torch.from_numpy(slots.copy()).to(device))
        return expected

    def poison_targets(self, batch: Batch) -> Mapping[str, tuple[torch.Tensor, torch.Tensor]]:
        """By cache name: (the cache, the pages that no Req of ``batch`` may read), for checkers that poison them."""
        pool = self._pool
        named = torch.zeros(pool.num_pages + 1, dtype=torch.bool, device=self._state.rows.device)
        for req in batch.reqs:
            named[(self._state.page_table[req.table_idx, : req.device_len] // pool.page_size).long()] = True
        free = (~named).nonzero().flatten()
        caches = {
            f"KVPool.{kind}_cache({i})": pair[at]
            for i, pair in enumerate(pool.caches())
            for at, kind in enumerate("kv")
        }
        return {name: (cache, free) for name, cache in caches.items()}


def _int32(values: list[int], device: torch.device) -> torch.Tensor:
    return torch.from_numpy(np.array(values, dtype=np.int32)).to(device)
