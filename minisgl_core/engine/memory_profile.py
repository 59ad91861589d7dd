"""Memory profiling: how much of the device passes and graphs take, measured before the KV pool gets the rest.

The largest passes and a few graphs run on a pool of one page. They have attention backends of their own, so that the
serving ones are bound, planned and captured once. Every rank does the same work in the same order, so that the model's
collectives meet.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import torch

from minisgl_core.core import Batch, Req, SamplingParams
from minisgl_core.core.sampling_params import MAX_LOGPROBS
from minisgl_core.errors import EngineError
from minisgl_core.kvcache.pool import PagedKVPool
from minisgl_core.plugin_api import Grammar, MemoryGauge
from minisgl_core.registry import build

from .capacity import format_bytes
from .device_context import DeviceContext
from .dispatch import AttentionDispatcher
from .memory import Reserve

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from minisgl_core.core import Context
    from minisgl_core.plugin_api import Phase, SamplingMode, StepOutput
    from minisgl_core.registry import Plan

    from .backend_factory import BackendFactory
    from .config import EngineConfig

__all__ = ["estimate_graphs", "longest_rows", "profile_memory", "spread", "worst_case_params"]

PROFILED_SIZES = 5
"""Graphs of the largest size show how much memory all graphs share, the others how much each one adds. Several are
needed, because memory is allocated in blocks.
"""

SAMPLED_ALIKE: Final[dict[SamplingMode, SamplingParams]] = {
    "greedy": SamplingParams(max_tokens=1),
    "random": SamplingParams(max_tokens=1, temperature=1.0),
    "filtered": SamplingParams(max_tokens=1, temperature=1.0, top_k=2),
}
"""By mode: parameters of a request that is sampled in it"""


def profile_memory(
    config: EngineConfig, ctx: Context, plan: Plan, backends: BackendFactory, model: Any, sizes: Sequence[int]
) -> Reserve:
    """Run the largest passes, capture graphs of some of the ``sizes``, and give all their memory back.

    Nothing runs and nothing is reserved where the pool's size is given or the platform is no :class:`MemoryGauge`.
    Raises :class:`EngineError` if the device's memory does not even suffice for this.
    """
    if config.num_page_override is not None or not isinstance(ctx.platform, MemoryGauge):
        return Reserve()
    free = ctx.platform.free_bytes()
    try:
        return _MemoryProfile(config, ctx, plan, backends, sizes).run(model)
    except torch.OutOfMemoryError as error:
        raise EngineError(
            f"a pass of {config.max_prefill_tokens} tokens or graphs of {max(sizes, default=0)} rows need more than the"
            f" {format_bytes(free)} that are free after loading: {str(error).splitlines()[0]}",
            field="max_prefill_tokens",
            value=config.max_prefill_tokens,
            remedy="lower `max_prefill_tokens`, `max_running_req` or `cuda_graph_max_bs`",
        ) from error
    finally:
        ctx.pool = None


class _MemoryProfile:
    """One run of the profile: everything that it builds is freed when :meth:`run` returns."""

    def __init__(
        self, config: EngineConfig, ctx: Context, plan: Plan, backends: BackendFactory, sizes: Sequence[int]
    ) -> None:
        self._config, self._ctx, self._plan, self._backends, self._sizes = config, ctx, plan, backends, sizes

    @torch.inference_mode()
    def run(self, model: Any) -> Reserve:
        ctx, plan, kv_heads = self._ctx, self._plan, self._backends.kv_heads
        with ExitStack() as closing:
            attn = AttentionDispatcher(self._backends.build_attention())
            closing.callback(attn.close)
            before = ctx.platform.free_bytes()
            context = DeviceContext(self._config, ctx, model, attn, 1, plan.page_size, kv_heads)
            closing.callback(context.close)
            if self._sizes:
                attn.init_capture_graph(ctx.max_seq_len, tuple(self._sizes))
            c = ctx.config
            pool = 2 * PagedKVPool.bytes_per_page(c.num_layers, plan.page_size, kv_heads, c.head_dim, ctx.dtype)
            tables = max(0, before - ctx.platform.free_bytes() - pool)
            assert isinstance(ctx.platform, MemoryGauge)
            passes = ctx.platform.peak_bytes(lambda: self._passes(context, attn))
            graphs, num_graphs = self._capture(context, closing) if self._sizes else (0, 0)
            return Reserve(tables, passes, graphs, num_graphs)

    def _passes(self, context: DeviceContext, attn: AttentionDispatcher) -> None:
        """The largest eager passes of both phases: the most rows and tokens, each row at the longest context.

        Under overlap scheduling the logits of one pass are still alive while the next one runs. Attention may need most
        memory for many short extensions, as in chats, so they are a pass of their own. Smaller prefills need no more
        memory; they run because kernels are compiled per size, and no request should wait for a compiler.
        """
        config, longest = self._config, self._ctx.max_seq_len - 1
        rows, tokens = config.max_running_req, config.max_prefill_tokens
        kept = self._pass(context, attn, "decode", (1,) * rows)
        self._pass(context, attn, "prefill", longest_rows(tokens, rows, longest))
        self._pass(context, attn, "prefill", longest_rows(tokens, rows, longest), self._scored_params())
        self._pass(context, attn, "prefill", (min(longest, max(1, tokens // rows)),) * min(rows, tokens))
        del kept
        for exponent in range(min(tokens, longest).bit_length()):
            self._pass(context, attn, "prefill", (2**exponent,))
        # Processed logits are sampled in float32, by other kernels in each mode.
        for params in SAMPLED_ALIKE.values():
            self._pass(context, attn, "prefill", (1,), params)
            self._pass(context, attn, "prefill", (1,), replace(params, repetition_penalty=2.0))

    def _scored_params(self) -> SamplingParams:
        """:func:`worst_case_params` with a scored prompt."""
        params = worst_case_params(self._ctx.config.vocab_size)
        return replace(params, prompt_logprobs=params.logprobs)

    def _pass(
        self,
        context: DeviceContext,
        attn: AttentionDispatcher,
        phase: Phase,
        lens: Sequence[int],
        params: SamplingParams | None = None,
    ) -> StepOutput:
        """One pass: the last chunks, of ``lens`` tokens, of prompts of the greatest length. ``params`` None: those of
        :func:`worst_case_params` for every row.
        """
        longest = self._ctx.max_seq_len - 1
        prompt, params = (
            torch.zeros(longest, dtype=torch.int32),
            params or worst_case_params(self._ctx.config.vocab_size),
        )
        reqs = [Req(prompt, row, longest - n, 1, row, params) for row, n in enumerate(lens)]
        for req in reqs:
            if params.prompt_logprobs is None:
                req.prompt_len = 0  # all of it counts as output, which some penalties look at alone
        batch = Batch(reqs=reqs, phase=phase)
        batch.mode = context.sampler.prepare(batch)
        attn.prepare_metadata(batch)  # unset rows of the page table name slot 0 for every token
        out = context.stepper.step(batch)
        context.stepper.score_prompts(batch)
        context.stepper.postprocess_logits(out.logits, out.next_tokens, batch)
        return out

    def _capture(self, context: DeviceContext, closing: ExitStack) -> tuple[int, int]:
        """(bytes that all graphs will take, their number)"""
        platform = self._ctx.platform
        setup = self._backends.graph_setup(context.stepper, spread(self._sizes, PROFILED_SIZES))
        free = [platform.free_bytes()]

        def started(title: str, total: int) -> Callable[[], None]:
            return lambda: free.append(platform.free_bytes())

        runner = build(self._plan.choice("graph"), replace(setup, progress=started))
        closing.callback(runner.close)
        runner.capture()
        platform.synchronize()
        modes, made = len(setup.modes), len(setup.modes) * len(setup.bs_list)
        if len(free) != made + 1:  # the runner reports no progress
            free = [free[0], platform.free_bytes()]
        total = modes * len(self._sizes)
        return estimate_graphs(free, modes, made, total), total


def worst_case_params(vocab_size: int) -> SamplingParams:
    """Sampling parameters that need the most memory: every logits processor and log-probabilities at once."""
    return SamplingParams(
        temperature=1.0,
        top_k=2,
        max_tokens=1,
        repetition_penalty=2.0,
        presence_penalty=1.0,
        frequency_penalty=1.0,
        logit_bias={0: 1.0},
        grammar=Grammar.json_object(),
        logprobs=min(MAX_LOGPROBS, vocab_size),
    )


def longest_rows(tokens: int, rows: int, longest: int) -> tuple[int, ...]:
    """Lengths of at most ``rows`` rows with at most ``tokens`` in all: the first rows as long as possible, the rest 1.

    Such a pass has both extremes, the longest row and the most rows of logits.
    """
    lens, left = [], tokens
    for after in range(min(rows, tokens) - 1, -1, -1):
        lens.append(min(longest, left - after))
        left -= lens[-1]
    return tuple(lens)


def spread(sizes: Sequence[int], most: int) -> tuple[int, ...]:
    """At most ``most`` (2 or more) of the ``sizes``, ascending: the largest, the smallest and some in between."""
    last = len(sizes) - 1
    places = range(last + 1) if last < most else (round(last * n / (most - 1)) for n in range(most))
    return tuple(sizes[place] for place in places)


def estimate_graphs(free: Sequence[int], modes: int, made: int, total: int) -> int:
    """Bytes of ``total`` graphs, from the free memory before the first of ``made`` graphs and after each.

    ``modes`` graphs of the largest size come first. With only two readings every graph counts the same.
    """
    if len(free) == 2 and made > 1:
        return max(0, free[0] - free[1]) * total // made
    shared = 1 if made == modes else modes  # graphs during which the shared memory may have grown
    first = max(0, free[0] - free[shared])
    others = max(0, free[shared] - free[-1])
    return first + (others * (total - shared) // (made - shared) if made > shared else 0)
