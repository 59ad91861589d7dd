"""One rank's engine: device, model, KV pool, attention, sampler, graphs; and the one method that runs a pass."""

from __future__ import annotations

import logging
import os
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol, TypeVar

import numpy as np
import torch

from minisgl_core.checkpoint import head_is_tied, load_weights, open_source
from minisgl_core.core import Batch, Context
from minisgl_core.inputs import warn_once
from minisgl_core.modelconfig import dequantised, read_model_config
from minisgl_core.plugin_api import MemoryGauge, StepOutput
from minisgl_core.registry import build, load_class
from minisgl_core.registry.records import CORE
from minisgl_core.settings.variables import check_variables

from .backend_factory import BackendFactory, capture_sizes
from .capacity import check_tables, check_weights, explain_shortage
from .device_context import DeviceContext
from .dispatch import AttentionDispatcher
from .memory import MemoryUse, Reserve, count_pages
from .memory_profile import profile_memory
from .observer import ObservedEngine, observed_step
from .plan_resolution import DTYPES, context_limit, make_plan
from .step import ForwardOutput

if TYPE_CHECKING:
    from collections.abc import Callable

    from minisgl_core.plugin_api import SamplingMode

    from .config import EngineConfig
    from .logprobs import LogprobRows
    from .observer import Observer
    from .scoring import PromptScores

__all__ = ["Engine"]

logger = logging.getLogger(__name__)
OUTPUT_DEPTH = 4
"""Batches whose tokens may be on their way to the host at once; overlap scheduling needs two."""
_FORGOTTEN = (
    *("model", "state", "inputs", "page_table", "sampler", "stepper"),
    *("attn_backend", "graph_runner", "_run_step"),
)
"""What a shut-down engine no longer refers to"""


class _Closable(Protocol):
    def close(self) -> None: ...


T = TypeVar("T", bound=_Closable)


