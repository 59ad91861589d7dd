"""Runs a capsule of attention on a backend."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from minisgl_core.kvcache.pool import repaged
from minisgl_core.plugin_api import AttentionSetup, BatchView
from minisgl_core.registry.matching import kernel_page_size
from minisgl_core.registry.query import Requirement
from minisgl_core.testing.device_fixture import KitBatch, dtype_named

from ..run import Times
from .capsule import AttentionCapsule

if TYPE_CHECKING:
    from minisgl_core.plugin_api import Caps
    from minisgl_core.registry import DeviceFacts
    from minisgl_core.testing import BackendUnderTest, DeviceFixture
    from minisgl_core.testing.timing import Timer

__all__ = ["AttentionRun", "attention_requirement"]


def attention_requirement(capsule: AttentionCapsule, device: DeviceFacts) -> Requirement:
    """What the capsule requires of a backend's caps."""
    g = capsule.geometry
    layers = [layer.facts for layer in capsule.layers]
    features = {name for name in ("window", "softcap") if any(getattr(item, name) is not None for item in layers)}
    return Requirement(
        device=device,
        dtype=g.dtype,
        kv_dtype=g.kv_dtype,
        head_dim=g.head_dim,
        gqa_ratio=g.q_heads // g.kv_heads,
        page_size=g.page_size,
        kv_layout=g.kv_layout,
        phase=capsule.phase,
        features=frozenset(features),
    )


class _Pool:
    """The capsule's pages on the device; implements ``KVPool``."""

    layout = "NHD"

    def __init__(self, capsule: AttentionCapsule, device: torch.device) -> None:
        self.num_pages, self.page_size = capsule.num_pages, capsule.geometry.page_size
        self._caches = [(layer.k_pages.to(device), layer.v_pages.to(device)) for layer in capsule.layers]

    def k_cache(self, layer: int) -> torch.Tensor:
        return self._caches[layer][0]

    def v_cache(self, layer: int) -> torch.Tensor:
        return self._caches[layer][1]


class AttentionRun:
    """A :class:`~minisgl_core.capsule.run.Run`."""

    def __init__(
        self, capsule: AttentionCapsule, under_test: BackendUnderTest, caps: Caps, fixture: DeviceFixture
    ) -> None:
        self._capsule, self._fixture = capsule, fixture
        self._page_size = kernel_page_size(caps.page_sizes, capsule.geometry.page_size) or capsule.geometry.page_size
        self._backend = under_test.build(_setup_of(capsule, self._page_size, fixture))
        self._backend.bind_kv(repaged(_Pool(capsule, fixture.device), self._page_size))
        self._batch = self._new_batch()
        self._inputs = [[x.to(fixture.device) for x in (layer.q, layer.k, layer.v)] for layer in capsule.layers]

    def _new_batch(self) -> KitBatch:
        c, device = self._capsule, self._fixture.device
        cu_q = torch.tensor([0, *c.q_lens]).cumsum(0).to(device, torch.int32)
        kv_lens = torch.tensor(c.kv_lens, dtype=torch.int32, device=device)
        view = BatchView(
            c.q_lens, c.kv_lens, max(c.q_lens), max(c.kv_lens), cu_q, kv_lens, self._page_ids(), self._page_size
        )
        positions, out_loc = c.positions.to(device), c.out_loc.to(device)
        return KitBatch(c.phase, len(c.uids), len(c.q_lens), view, positions, out_loc)

    def _page_ids(self) -> torch.Tensor:
        """(B, P) in the kernels' page size; entries past the live length name the dummy page."""
        c, size = self._capsule, self._page_size
        parts = c.geometry.page_size // size
        ids = (c.page_ids[:, :, None] * parts + torch.arange(parts)).flatten(1)[:, : -(-max(c.kv_lens) // size)]
        starts = torch.arange(ids.shape[1]) * size
        ids = ids.masked_fill(starts[None, :] >= torch.tensor(c.kv_lens)[:, None], c.num_pages * parts)
        return ids.to(self._fixture.device, torch.int32)

    def _metadata(self) -> None:
        """The step's host and device metadata."""
        self._batch.scratch.clear()
        self._backend.prepare_metadata(self._batch)
        self._backend.update_metadata(self._batch)

    def _all_layers(self) -> list[torch.Tensor]:
        return [self._backend.forward(*given, place, self._batch) for place, given in enumerate(self._inputs)]

    def results(self) -> Iterator[torch.Tensor]:
        self._metadata()
        # a backend may write into its inputs, so the timing uses each layer's own
        for place, given in enumerate(self._inputs):
            yield self._backend.forward(*(x.clone() for x in given), place, self._batch).cpu()

    def times(self, timer: Timer) -> Times:
        layer = timer(self._all_layers, self._fixture) / len(self._inputs)
        return Times(layer, timer(self._metadata, self._fixture))

    def close(self) -> None:
        self._fixture.platform.synchronize()
        self._backend.close()


def _setup_of(capsule: AttentionCapsule, page_size: int, fixture: DeviceFixture) -> AttentionSetup:
    g = capsule.geometry
    return AttentionSetup(
        device=fixture.device,
        dtype=dtype_named(g.dtype),
        kv_dtype=dtype_named(g.kv_dtype),
        kv_layout=g.kv_layout,
        page_size=page_size,
        q_heads=g.q_heads,
        kv_heads=g.kv_heads,
        head_dim=g.head_dim,
        layers=tuple(layer.facts for layer in capsule.layers),
        max_batch=max(g.max_batch, len(capsule.q_lens)),
        max_tokens=max(g.max_tokens, sum(capsule.q_lens)),
        max_seq_len=g.max_seq_len,
        batches_in_flight=g.batches_in_flight,
        platform=fixture.platform,
    )
