"""A batch's view, of which the costly parts are derived when somebody asks for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch

from minisgl_core.plugin_api import BatchView

__all__ = ["DerivedView"]

Lengths = torch.Tensor | Callable[[], torch.Tensor]
Pages = torch.Tensor | Callable[[torch.Tensor], torch.Tensor]
"""Of the lengths: a function that asked the view for them would hold it, and keep the device's memory."""


class DerivedView(BatchView):
    """``kv_lens_device`` and ``page_ids_device`` may be given as functions, which are called once, at first use.
    That of the page ids is given the lengths.

    In a captured step this happens inside the capture, whoever it is that asks.
    """

    __slots__ = ("_kv_lens", "_page_ids")

    _kv_lens: Lengths
    _page_ids: Pages

    def __init__(
        self,
        q_lens_host: tuple[int, ...] | None,
        kv_lens_host: tuple[int, ...] | None,
        max_q: int,
        max_kv: int,
        cu_q_device: torch.Tensor,
        kv_lens_device: Lengths,
        page_ids_device: Pages,
        page_size: int,
        page_table_device: torch.Tensor | None = None,
        table_idx_device: torch.Tensor | None = None,
    ) -> None:
        lens, ids = cast("torch.Tensor", kv_lens_device), cast("torch.Tensor", page_ids_device)
        super().__init__(
            q_lens_host, kv_lens_host, max_q, max_kv, cu_q_device, lens, ids, page_size, page_table_device,
            table_idx_device,
        )  # fmt: skip

    @property
    def kv_lens_device(self) -> torch.Tensor:
        """(B,)"""
        if not isinstance(self._kv_lens, torch.Tensor):
            self._kv_lens = self._kv_lens()
        return self._kv_lens

    @kv_lens_device.setter
    def kv_lens_device(self, value: Lengths) -> None:
        self._kv_lens = value

    @property
    def page_ids_device(self) -> torch.Tensor:
        """(B, P)"""
        if not isinstance(self._page_ids, torch.Tensor):
            self._page_ids = self._page_ids(self.kv_lens_device)
        return self._page_ids

    @page_ids_device.setter
    def page_ids_device(self, value: Pages) -> None:
        self._page_ids = value