class Engine:
    """Builds everything in order, then runs passes. ``shutdown()`` gives all memory back; so does a failed start."""

    def __init__(self, config: EngineConfig) -> None:
        self._closing = ExitStack()
        try:
            self._build(config)
        except BaseException as error:
            try:
                self.shutdown()
            except Exception as another:
                error.add_note(f"freeing what had been built failed as well: {another}")
            raise

    def _build(self, config: EngineConfig) -> None:
        # ---- the model's facts, the plan -----------------------------------------------------------------
        check_variables(os.environ)
        self.config, self.tp = config, config.tp_info
        self.model_config = read_model_config(config.model_path)
        self.max_seq_len = context_limit(config, self.model_config)
        self.max_running_req, self.vocab_size = config.max_running_req, self.model_config.vocab_size
        self.eos_token_ids = frozenset(self.model_config.eos_token_ids)
        self.plan = make_plan(config, self.model_config)
        self.dtype, self.page_size = DTYPES[self.plan.dtype], self.plan.page_size

        # ---- the device, the other ranks -----------------------------------------------------------------
        self.platform = load_class(self.plan.choice("platform"))(self.tp.device_index)
        self._closing.callback(self.platform.close)
        self.device: torch.device = self.platform.device
        self.platform.activate()
        backends = BackendFactory(config, self.plan, self.model_config, self.dtype, self.max_seq_len, self.platform)
        self.comm = self._close_at_end(backends.build_comm())
        self.comm.check_equal("plan", self.plan.digest())
        self.observer = self._make_observer(backends)
        observed = replace(backends, observer=self.observer)

        # ---- the model -----------------------------------------------------------------------------------
        self.ctx = self._make_context(observed)
        model = self.plan.choice("models")
        if model.distribution == CORE:
            check_weights(self.ctx)
        check_tables(config, self.ctx, self.page_size)
        with explain_shortage(self.ctx):
            self.model = load_class(model)(self.ctx)
            self._load_weights()

        # ---- memory profiling, attention: before the pool takes the rest ------------------------------------
        sizes = capture_sizes(config, self.plan)
        reserve = profile_memory(config, self.ctx, self.plan, backends, self.model, sizes)
        attn = AttentionDispatcher(observed.build_attention())
        self.attn_backend = self.ctx.attn = self._close_at_end(attn)

        # ---- the pool, the device state, sampling ----------------------------------------------------------
        kv_heads = backends.kv_heads
        self.num_pages = count_pages(config, self.ctx, self.page_size, kv_heads, self.dtype, reserve)
        context = self._close_at_end(
            DeviceContext(config, self.ctx, self.model, self.attn_backend, self.num_pages, self.page_size, kv_heads)
        )
        self.kv_cache, self.state, self.inputs = context.pool, context.state, context.inputs
        self.sampler, self.stepper = context.sampler, context.stepper
        self.page_table = self.state.page_table
        self._needs_finite_tail = any(choice.finite_tail for choice in self.plan.choices("attention"))
        self._run_step: Callable[[Batch], StepOutput] = self.stepper.step
        if self.observer is not None:
            self.observer.bind(self.kv_cache, self.inputs.view_in_pages)
            self._needs_finite_tail |= self.observer.needs_finite_tail
            self._run_step = observed_step(self.stepper.step, self.observer)

        # ---- graphs ----------------------------------------------------------------------------------------
        self._host_tokens = [
            (self.platform.empty_pinned((self.max_running_req + 1,), torch.int32), self.platform.new_event())
            for _ in range(OUTPUT_DEPTH)
        ]
        self._turn = 0
        if sizes:
            self.attn_backend.init_capture_graph(self.max_seq_len, sizes)
        self.graph_runner = self._close_at_end(
            build(self.plan.choice("graph"), backends.graph_setup(self.stepper, sizes))
        )
        self.memory = self._capture(reserve)
        logger.info("engine ready: %s pages of %s tokens, plan %s", self.num_pages, self.page_size, self.plan.digest())

    def _close_at_end(self, thing: T) -> T:
        """Return ``thing``, and close it at shutdown, before everything that was built earlier."""
        self._closing.callback(thing.close)
        return thing

    def _capture(self, reserve: Reserve) -> MemoryUse:
        """Capture the graphs, and compare the memory that they use with the memory reserved for them."""
        measured = isinstance(self.platform, MemoryGauge)
        before = self.platform.free_bytes() if measured else 0
        self.graph_runner.capture()
        after = self.platform.free_bytes() if measured else 0
        taken, left = (max(0, before - after), after) if measured else (None, None)
        use = MemoryUse(reserve, self.kv_cache.num_bytes, taken, left)
        if measured:
            logger.info("device memory: %s", use)
        use.warn_if_short()
        return use

    def _make_observer(self, backends: BackendFactory) -> Observer | None:
        if self.config.observer is None:
            return None
        engine = ObservedEngine(self.config, self.plan, self.model_config, backends)
        return self._close_at_end(self.config.observer(engine))

    def _make_context(self, backends: BackendFactory) -> Context:
        kv = self._close_at_end(backends.build_kv())
        ops = self._close_at_end(backends.build_ops(kv, self.comm))
        linear, fused = backends.build_linear()
        moe = backends.build_moe()
        return Context(
            config=self.model_config,
            tp=self.tp,
            device=self.device,
            dtype=self.dtype,
            platform=self.platform,
            comm=self.comm,
            kv=kv,
            ops=ops,
            linear=self._close_at_end(linear),
            fused=fused,
            moe=None if moe is None else self._close_at_end(moe),
            max_seq_len=self.max_seq_len,
            max_tokens=self.config.max_prefill_tokens,
        )

    def _load_weights(self) -> None:
        if self.config.dummy_weights:
            generator = torch.Generator(device=self.device).manual_seed((self.config.seed + self.tp.rank) % 2**64)
            for target in self.model.weight_targets("", frozenset()):
                target.storage.normal_(0.0, 0.02, generator=generator)
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
                targets = self.model.weight_targets("", source.names())
                unused = ("lm_head.weight",) if tied else ()
                report = load_weights(
                    targets, source, progress=self.config.progress and self.tp.is_primary, unused=unused
                )
            finally:
                source.close()
            if self.tp.is_primary and (note := dequantised(self.model_config, self.plan.dtype, report.num_bytes)):
                warn_once(note)
        self.model.finish()

    # One pass.

    def forward_batch(self, batch: Batch, mode: SamplingMode) -> ForwardOutput:
        """One whole pass: :meth:`launch` and :meth:`finish`."""
        return self.finish(batch, self.launch(batch, mode))

    def launch(self, batch: Batch, mode: SamplingMode) -> StepOutput:
        """Launch the step of ``batch``: it samples every row from the model's own logits (B, V). Returns before the
        device is done. Calls ``complete_one`` on each Req.
        """
        batch.mode = mode
        with torch.inference_mode():  # as a decorator it would be one more frame of every step
            if not batch.padded_size:
                self.graph_runner.pad_batch(batch)
            if batch.is_decode and self.graph_runner.can_replay(batch):
                self.inputs.upload_decode(batch)
                out: StepOutput = self.graph_runner.replay(batch)
            else:
                if batch.view is None:
                    self.attn_backend.prepare_metadata(batch)
                else:
                    self.state.refresh(batch)
                out = self._run_step(batch)
            if batch.size != out.next_tokens.shape[0]:
                out = StepOutput(out.logits[: batch.size], out.next_tokens[: batch.size])
        if batch.is_decode:
            self.state.advance_host(batch)
        batch.complete_one()
        return out

    def finish(self, batch: Batch, step: StepOutput) -> ForwardOutput:
        """Postprocess the step of ``batch``, which was launched last, and copy its tokens to the host.

        The Reqs must have all tokens of earlier passes on the host: penalties read them.
        """
        tokens, logprob_rows, prompt_scores = step.next_tokens, None, None
        if batch.scored is not None or self.sampler.needs_postprocessing:
            tokens, logprob_rows, prompt_scores = self._postprocess(batch, step)
        buffer, copied = self._host_tokens[self._turn]
        self._turn = (self._turn + 1) % OUTPUT_DEPTH
        host = buffer[: batch.size]
        host.copy_(tokens, non_blocking=True)
        copied.record()
        return ForwardOutput(tokens, host, step.logits, copied, logprob_rows, prompt_scores)

    @torch.inference_mode()
    def _postprocess(
        self, batch: Batch, step: StepOutput
    ) -> tuple[torch.Tensor, LogprobRows | None, PromptScores | None]:
        prompt_scores = None if batch.scored is None else self.stepper.score_prompts(batch)
        if not self.sampler.needs_postprocessing:
            return step.next_tokens, None, prompt_scores
        return *self.stepper.postprocess_logits(step.logits, step.next_tokens, batch), prompt_scores

    def distrust(self, pages: np.ndarray | None = None) -> None:
        """Free pages (N,) int32 may hold NaN; None: all may, if a pass has run. Where attention needs the unused tail
        of a page finite, they are zeroed before a later pass may use them.
        """
        if not self._needs_finite_tail:
            return
        if pages is None:
            pages = np.arange(self.num_pages if self.state.has_run else 0, dtype=np.int32)
        self.kv_cache.zero_pages(pages)

    def shutdown(self) -> None:
        """Free graphs, pool, backends and connections, in this order. Calling it twice is harmless.

        What fails to close does not keep the rest from being closed; it is raised at the end.
        """
        closing, self._closing = self._closing, ExitStack()
        if hasattr(self, "platform"):
            closing.callback(self.platform.synchronize)
        if hasattr(self, "ctx"):
            self.ctx.pool = self.ctx.attn = None
        closing.callback(self._forget)  # runs first, so that the platform, closed last, finds the memory unused
        closing.close()

    def _forget(self) -> None:
        for name in _FORGOTTEN:
            setattr(self, name, None)
        self._host_tokens = []
