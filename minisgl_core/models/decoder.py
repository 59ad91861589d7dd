"""The pre-norm decoder that Llama, Qwen2, Qwen3, Mistral and the Qwen mixtures of experts share.

What differs between them is in ``ModelConfig``: biases, q/k norms, rope, windows, which layers are sparse.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from minisgl_core.layers import (
    Attention,
    DenseMLP,
    Layer,
    LMHead,
    OpList,
    RMSNorm,
    SparseMLP,
    VocabEmbedding,
    rotary_table,
)

if TYPE_CHECKING:
    from minisgl_core.core import Batch, Context

__all__ = ["Decoder", "DecoderForCausalLM", "DecoderLayer"]


class DecoderLayer(Layer):
    """A pre-norm transformer block.

    Its summand is returned next to the residual: the next norm adds the two, after an all-reduce over the ranks.
    """

    def __init__(self, ctx: Context, layer_id: int, cos_sin: torch.Tensor) -> None:
        c = ctx.config
        sparse = c.moe is not None and layer_id in c.moe.layers
        self._begins_residual = layer_id == 0
        self.self_attn = Attention(ctx, layer_id, cos_sin)
        self.mlp = SparseMLP(ctx, layer_id) if sparse else DenseMLP(ctx, c.intermediate_size, c.mlp_bias)
        self.input_layernorm = RMSNorm(ctx, c.hidden_size, c.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(ctx, c.hidden_size, c.rms_norm_eps)

    def finish(self) -> None:
        super().finish()
        if not self._begins_residual:  # a fused norm adds, and the first one has nothing to add
            self.self_attn.fuse_norm(self.input_layernorm)
        self.mlp.fuse_norm(self.post_attention_layernorm)

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None, batch: Batch, rows: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x (T, hidden): the previous block's summand, not yet added -> (this block's summand, residual).

        ``rows`` (B,): the only tokens whose result is needed; the keys and values of all are stored.
        """
        x, residual = self.input_layernorm.forward_add(x, residual)
        x, residual = self.self_attn.forward(x, residual, batch, rows)
        x, residual = self.post_attention_layernorm.forward_add(x, residual)
        return self.mlp.forward(x, residual)


class Decoder(Layer):
    """Embedding, layers, final norm."""

    def __init__(self, ctx: Context) -> None:
        c = ctx.config
        cos_sin = rotary_table(c.rope, ctx.max_seq_len, ctx.device)
        self.embed_tokens = VocabEmbedding(ctx, c.vocab_size, c.hidden_size)
        self.layers = OpList(DecoderLayer(ctx, i, cos_sin) for i in range(c.num_layers))
        self.norm = RMSNorm(ctx, c.hidden_size, c.rms_norm_eps)

    def forward(self, batch: Batch) -> torch.Tensor:
        """-> (B, hidden): the normalised state of each row's last token."""
        assert batch.input_ids is not None
        x, residual = self.embed_tokens.forward(batch.input_ids), None
        *layers, last = self.layers.op_list
        for layer in layers:
            x, residual = layer.forward(x, residual, batch)
        # No later layer reads the prompt's other tokens: most products of the last layer have B rows, not T.
        scored = batch.scored
        x, residual = last.forward(x, residual, batch, batch.last_rows if scored is None else scored.kept)
        hidden = self.norm.forward_add(x, residual)[0]
        if scored is None:
            return hidden
        scored.hidden = hidden
        return hidden.index_select(0, scored.last)


class DecoderForCausalLM(Layer):
    """A decoder with its head."""

    def __init__(self, ctx: Context) -> None:
        c = ctx.config
        self.model = Decoder(ctx)
        tied = self.model.embed_tokens if c.tie_word_embeddings else None
        self.lm_head = LMHead(ctx, c.vocab_size, c.hidden_size, tied)

    def tie_head(self, tied: bool) -> None:
        """Whether the head shares the embedding's weights: what the checkpoint holds decides, not its config."""
        if tied:
            self.lm_head.tie(self.model.embed_tokens)
        else:
            self.lm_head.untie()

    def bind_kv(self) -> None:
        """The KV pool is allocated."""
        for layer in self.model.layers.op_list:
            layer.self_attn.bind_kv()

    def forward(self, batch: Batch) -> torch.Tensor:
        """-> logits (B, vocab), one row per Req, the same on every rank."""
        return self.logits(self.model.forward(batch))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden (N, hidden) -> (N, vocab)"""
        return self.lm_head.forward(hidden)
