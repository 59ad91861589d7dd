"""Attention that is right for one batch of one instance: what it keeps, shares or changes makes another one wrong."""

from __future__ import annotations

from typing import Any

import torch
from mutants_attention import Right

# What is kept from one batch for another.


class PlanOfTheLastEqualLengths(Right):
    """Plans again only if the host's lengths or shapes differ."""

    key = None

    def update_metadata(self, batch):
        view = batch.view
        key = (batch.phase, view.page_ids_device.shape, view.max_kv, view.kv_lens_host)
        if view.kv_lens_host is None or key != self.key:
            super().update_metadata(batch)
            self.key, self.kept = key, batch.scratch["slots"]
        batch.scratch["slots"] = self.kept


class PlanOfTheSameAddress(Right):
    key = None

    def update_metadata(self, batch):
        pages = batch.view.page_ids_device
        if batch.captured or (pages.data_ptr(), pages.shape) != self.key:
            super().update_metadata(batch)
            self.key, self.kept = (pages.data_ptr(), pages.shape), batch.scratch["slots"]
            self.pages = pages  # its memory is not given to another tensor
        batch.scratch["slots"] = self.kept


class KeysOfTheLastEqualSlots(Right):
    """Gathers keys and values again only if the slots differ."""

    slots_of = None

    def forward(self, q, k, v, layer, batch):
        slots = batch.scratch["slots"]
        if batch.captured:
            return super().forward(q, k, v, layer, batch)
        known = self.slots_of is not None and torch.equal(slots, self.slots_of[0]) and layer == self.slots_of[1]
        if not known:
            self.slots_of = (slots, layer)
            self.gathered = tuple(cache.clone() for cache in super().caches(layer))
        return super().forward(q, k, v, layer, batch)

    def caches(self, layer):
        return self.gathered


class ReplayPlanOfTheLastEqualLengths(Right):
    """Declares a host plan, of slots, and makes it again only if the lengths differ."""

    key = None

    def prepare_for_capture(self, batch):
        super().update_metadata(batch)
        self.plan = batch.scratch["slots"].clone()

    def prepare_for_replay(self, batch):
        if batch.view.kv_lens_host != self.key:
            self.key = batch.view.kv_lens_host
            super().update_metadata(batch)
            slots = batch.scratch["slots"]
            self.plan[:, : slots.shape[1]] = slots

    def update_metadata(self, batch):
        if batch.captured:
            batch.scratch["slots"] = self.plan
        else:
            super().update_metadata(batch)


class PoolOfTheLastInstance(Right):
    def bind_kv(self, pool):
        PoolOfTheLastInstance.shared = pool

    def caches(self, layer):
        return self.shared.k_cache(layer), self.shared.v_cache(layer)


class SetupOfTheLastInstance(Right):
    def __init__(self, setup: Any, options: object = None) -> None:
        SetupOfTheLastInstance.shared = setup
        super().__init__(setup, options)

    def facts(self, layer):
        return self.shared.layers[layer]


class ClosesWhatAllInstancesUse(Right):
    """A table that the class has, made by the first instance and dropped by whichever is closed."""

    table = None

    def __init__(self, setup: Any, options: object = None) -> None:
        super().__init__(setup, options)
        if ClosesWhatAllInstancesUse.table is None:
            ClosesWhatAllInstancesUse.table = torch.arange(1 << 16)

    def slots(self, view):
        slots = super().slots(view)
        return self.table[slots]

    def close(self):
        ClosesWhatAllInstancesUse.table = None


class CapturesIntoOneBuffer(Right):
    """The class has the slots of captured batches."""

    def init_capture_graph(self, max_seq_len, bs_list):
        CapturesIntoOneBuffer.buffer = torch.zeros(max(bs_list), 1 << 10, dtype=torch.int64)

    def update_metadata(self, batch):
        super().update_metadata(batch)
        if batch.captured:
            slots = batch.scratch["slots"]
            batch.scratch["slots"] = self.buffer[: slots.shape[0], : slots.shape[1]].copy_(slots)


# What it does to its process.


class SetsTheDefaultDtype(Right):
    def __init__(self, setup: Any, options: object = None) -> None:
        super().__init__(setup, options)
        torch.set_default_dtype(torch.bfloat16)


class SetsTheThreads(Right):
    def prepare_metadata(self, batch):
        torch.set_num_threads(torch.get_num_threads() + 1)


class AsksForDeterminism(Right):
    def bind_kv(self, pool):
        super().bind_kv(pool)
        torch.use_deterministic_algorithms(True, warn_only=True)


class SwitchesGradModeOff(Right):
    def __init__(self, setup: Any, options: object = None) -> None:
        super().__init__(setup, options)
        torch.set_grad_enabled(False)


class SeedsTheProcess(Right):
    def prepare_metadata(self, batch):
        torch.manual_seed(0)
