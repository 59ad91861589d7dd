"""Copies of memory from outside a step, so that a checked run leaves no trace."""

from __future__ import annotations

from collections.abc import Iterator

import torch

__all__ = ["Snapshot"]


class Snapshot:
    """The bytes of some storages. Its own memory is kept between uses."""

    def __init__(self) -> None:
        self._live: dict[int, torch.Tensor] = {}
        self._saved: dict[int, torch.Tensor] = {}

    def save(self, tensor: torch.Tensor) -> None:
        """Save the whole storage of ``tensor``, once."""
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if address in self._live or storage.nbytes() == 0:
            return
        live = _bytes(storage)
        spare = self._saved.get(address)
        if spare is None or spare.numel() != live.numel():
            spare = self._saved[address] = torch.empty_like(live)
        spare.copy_(live)
        self._live[address] = live

    def restore(self) -> None:
        """Restore every saved storage."""
        for address, live in self._live.items():
            live.copy_(self._saved[address])

    def clear(self) -> None:
        """Discard the saved contents; the memory is kept for the next use."""
        self._live.clear()

    def live(self) -> list[torch.Tensor]:
        """The saved storages, as bytes."""
        return list(self._live.values())

    def pairs(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """(bytes now, bytes saved) of every storage."""
        return ((live, self._saved[address]) for address, live in self._live.items())

    def was(self, tensor: torch.Tensor) -> torch.Tensor:
        """The saved contents under ``tensor``, with its geometry."""
        saved = self._saved[tensor.untyped_storage().data_ptr()]
        view = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        geometry = (tensor.storage_offset(), tuple(tensor.shape), tensor.stride())
        return view.set_(saved.untyped_storage(), *geometry)


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    view = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return view.set_(storage, 0, (storage.nbytes(),), (1,))
