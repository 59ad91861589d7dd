"""All that a step changes on the device travels in one packed copy."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from minisgl_core.plugin_api import PinnedRing

if TYPE_CHECKING:
    from minisgl_core.plugin_api import Platform

__all__ = ["PackedUpload"]


class PackedUpload:
    """Packs int32 arrays into a pinned buffer, copies them once, and hands back device views of each.

    The views stay valid until the next :meth:`send`, in stream order.
    """

    def __init__(self, platform: Platform, capacity: int, depth: int = 3) -> None:
        self.capacity = capacity
        self._ring = PinnedRing(platform, (capacity,), torch.int32, depth)
        self._staging = torch.zeros(capacity, dtype=torch.int32, device=platform.device)
        self._sizes: list[int] = []
        """Of the parts that were sent last"""

    def send(self, parts: list[np.ndarray]) -> list[torch.Tensor]:
        """Flat int32 arrays, together at most ``capacity`` numbers -> their device views, in order."""
        self._sizes = sizes = [part.size for part in parts]
        total = sum(sizes)
        sent = self._staging[:total]
        with self._ring.borrow() as buffer:
            pinned = buffer[:total]
            np.concatenate(parts, out=pinned.numpy())
            sent.copy_(pinned, non_blocking=True)
        return list(sent.split(sizes)) if len(sizes) > 1 else [sent]

    def last_parts(self, count: int) -> list[torch.Tensor]:
        """Copies, made in one operation, of the last ``count`` parts that were sent: later uploads leave them alone."""
        sizes, end = self._sizes[-count:], sum(self._sizes)
        return list(self._staging[end - sum(sizes) : end].clone().split(sizes))
