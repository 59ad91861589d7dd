"""Paged attention in plain torch: correct, slow, to be replaced. T tokens, B rows, H heads, D head_dim."""

import torch
import torch.nn.functional as F
from minisgl_core.plugin_api import AttentionSetup, BatchLike, KVPool

from .options import BlockedOptions


class Blocked:
    def __init__(self, setup: AttentionSetup, options: BlockedOptions) -> None:
        self.layers = setup.layers
        self.query_block = options.query_block

    def bind_kv(self, pool: KVPool) -> None:
        self.pool = pool

    def prepare_metadata(self, batch: BatchLike) -> None:
        """Host work, once per eager batch; a kernel with a host plan makes it here."""

    def update_metadata(self, batch: BatchLike) -> None:
        """Device work, once per step: the slots of all keys of all rows, (B, L)."""
        view = batch.view
        within = torch.arange(view.page_size, device=view.page_ids_device.device)
        slots = view.page_ids_device[:, :, None].long() * view.page_size + within
        batch.scratch["slots"] = slots.flatten(1)[:, : view.max_kv]

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer_id: int, batch: BatchLike
    ) -> torch.Tensor:
        """q (T, H, D) -> new (T, H, D). k and v are this pass's rows; the pool already contains them."""
        view, slots = batch.view, batch.scratch["slots"]
        if batch.phase == "decode":  # one query per row, lengths only on the device: this part can be captured
            return self.attend(q[:, None], slots, view.kv_lens_device[:, None] - 1, layer_id)[:, 0]
        parts = []
        for row, keys, end in zip(q.split(view.q_lens_host), slots, view.kv_lens_host, strict=True):
            positions = torch.arange(end - len(row), end, device=q.device)
            for part, at in zip(row.split(self.query_block), positions.split(self.query_block), strict=True):
                parts.append(self.attend(part[None], keys[None, :end], at[None], layer_id)[0])
        return torch.cat(parts)

    def attend(self, q: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor, layer_id: int) -> torch.Tensor:
        """q (B, M, H, D) at positions (B, M) of rows with keys at slots (B, L) -> (B, M, H, D)."""
        facts, keys_at = self.layers[layer_id], torch.arange(slots.shape[1], device=q.device)
        visible = keys_at <= positions[..., None]
        if facts.window is not None:
            visible &= keys_at > positions[..., None] - facts.window
        unseen = ~visible.any(1)[..., None, None]  # may hold NaN, and 0 * NaN is NaN: cleared below
        caches = self.pool.k_cache(layer_id), self.pool.v_cache(layer_id)  # each (P + 1, S, K, D)
        k, v = (cache.flatten(0, 1)[slots].to(q.dtype).masked_fill(unseen, 0) for cache in caches)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, visible[:, None], scale=facts.scale, enable_gqa=True)
        return out.transpose(1, 2)

    def init_capture_graph(self, max_seq_len: int, bs_list: tuple[int, ...]) -> None: ...
    def prepare_for_capture(self, batch: BatchLike) -> None: ...
    def prepare_for_replay(self, batch: BatchLike) -> None: ...
    def close(self) -> None: ...
