"""Model families. A model is built as ``Class(ctx)`` and run as ``forward(batch) -> logits``."""

from .decoder import DecoderForCausalLM

__all__ = ["DecoderForCausalLM"]
