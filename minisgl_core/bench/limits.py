"""The hardware limit: each pass must read its weights, keys and values, and do its multiplications.

The limit of a pass is the larger of bytes over memory bandwidth and operations over the matrix rate, both measured on
this device. Attention's own multiplications and activations are left out; experts are assumed to be drawn uniformly. In
the last layer, prompt tokens that produce no token need only their keys and values.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from minisgl_core.modelconfig import ModelConfig
    from minisgl_core.plugin_api import Platform

__all__ = ["Ceilings", "PassFacts", "measure_ceilings", "pass_seconds"]


class PassFacts(NamedTuple):
    """One pass: new tokens, rows that need logits, and tokens of context that its rows read."""

    is_decode: bool
    tokens: int
    rows: int
    context: int


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Measured rates of one device."""

    bytes_per_s: float
    """Bytes per second read and written by a large copy."""
    flops_per_s: float
    """Rate of a large square product in the compute dtype. On a CPU the rate in float32 if that is higher: torch
    multiplies half-precision numbers slowly there, and they can be widened.
    """


def measure_ceilings(platform: Platform, dtype: torch.dtype) -> Ceilings:
    """Measure the ceilings, which takes about a second. The best of several measurements counts, not their mean."""
    on_cpu = platform.device.type == "cpu"
    elements, side = (1 << 24, 1024) if on_cpu else (1 << 31, 8192)
    source = torch.ones(elements, dtype=torch.uint8, device=platform.device)
    target = torch.empty_like(source)
    copy = _best_seconds(platform, partial(target.copy_, source))
    a, b = (torch.randn(side, side, device=platform.device) for _ in range(2))
    dtypes = {dtype, torch.float32} if on_cpu else {dtype}
    product = min(_best_seconds(platform, partial(torch.matmul, a.to(kind), b.to(kind))) for kind in dtypes)
    return Ceilings(2 * elements / copy, 2 * side**3 / product)


def _best_seconds(platform: Platform, call: Callable[[], object], repeats: int = 5) -> float:
    times = []
    for _ in range(repeats):
        platform.synchronize()
        begin = time.perf_counter()
        call()
        platform.synchronize()
        times.append(time.perf_counter() - begin)
    return min(times)


def pass_seconds(model: ModelConfig, facts: PassFacts, ceilings: Ceilings, item_bytes: int, ranks: int = 1) -> float:
    """The shortest possible time of one pass, distributed over ``ranks`` devices."""
    keys_and_values = 2 * model.num_kv_heads * model.head_dim * model.hidden_size
    queries_and_output = 2 * model.num_q_heads * model.head_dim * model.hidden_size
    head = model.vocab_size * model.hidden_size
    read: float = head + model.num_layers * (keys_and_values + queries_and_output)
    multiplied: float = head * facts.rows + model.num_layers * keys_and_values * facts.tokens
    for layer in range(model.num_layers):
        tokens = facts.rows if layer == model.num_layers - 1 else facts.tokens
        weights, used = _feed_forward(model, layer, tokens)
        read += weights
        multiplied += (queries_and_output + used) * tokens
    kv = 2 * model.num_layers * model.num_kv_heads * model.head_dim * (facts.context + facts.tokens)
    seconds = max((read + kv) * item_bytes / ceilings.bytes_per_s, 2 * multiplied / ceilings.flops_per_s)
    return seconds / ranks


def _feed_forward(model: ModelConfig, layer: int, tokens: int) -> tuple[float, float]:
    """(weights that ``tokens`` tokens read, weights that each of them is multiplied with)."""
    moe = model.moe
    if moe is None or layer not in moe.layers:
        dense = 3 * model.intermediate_size * model.hidden_size
        return dense, dense
    expert = 3 * moe.intermediate_size * model.hidden_size
    shared = 3 * moe.shared_intermediate_size * model.hidden_size
    touched = moe.num_experts * (1 - (1 - moe.top_k / moe.num_experts) ** tokens)
    return touched * expert + shared, moe.top_k * expert + shared
