"""The arithmetic of the roles in float64, written from the definitions, independent of any backend.

Shapes: M new tokens, N total tokens, H query heads, K kv heads, D head_dim.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from minisgl_core.plugin_api import LayerFacts

__all__ = ["attention", "experts", "experts_slack", "product_slack", "silu_mul_slack"]

_ROWS_AT_ONCE = 512
_SILU_SLOPE = 1.1
"""The largest slope of silu: 1.0998, at 2.4."""


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, facts: LayerFacts) -> torch.Tensor:
    """Attention of the last M of N positions of one sequence.

    q (M, H, D), k and v (N, K, D) -> float64 (M, H, D). Query head h reads kv head h // (H / K). Position i sees the
    keys up to i, or the last ``window`` of those. Scores are scaled, then softcapped: c * tanh(s / c).
    """
    new, heads, _ = q.shape
    total, kv_heads, _ = k.shape
    out = torch.empty(q.shape, dtype=torch.float64, device=q.device)
    keys = torch.arange(total, device=q.device)
    for head in range(heads):
        own = head // (heads // kv_heads)
        one_k, one_v = k[:, own].to(torch.float64), v[:, own].to(torch.float64)
        for begin in range(0, new, _ROWS_AT_ONCE):
            end = min(begin + _ROWS_AT_ONCE, new)
            scores = q[begin:end, head].to(torch.float64) @ one_k.T * facts.scale
            if facts.softcap is not None:
                scores = facts.softcap * torch.tanh(scores / facts.softcap)
            at = torch.arange(total - new + begin, total - new + end, device=q.device)[:, None]
            hidden = keys > at
            if facts.window is not None:
                hidden |= keys < at - facts.window + 1
            out[begin:end, head] = scores.masked_fill(hidden, -torch.inf).softmax(-1) @ one_v
    return out


def experts(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor
) -> torch.Tensor:
    """Routed experts, one by one.

    x (T, N), ids and weights (T, k), w13 (E, 2I, N) gate rows first, w2 (E, N, I) -> float64 (T, N). Expert e computes
    w2 @ (silu(gate) * up); an id of -1 contributes nothing.
    """
    out = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for expert in range(len(w13)):
        tokens, choices = (ids == expert).nonzero(as_tuple=True)
        if len(tokens):
            gate, up = (x[tokens].to(torch.float64) @ w13[expert].to(torch.float64).T).chunk(2, -1)
            y = (gate / (1 + torch.exp(-gate)) * up) @ w2[expert].to(torch.float64).T
            out.index_add_(0, tokens, y * weights[tokens, choices, None].to(torch.float64))
    return out


# The allowed error of a lossy backend. Its tolerance is |y - y64| / (|x| |W|^T) of one product.


def product_slack(x: torch.Tensor, weight: torch.Tensor, tolerance: float) -> torch.Tensor:
    """The allowed error of a product: x (M, K), weight (N, K) -> float64 (M, N)."""
    return tolerance * (x.to(torch.float64).abs() @ weight.to(torch.float64).abs().T)


def silu_mul_slack(product: torch.Tensor, slack: torch.Tensor | float) -> torch.Tensor:
    """The allowed error of silu(gate) * up, float64 (M, I), if ``product`` (M, 2I), gate first, may be off by
    ``slack``.
    """
    gate, up = product.to(torch.float64).chunk(2, -1)
    of_gate, of_up = (torch.zeros_like(product, dtype=torch.float64) + slack).chunk(2, -1)
    silu = gate / (1 + torch.exp(-gate))
    return _SILU_SLOPE * of_gate * (up.abs() + of_up) + silu.abs() * of_up


def experts_slack(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    tolerance: float,
) -> torch.Tensor:
    """The allowed error of :func:`experts` with this tolerance in both products: float64 (T, N)."""
    out = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for expert in range(len(w13)):
        tokens, choices = (ids == expert).nonzero(as_tuple=True)
        if len(tokens):
            product = x[tokens].to(torch.float64) @ w13[expert].to(torch.float64).T
            off = silu_mul_slack(product, product_slack(x[tokens], w13[expert], tolerance))
            gate, up = product.chunk(2, -1)
            size = (gate / (1 + torch.exp(-gate)) * up).abs() + off
            y = off @ w2[expert].to(torch.float64).abs().T + product_slack(size, w2[expert], tolerance)
            out.index_add_(0, tokens, y * weights[tokens, choices, None].to(torch.float64))
    return out
