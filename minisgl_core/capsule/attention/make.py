"""Makes capsules of attention from observed steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from .capsule import AttentionCapsule, AttentionGeometry, AttentionLayer

if TYPE_CHECKING:
    from minisgl_core.plugin_api import AttentionSetup

    from .observer import AttentionCall, AttentionStep

__all__ = ["AttentionMaker"]


class AttentionMaker:
    """A :class:`~minisgl_core.capsule.record.CapsuleMaker`; ``page_size`` is the pool's."""

    def __init__(self, setup: AttentionSetup, page_size: int) -> None:
        self._facts = setup.layers
        self._itemsizes = setup.dtype.itemsize, setup.kv_dtype.itemsize
        self._geometry = AttentionGeometry(
            dtype=str(setup.dtype).removeprefix("torch."),
            kv_dtype=str(setup.kv_dtype).removeprefix("torch."),
            kv_layout=setup.kv_layout,
            page_size=page_size,
            q_heads=setup.q_heads,
            kv_heads=setup.kv_heads,
            head_dim=setup.head_dim,
            max_batch=setup.max_batch,
            max_tokens=setup.max_tokens,
            max_seq_len=setup.max_seq_len,
            batches_in_flight=setup.batches_in_flight,
        )

    def least_bytes(self, step: AttentionStep) -> int:
        g, (size, kv_size) = self._geometry, self._itemsizes
        rows = 2 * sum(step.q_lens) * (g.q_heads + g.kv_heads) * g.head_dim * size
        pages = 2 * len(step.pages) * g.page_size * g.kv_heads * g.head_dim * kv_size
        return len(self._facts) * (rows + pages)

    def layer(self, call: AttentionCall, out: torch.Tensor | None) -> AttentionLayer:
        result = torch.full_like(call.q, torch.nan) if out is None else out
        q, k, v, result, k_pages, v_pages = (
            tensor.to("cpu", copy=True) for tensor in (call.q, call.k, call.v, result, call.k_pages, call.v_pages)
        )
        return AttentionLayer(call.layer_id, result, self._facts[call.layer_id], q, k, v, k_pages, v_pages)

    def capsule(
        self, step: AttentionStep, layers: Sequence[AttentionLayer], origin: Mapping[str, Any]
    ) -> AttentionCapsule:
        batch, view = step.batch, step.view
        assert batch.positions is not None and batch.out_loc is not None and view.kv_lens_host is not None
        return AttentionCapsule(
            step=step.number,
            phase=step.phase,
            geometry=self._geometry,
            q_lens=step.q_lens,
            kv_lens=view.kv_lens_host,
            uids=step.uids,
            page_ids=step.renumbered(view.page_ids_device).cpu(),
            positions=batch.positions.to(torch.int32).cpu(),
            out_loc=step.renumbered_slots(batch.out_loc).to(torch.int32).cpu(),
            layers=tuple(layers),
            origin=dict(origin),
        )
