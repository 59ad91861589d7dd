"""An attention backend that needs the unused tail of each row's last page to be finite, as some GPU kernels do."""

from __future__ import annotations

import torch

from minisgl_core.plugin_api import BatchLike, KVPool
from minisgl_cpu_sim.pure.attention import TorchAttention

__all__ = ["TailReader"]


class TailReader(TorchAttention):
    """``attention:torch`` plus the values of the tail times zero, which is NaN where the tail is."""

    def bind_kv(self, pool: KVPool) -> None:
        super().bind_kv(pool)
        self._pages = [pool.v_cache(layer) for layer in range(len(self._layers))]

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer_id: int, batch: BatchLike
    ) -> torch.Tensor:
        out = super().forward(q, k, v, layer_id, batch)
        view, last = batch.view, (batch.view.kv_lens_device - 1).long()
        ids = view.page_ids_device.gather(1, (last // view.page_size)[:, None])[:, 0]
        in_tail = torch.arange(view.page_size)[None, :] > (last % view.page_size)[:, None]
        tails = (self._pages[layer_id][ids.long()] * 0).sum((2, 3)).masked_fill(~in_tail, 0).sum(1)
        if batch.phase == "prefill":
            tails = tails.repeat_interleave(view.cu_q_device.diff().long(), output_size=len(out))
        return out + tails[:, None, None]

    def close(self) -> None:
        super().close()
        self._pages = []
