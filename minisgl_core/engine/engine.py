"""One rank's engine: device, model, KV pool, attention, sampler, graphs; and the one method that runs a pass."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch

from minisgl_core.checkpoint import head_is_tied, load_weights, open_source
from minisgl_core.core import Batch, Context
from minisgl_core.kvcache.pool import PagedKVPool
from minisgl_core.modelconfig import read_model_config
from minisgl_core.registry import build, load_class

from .dispatch import AttentionDispatcher
from .memory import check_context, count_pages
from .planning import choose_dtype, context_limit, make_plan
from .sampler import Sampler
from .setups import Setups, capture_sizes
from .state import DecodeState
from .step import ForwardOutput, Stepper

if TYPE_CHECKING:
    from minisgl_core.plugin_api import SamplingMode

    from .config import EngineConfig
    from .watching import Watching

__all__ = ["Engine"]

logger = logging.getLogger(__name__)
OUTPUT_DEPTH = 4
"""Batches whose tokens may be on their way to the host at once; overlap scheduling needs two."""


class Engine:
    """Builds everything in order, then runs passes. ``shutdown()`` gives all memory back."""

    def __init__(self, config: EngineConfig) -> None:
        # ---- the model's facts, the plan -----------------------------------------------------------------
        self.config, self.tp = config, config.tp_info
        self.model_config = read_model_config(config.model_path)
        self.dtype = choose_dtype(config, self.model_config)
        self.max_seq_len = context_limit(config, self.model_config)
        self.max_running_req, self.vocab_size = config.max_running_req, self.model_config.vocab_size
        self.eos_token_ids = frozenset(self.model_config.eos_token_ids)
        self.plan = make_plan(config, self.model_config)
        self.page_size = self.plan.page_size
        self._closed = False

        # ---- the device, the other ranks -----------------------------------------------------------------
        self.platform = load_class(self.plan.choice("platform"))(self.tp.rank)
        self.device: torch.device = self.platform.device
        self.platform.activate()
        setups = Setups(config, self.plan, self.model_config, self.dtype, self.max_seq_len, self.platform)
        self.comm = build(self.plan.choice("comm"), setups.comm())
        self.comm.check_equal("plan", self.plan.digest())

        # ---- the model -----------------------------------------------------------------------------------
        self.ctx = self._make_context(setups)
        check_context(config, self.ctx)
        self.model = load_class(self.plan.choice("models"))(self.ctx)
        self._load_weights()

        # ---- attention before the pool, so that its workspace counts --------------------------------------
        self.watching = self._make_watching(setups)
        watch = None if self.watching is None else self.watching.attention
        self.attn_backend = AttentionDispatcher(setups.build_attention(), self.max_seq_len, watch)
        self.ctx.attn = self.attn_backend

        # ---- the pool, the device state --------------------------------------------------------------------
        c, kv_heads = self.model_config, setups.kv_heads
        self.num_pages = count_pages(config, self.ctx, self.page_size, kv_heads, self.dtype)
        self.kv_cache = PagedKVPool(
            c.num_layers, self.num_pages, self.page_size, kv_heads, c.head_dim, self.dtype, self.device
        )
        width = -(-self.max_seq_len // self.page_size) * self.page_size
        self.state = DecodeState(
            self.platform,
            self.max_running_req,
            width,
            self.page_size,
            self.kv_cache.dummy_slot,
            config.max_prefill_tokens,
        )
        self.page_table = self.state.page_table
        self.ctx.pool = self.kv_cache
        self.model.bind_kv()
        self.attn_backend.bind(self.kv_cache, self.state)
        if self.watching is not None:
            self.watching.bind(self.kv_cache)

        # ---- sampling, graphs ------------------------------------------------------------------------------
        self.sampler = Sampler(self.ctx.ops, self.state, config.seed)
        self.stepper = Stepper(self.model, self.attn_backend, self.sampler, self.state, self.kv_cache)
        self._host_tokens = [
            (self.platform.empty_pinned((self.max_running_req + 1,), torch.int32), self.platform.new_event())
            for _ in range(OUTPUT_DEPTH)
        ]
        self._turn = 0
        sizes = capture_sizes(config, self.plan)
        if sizes:
            self.attn_backend.init_capture_graph(self.max_seq_len, sizes)
        self.graph_runner = build(self.plan.choice("graph"), setups.graph(self.stepper, sizes))
        self.graph_runner.capture()
        logger.info("engine ready: %s pages of %s tokens, plan %s", self.num_pages, self.page_size, self.plan.digest())

    def _make_context(self, setups: Setups) -> Context:
        kv = build(self.plan.choice("kv"), setups.kv())
        needs_moe = self.model_config.moe is not None
        return Context(
            config=self.model_config,
            tp=self.tp,
            device=self.device,
            dtype=self.dtype,
            platform=self.platform,
            comm=self.comm,
            kv=kv,
            ops=setups.build_ops(kv, self.comm),
            linear=setups.build_linear(),
            moe=build(self.plan.choice("moe"), setups.moe()) if needs_moe else None,
            max_seq_len=self.max_seq_len,
            max_tokens=self.config.max_prefill_tokens,
        )

    def _make_watching(self, setups: Setups) -> Watching | None:
        if not (self.config.record or self.config.shadow):
            return None
        from .watching import Watching

        return Watching(self.config, self.plan, self.model_config, setups)

    def _load_weights(self) -> None:
        if self.config.dummy_weights:
            generator = torch.Generator(device=self.device).manual_seed(self.config.seed + self.tp.rank)
            for slot in self.model.slots("", frozenset()):
                slot.target.normal_(0.0, 0.02, generator=generator)
        else:
            source = open_source(self.config.model_path)
            try:
                tied = head_is_tied(source, self.model_config.tie_word_embeddings)
                if tied != self.model_config.tie_word_embeddings and self.tp.is_primary:
                    logger.warning(
                        "config.json and the checkpoint disagree about `tie_word_embeddings`: the output head is %s",
                        "the embedding, as there is no lm_head.weight"
                        if tied
                        else "the checkpoint's own lm_head.weight",
                    )
                self.model.tie_head(tied)
                slots = self.model.slots("", source.names())
                unused = ("lm_head.weight",) if tied else ()
                load_weights(slots, source, progress=self.config.progress and self.tp.is_primary, unused=unused)
            finally:
                source.close()
        self.model.finish()

    # One pass.

    @torch.inference_mode()
    def forward_batch(self, batch: Batch, mode: SamplingMode) -> ForwardOutput:
        """Launch one pass over ``batch``; returns before the device is done. Calls ``complete_one`` on each Req."""
        batch.mode = mode
        if not batch.padded_size:
            self.graph_runner.pad_batch(batch)
        if batch.is_decode and self.graph_runner.can_replay(batch):
            self.state.upload_decode(batch)
            self.state.set_by_hand(batch)
            out = self.graph_runner.replay(batch)
        else:
            if batch.view is None:
                self.attn_backend.prepare_metadata(batch)
            out = self.stepper.step(batch)
        if batch.size == len(out.next_tokens):
            return self._finish_pass(batch, out.logits, out.next_tokens)
        return self._finish_pass(batch, out.logits[: batch.size], out.next_tokens[: batch.size])

    def _finish_pass(self, batch: Batch, logits: torch.Tensor, tokens: torch.Tensor) -> ForwardOutput:
        logprob_rows = None
        if self.sampler.edits_logits:
            tokens = self.stepper.resample(logits, batch)
            logprob_rows = self.sampler.logprobs(logits, tokens, batch)
        buffer, copied = self._host_tokens[self._turn]
        self._turn = (self._turn + 1) % OUTPUT_DEPTH
        host = buffer[: batch.size]
        host.copy_(tokens, non_blocking=True)
        copied.record()
        if batch.is_decode:
            self.state.advance_host(batch)
        batch.complete_one()
        return ForwardOutput(tokens, host, logits, copied, logprob_rows)

    def shutdown(self) -> None:
        """Free graphs, backends, pool and connections, in this order. Calling it twice is harmless."""
        if self._closed:
            return
        self._closed = True
        self.platform.synchronize()
        self.graph_runner.close()
        self.attn_backend.close()
        if self.watching is not None:
            self.watching.close()
        for backend in (self.ctx.moe, self.ctx.linear, self.ctx.ops, self.ctx.kv):
            if backend is not None:
                backend.close()
        self.kv_cache.close()
        self.comm.close()
        self.ctx.pool = self.ctx.attn = None
        for name in ("model", "stepper", "sampler", "state", "page_table", "attn_backend", "graph_runner"):
            setattr(self, name, None)
        self.platform.close()
