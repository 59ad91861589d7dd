"""Runs a capsule of experts on a backend."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING

import torch

from minisgl_core.plugin_api import MoESetup
from minisgl_core.registry.query import Requirement
from minisgl_core.testing.device_fixture import dtype_named

from ..run import Times
from .capsule import MoECapsule, MoELayer

if TYPE_CHECKING:
    from minisgl_core.plugin_api import Caps
    from minisgl_core.registry import DeviceFacts
    from minisgl_core.testing import BackendUnderTest, DeviceFixture
    from minisgl_core.testing.timing import Timer

__all__ = ["MoERun", "moe_requirement"]


def moe_requirement(capsule: MoECapsule, device: DeviceFacts) -> Requirement:
    """What the capsule requires of a backend's caps."""
    return Requirement(device=device, dtype=capsule.geometry.dtype)


class MoERun:
    """A :class:`~minisgl_core.capsule.run.Run`.

    The backend gets the model's number of experts and their original ids, those that the step did not use with weights
    of zero: what it did while it served, it does here. One layer's weights are on the device at a time, and each pass
    over the layers has a backend of its own, as weights are prepared once.
    """

    def __init__(self, capsule: MoECapsule, under_test: BackendUnderTest, caps: Caps, fixture: DeviceFixture) -> None:
        del caps
        self._capsule, self._under_test, self._fixture = capsule, under_test, fixture
        g = capsule.geometry
        self._setup = MoESetup(
            device=fixture.device,
            dtype=dtype_named(g.dtype),
            num_experts=g.num_experts,
            top_k=g.top_k,
            hidden_size=g.hidden_size,
            intermediate_size=g.intermediate_size,
            num_layers=len(capsule.layers),
            max_tokens=max(g.max_tokens, sum(capsule.q_lens)),
            platform=fixture.platform,
        )

    def _calls(self) -> Iterator[Callable[[], torch.Tensor]]:
        """Each layer's call."""
        backend, device = self._under_test.build(self._setup), self._fixture.device
        for place, layer in enumerate(self._capsule.layers):
            prepared = backend.prepare_weights(place, *self._weights(layer))
            inputs = [x.to(device) for x in (layer.x, layer.original_ids(), layer.topk_weights)]
            yield partial(backend.forward, *inputs, prepared, place)
            del prepared
        self._fixture.platform.synchronize()
        backend.close()

    def _weights(self, layer: MoELayer) -> Iterator[torch.Tensor]:
        """(E, 2I, N) and (E, N, I) on the device."""
        for used in (layer.w13, layer.w2):
            whole = used.new_zeros(self._setup.num_experts, *used.shape[1:], device=self._fixture.device)
            whole[list(layer.experts)] = used.to(whole.device)
            yield whole

    def results(self) -> Iterator[torch.Tensor]:
        for call in self._calls():
            yield call().cpu()

    def times(self, timer: Timer) -> Times:
        seconds = [timer(call, self._fixture) for call in self._calls()]
        return Times(sum(seconds) / len(seconds))

    def close(self) -> None:
        """Nothing is left to free: each pass closes its own backend."""
