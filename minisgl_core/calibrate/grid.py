"""What to measure: the plan entries of a model and the sizes of each. Sizes are rank-local."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from minisgl_core.modelconfig import ModelConfig
from minisgl_core.plugin_api import OP_NAMES
from minisgl_core.registry import PlanEntry, PlanQuery

__all__ = ["Size", "sizes_of", "weights_of"]

_DECODE_ROWS: Final = {False: (1, 4, 16, 64, 256), True: (1, 8, 64)}
_DECODE_LENGTHS: Final = {False: (128, 1024, 4096, 16384), True: (128, 1024)}
_PREFILL_ROWS: Final = {False: (1, 4, 16), True: (1,)}
_PREFILL_LENGTHS: Final = {False: (128, 1024, 4096), True: (128, 512)}
_PRODUCT_ROWS: Final = {False: (1, 4, 16, 64, 256, 1024, 4096), True: (1, 16, 256)}
_OTHER_ROWS: Final = {False: (1, 64, 1024), True: (1, 128)}
_MOST_TOKENS: Final = {False: 2**17, True: 2**13}
"""Tokens with KV in one measurement, so that any machine can hold the pool."""


@dataclass(frozen=True, slots=True)
class Size:
    """One size of one plan entry. ``length`` is 0 where it does not matter."""

    entry: PlanEntry
    rows: int
    length: int = 0


def sizes_of(query: PlanQuery, model: ModelConfig, max_prefill_tokens: int, quick: bool) -> list[Size]:
    """Every size to measure, smallest first within a plan entry."""
    return [
        *_attention("decode", query, max_prefill_tokens, quick),
        *_attention("prefill", query, max_prefill_tokens, quick),
        *_plain(PlanEntry("kv"), max_prefill_tokens, quick),
        *([*_plain(PlanEntry("moe"), max_prefill_tokens, quick)] if model.moe else []),
        *(
            size
            for op in OP_NAMES
            if model.moe or op != "route"
            for size in _plain(
                PlanEntry("ops", op=op), query.max_running_req if op == "sample" else max_prefill_tokens, quick
            )
        ),
        *(
            Size(PlanEntry("linear", shape=shape), rows)
            for shape in weights_of(query, model)
            for rows in _upto(_PRODUCT_ROWS[quick], max_prefill_tokens)
        ),
    ]


def _attention(phase: str, query: PlanQuery, max_prefill_tokens: int, quick: bool) -> Iterator[Size]:
    decode = phase == "decode"
    rows = _upto((_DECODE_ROWS if decode else _PREFILL_ROWS)[quick], query.max_running_req)
    most = _MOST_TOKENS[quick] if decode else min(_MOST_TOKENS[quick], max_prefill_tokens)
    for length in _upto((_DECODE_LENGTHS if decode else _PREFILL_LENGTHS)[quick], min(query.seq_limit, most)):
        for count in rows:
            if count * length <= most:
                yield Size(PlanEntry("attention", phase="decode" if decode else "prefill"), count, length)


def _plain(entry: PlanEntry, limit: int, quick: bool) -> Iterator[Size]:
    for rows in _upto(_OTHER_ROWS[quick], limit):
        yield Size(entry, rows)


def _upto(values: tuple[int, ...], limit: int) -> list[int]:
    """The values up to the limit, and the limit itself if it cuts the list."""
    kept = [value for value in values if value <= limit]
    return [*kept, limit] if not kept or (limit < values[-1] and kept[-1] < limit) else kept


def weights_of(query: PlanQuery, model: ModelConfig) -> list[tuple[int, int]]:
    """(N, K) of every kind of weight of the decoders that the core knows, as one rank holds it."""
    q_heads, kv_heads = query.model.rank_heads(query.tp_size)
    hidden, dim, tp, moe = model.hidden_size, model.head_dim, query.tp_size, model.moe
    shapes = [((q_heads + 2 * kv_heads) * dim, hidden), (hidden, q_heads * dim)]
    widths = [model.intermediate_size // tp] if moe is None or len(moe.layers) < model.num_layers else []
    if moe is not None:
        shapes.append((moe.num_experts, hidden))
        widths += [moe.shared_intermediate_size // tp] if moe.shared_intermediate_size else []
    for width in widths:
        shapes += [(2 * width, hidden), (hidden, width)]
    return list(dict.fromkeys([*shapes, (-(-model.vocab_size // tp), hidden)]))
