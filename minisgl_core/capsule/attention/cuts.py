"""Cuts: smaller attention capsules made from larger ones.

Every cut leaves a consistent capsule: recorded results that it makes meaningless are replaced by the reference's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from .capsule import AttentionCapsule, AttentionLayer

__all__ = ["compact", "with_kv_heads", "with_rows", "without_pages", "without_queries", "without_tail"]


def with_rows(capsule: AttentionCapsule, rows: Sequence[int]) -> AttentionCapsule:
    """Keep only these of the real rows, and no padding."""
    tokens = torch.cat([torch.arange(*_span(capsule, row)) for row in rows])
    kv_lens = tuple(capsule.kv_lens[row] for row in rows)
    smaller = replace(
        capsule,
        q_lens=tuple(capsule.q_lens[row] for row in rows),
        kv_lens=kv_lens,
        uids=tuple(capsule.uids[row] for row in rows),
        page_ids=capsule.page_ids[list(rows), : -(-max(kv_lens) // capsule.geometry.page_size)],
        positions=capsule.positions[tokens],
        out_loc=capsule.out_loc[tokens],
        layers=tuple(_take_tokens(layer, tokens) for layer in capsule.layers),
    )
    return compact(smaller)


def with_kv_heads(capsule: AttentionCapsule, heads: Sequence[int]) -> AttentionCapsule:
    """Keep only these kv heads, each with the query heads that read it."""
    g = capsule.geometry
    ratio = g.q_heads // g.kv_heads
    queries = [head * ratio + place for head in heads for place in range(ratio)]
    layers = tuple(
        replace(
            layer,
            q=layer.q[:, queries],
            out=layer.out[:, queries],
            k=layer.k[:, list(heads)],
            v=layer.v[:, list(heads)],
            k_pages=layer.k_pages[:, :, list(heads)],
            v_pages=layer.v_pages[:, :, list(heads)],
        )
        for layer in capsule.layers
    )
    return replace(capsule, geometry=replace(g, kv_heads=len(heads), q_heads=len(queries)), layers=layers)


def without_queries(capsule: AttentionCapsule, row: int, count: int) -> AttentionCapsule:
    """Turn the first ``count`` new tokens of a row into cached ones."""
    start, _ = _span(capsule, row)
    return _drop_tokens(capsule, row, range(start, start + count), capsule.kv_lens[row])


def without_tail(capsule: AttentionCapsule, row: int, count: int) -> AttentionCapsule:
    """End a row ``count`` tokens earlier.

    Prefill loses its last new tokens. In decode the one new token stays and sees fewer keys.
    """
    _, end = _span(capsule, row)
    length = capsule.kv_lens[row] - count
    if capsule.phase == "prefill":
        return _drop_tokens(capsule, row, range(end - count, end), length)
    place = end - 1
    shorter = _drop_tokens(capsule, row, range(0), length)
    return _answer_anew(_moved(shorter, place), row)


def without_pages(capsule: AttentionCapsule, row: int, count: int) -> AttentionCapsule:
    """Drop the first ``count`` pages of a row."""
    size = capsule.geometry.page_size
    start, end = _span(capsule, row)
    page_ids, positions = capsule.page_ids.clone(), capsule.positions.clone()
    page_ids[row] = torch.cat((page_ids[row, count:], page_ids.new_full((count,), capsule.num_pages)))
    positions[start:end] -= count * size
    lens = [*capsule.kv_lens]
    lens[row] -= count * size
    shorter = replace(capsule, page_ids=page_ids, positions=positions, kv_lens=tuple(lens))
    return compact(_answer_anew(shorter, row))


def compact(capsule: AttentionCapsule) -> AttentionCapsule:
    """Drop pages that no row reads, and renumber the rest in the order in which rows read them."""
    size = capsule.geometry.page_size
    width = -(-max(capsule.kv_lens) // size)
    ids = capsule.page_ids[:, :width]
    live = torch.arange(width)[None, :] * size < torch.tensor(capsule.kv_lens)[:, None]
    kept = [page for page in dict.fromkeys(ids[live].tolist()) if page != capsule.num_pages]
    number = torch.full((capsule.num_pages + 1,), len(kept), dtype=torch.int32)
    number[kept] = torch.arange(len(kept), dtype=torch.int32)
    pages = [*kept, capsule.num_pages]
    return replace(
        capsule,
        page_ids=torch.where(live, number[ids.long()], len(kept)).to(torch.int32),
        out_loc=(number[(capsule.out_loc // size).long()] * size + capsule.out_loc % size).to(torch.int32),
        layers=tuple(
            replace(layer, k_pages=layer.k_pages[pages], v_pages=layer.v_pages[pages]) for layer in capsule.layers
        ),
    )


def _span(capsule: AttentionCapsule, row: int) -> tuple[int, int]:
    """The row's tokens: first, and one past the last."""
    start = sum(capsule.q_lens[:row])
    return start, start + capsule.q_lens[row]


def _take_tokens(layer: AttentionLayer, tokens: torch.Tensor) -> AttentionLayer:
    return replace(layer, q=layer.q[tokens], k=layer.k[tokens], v=layer.v[tokens], out=layer.out[tokens])


def _drop_tokens(capsule: AttentionCapsule, row: int, dropped: range, kv_len: int) -> AttentionCapsule:
    q_lens, kv_lens = [*capsule.q_lens], [*capsule.kv_lens]
    q_lens[row] -= len(dropped)
    kv_lens[row] = kv_len
    tokens = torch.tensor([token for token in range(sum(capsule.q_lens)) if token not in dropped])
    smaller = replace(
        capsule,
        q_lens=tuple(q_lens),
        kv_lens=tuple(kv_lens),
        positions=capsule.positions[tokens],
        out_loc=capsule.out_loc[tokens],
        layers=tuple(_take_tokens(layer, tokens) for layer in capsule.layers),
    )
    return compact(smaller)


def _moved(capsule: AttentionCapsule, token: int) -> AttentionCapsule:
    """Move a decode row's one token to the row's new end, with the slot, key and value that the pool has there."""
    row, size = token, capsule.geometry.page_size
    last = capsule.kv_lens[row] - 1
    slot = int(capsule.page_ids[row, last // size]) * size + last % size
    positions, out_loc = capsule.positions.clone(), capsule.out_loc.clone()
    positions[token], out_loc[token] = last, slot
    layers = []
    for layer in capsule.layers:
        k, v = layer.k.clone(), layer.v.clone()
        k[token] = layer.k_pages.flatten(0, 1)[slot].to(k.dtype)
        v[token] = layer.v_pages.flatten(0, 1)[slot].to(v.dtype)
        layers.append(replace(layer, k=k, v=v))
    return replace(capsule, positions=positions, out_loc=out_loc, layers=tuple(layers))


def _answer_anew(capsule: AttentionCapsule, row: int) -> AttentionCapsule:
    """The row's recorded result belongs to other keys, so the reference's replaces it."""
    start, end = _span(capsule, row)
    layers = []
    for layer in capsule.layers:
        out = layer.out.clone()
        out[start:end] = capsule.expected_row(layer, row).to(out.dtype)
        layers.append(replace(layer, out=out))
    return replace(capsule, layers=tuple(layers))
