"""What all fakes compute, by its definition, in float64: attention of the last tokens of paged sequences.

Each is one operation of torch's, so that a recorded step holds it as a real graph holds the vendor's kernel: a replay
reads lengths and pages from device tensors again and nothing from the host.

By hand: one query q = [1, 0] over the keys [1, 0] and [0, 1] with scale ln(3) has the scores ln 3 and 0, so the weights
3/4 and 1/4; over the values [4, 0] and [0, 8] it gives [3, 2], and its logsumexp is ln(3 + 1) = ln 4.

Shapes: T tokens, B rows, M query tokens and N keys of a row, H query heads, K kv heads, D head_dim, P pages of a row,
S page_size.
"""

from __future__ import annotations

import torch

from minisgl_core.plugin_api import KernelLibrary

from .checks import require

__all__ = ["attend", "paged_attention", "planned_attention"]

_library = KernelLibrary("minisgl_fakes")


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, left: int, right: int, softcap: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of q (M, H, D) at the last M of N positions to k and v (N, K, D).

    Returns float64 (M, H, D) and logsumexp (M, H). Position i sees the keys i-left..i+right; -1 = no limit. A query
    that sees no key gives 0 and -inf.
    """
    new, heads, _ = q.shape
    total, kv_heads, _ = k.shape
    k, v = (x.double().repeat_interleave(heads // kv_heads, dim=1) for x in (k, v))
    scores = torch.einsum("ihd,jhd->ihj", q.double(), k) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    i, j = torch.arange(total - new, total)[:, None], torch.arange(total)[None, :]
    hidden = torch.zeros(new, total, dtype=torch.bool)
    if left >= 0:
        hidden |= j < i - left
    if right >= 0:
        hidden |= j > i + right
    scores = scores.masked_fill(hidden[:, None, :], -torch.inf)
    weights = scores.softmax(-1).masked_fill(hidden.all(1)[:, None, None], 0)
    return torch.einsum("ihj,jhd->ihd", weights, v), scores.logsumexp(-1)


def _rows(cache: torch.Tensor, pages: list[int], length: int) -> torch.Tensor:
    """(length, K, D): the first tokens of these pages of a (P + 1, S, K, D) cache, and nothing past them."""
    bad = [page for page in pages if not 0 <= page < cache.shape[0]]
    require(not bad, f"pages {bad[:4]} are outside the cache of {cache.shape[0]} pages")
    return cache[pages].flatten(0, 1)[:length]


def _paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    cu_q: torch.Tensor,
    kv_lens: torch.Tensor,
    page_table: torch.Tensor,
    max_q: int,
    scale: float,
    left: int,
    right: int,
    softcap: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    out = q.new_zeros(q.shape)
    lse = q.new_full((q.shape[1], q.shape[0]), -torch.inf, dtype=torch.float32)
    starts, size, width = cu_q.tolist(), k_cache.shape[1], page_table.shape[1]
    require(starts[0] == 0 and starts[-1] == q.shape[0], f"cu_seqlens_q ends at {starts[-1]}, q has {q.shape[0]} rows")
    for row, length in enumerate(kv_lens.tolist()):
        tokens = slice(starts[row], starts[row + 1])
        new = starts[row + 1] - starts[row]
        require(0 <= new <= max_q, f"row {row} has {new} queries, max_seqlen_q is {max_q}")
        require(length <= width * size, f"row {row} has {length} tokens, its page table has room for {width * size}")
        pages = page_table[row, : -(-length // size)].tolist()
        k, v = _rows(k_cache, pages, length), _rows(v_cache, pages, length)
        result, sums = attend(q[tokens], k, v, scale, left, right, softcap)
        out[tokens], lse[:, tokens] = result.to(q.dtype), sums.T.float()
    return out, lse


paged_attention = _library.register(
    "paged_attention(Tensor q, Tensor k_cache, Tensor v_cache, Tensor cu_q, Tensor kv_lens, Tensor page_table, "
    "int max_q, float scale, int left, int right, float softcap) -> (Tensor, Tensor)",
    _paged_attention,
)
"""q (T, H, D), caches (P, S, K, D), cu_q (B+1), kv_lens (B), page_table (B, P) -> new (T, H, D), logsumexp (H, T)."""


def _planned_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    plan: torch.Tensor,
    indptr: torch.Tensor,
    pages: torch.Tensor,
    last_page_len: torch.Tensor,
    scale: float,
    causal: bool,
    left: int,
    softcap: float,
    out: torch.Tensor,
    lse: torch.Tensor | None,
) -> None:
    size, begins, lasts = k_cache.shape[1], indptr.tolist(), last_page_len.tolist()
    rows = int(plan[0])
    require(rows == len(lasts), f"the plan in the workspace is for {rows} rows, the page list for {len(lasts)}")
    starts, planned = plan[1 : rows + 2].tolist(), plan[rows + 2 : 2 * rows + 2].tolist()
    require(starts[-1] == q.shape[0], f"the plan is for {starts[-1]} query tokens, q has {q.shape[0]}")
    for row in range(rows):
        tokens = slice(starts[row], starts[row + 1])
        own = pages[begins[row] : begins[row + 1]].tolist()
        # A kernel visits the planned pages, so a stale plan misses the newer ones.
        length = min((len(own) - 1) * size + lasts[row], planned[row] * size)
        k, v = _rows(k_cache, own, length), _rows(v_cache, own, length)
        result, sums = attend(q[tokens], k, v, scale, left, 0 if causal else -1, softcap)
        out[tokens] = result.to(out.dtype)
        if lse is not None:
            lse[tokens] = (sums / torch.log(torch.tensor(2.0, dtype=torch.float64))).float()


planned_attention = _library.register(
    "planned_attention(Tensor q, Tensor k_cache, Tensor v_cache, Tensor plan, Tensor indptr, Tensor pages, "
    "Tensor last_page_len, float scale, bool causal, int left, float softcap, Tensor(a!) out, Tensor(b!)? lse) -> ()",
    _planned_attention,
)
"""As :func:`paged_attention`, from FlashInfer's page list and a plan: int32 [B, query prefix sum (B+1), pages planned
per row (B)]. Fills out (T, H, D) and, if given, lse (T, H) in base 2."""
