"""What an engine builds once it knows the size of its KV pool, from the pool to the step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from minisgl_core.core import SamplingParams
from minisgl_core.kvcache.pool import PagedKVPool

from .inputs import BatchInputs
from .logits_processors import LogitsProcessor
from .masks import TokenMasks
from .sampler import Sampler, pack_params
from .state import DecodeState
from .step import Stepper

if TYPE_CHECKING:
    from minisgl_core.core import Context

    from .config import EngineConfig
    from .dispatch import AttentionDispatcher

__all__ = ["DeviceContext"]


class DeviceContext:
    """Pool, device state, sampler and step, bound to model and attention. A later context replaces an earlier one.

    ``kv_heads``: this rank's.
    """

    def __init__(
        self,
        config: EngineConfig,
        ctx: Context,
        model: Any,
        attn: AttentionDispatcher,
        num_pages: int,
        page_size: int,
        kv_heads: int,
    ) -> None:
        c = ctx.config
        self.pool = PagedKVPool(c.num_layers, num_pages, page_size, kv_heads, c.head_dim, ctx.dtype, ctx.device)
        width = -(-ctx.max_seq_len // page_size) * page_size
        self.state = DecodeState(
            ctx.platform,
            config.max_running_req,
            width,
            page_size,
            self.pool.dummy_slot,
            config.max_prefill_tokens,
            pack_params(SamplingParams(), seed=0),
        )
        self.inputs = BatchInputs(self.state, ctx.max_seq_len, self.pool.dummy_slot)
        ctx.pool = self.pool
        model.bind_kv()
        attn.bind(self.pool, self.inputs)
        comm = ctx.comm if ctx.tp.size > 1 else None
        masks = TokenMasks(c.vocab_size, ctx.device, comm, ctx.tp.is_primary, ctx.dtype)
        processor = LogitsProcessor(ctx.platform, c.vocab_size, config.max_running_req, width, masks)
        self.sampler = Sampler(ctx.ops, self.state, processor, config.seed)
        self.stepper = Stepper(model, attn, self.sampler, self.state, self.pool)

    def close(self) -> None:
        """Drop pool and device state. Model and attention release them when they are bound again, or closed."""
        self.pool.close()
        self.state.close()
