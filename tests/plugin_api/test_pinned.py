"""A pinned buffer is filled again only after the copy that reads it is done."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from minisgl_core.plugin_api import PinnedRing


class LateDevice:
    """A platform whose copies happen when they are waited for: by then the host may have changed the buffer."""

    def __init__(self) -> None:
        self.queue: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.waits = 0

    def empty_pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self.queue.append((target, source))

    def run(self, count: int) -> None:
        for target, source in self.queue[:count]:
            target.copy_(source)
        del self.queue[:count]

    def new_event(self, *, timing: bool = False) -> Any:
        return LateEvent(self)


class LateEvent:
    def __init__(self, device: LateDevice) -> None:
        self._device = device
        self._marked: list[tuple[torch.Tensor, torch.Tensor]] = []

    def record(self) -> None:
        """The mark lies behind all copies that are under way."""
        self._marked = list(self._device.queue)

    def synchronize(self) -> None:
        left = [i for i, entry in enumerate(self._device.queue) if any(entry is other for other in self._marked)]
        self._device.waits += bool(left)
        if left:
            self._device.run(left[-1] + 1)


@pytest.mark.parametrize("depth", [2, 3])
def test_each_copy_reads_what_its_borrower_wrote(depth: int) -> None:
    device = LateDevice()
    ring = PinnedRing(device, (4,), torch.int32, depth)  # type: ignore[arg-type]
    targets = [torch.full((4,), -1, dtype=torch.int32) for _ in range(7)]
    for value, target in enumerate(targets):
        with ring.borrow() as buffer:
            buffer.fill_(value)
            device.copy(target, buffer)
    device.run(len(device.queue))
    assert [target.tolist() for target in targets] == [[value] * 4 for value in range(7)]
    assert device.waits == 7 - depth, "it waits for the oldest copy only, and only where that is under way"


def test_a_ring_of_one_buffer_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 2"):
        PinnedRing(LateDevice(), (1,), torch.int32, 1)  # type: ignore[arg-type]
