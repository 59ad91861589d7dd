"""The device that checks run on: its platform, graph capture, and memory use."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from unittest import SkipTest

import torch

from minisgl_core.builtin.devices import detect_device
from minisgl_core.builtin.platform import CpuPlatform, CudaPlatform
from minisgl_core.installation import Installed, check_requires
from minisgl_core.plugin_api import GraphSetup, StepOutput
from minisgl_core.registry import Choice, DeviceFacts, build, discover
from minisgl_core.registry.matching import match
from minisgl_core.registry.query import Requirement
from minisgl_core.sandbox import import_object

from .leftovers import heap_bytes

if TYPE_CHECKING:
    from minisgl_core.plugin_api import BatchLike, BatchView, Phase, Platform

__all__ = ["Captured", "DeviceFixture", "KitBatch", "dtype_named"]


def dtype_named(name: str) -> torch.dtype:
    """``"bfloat16"`` -> ``torch.bfloat16``"""
    found: torch.dtype = getattr(torch, name)
    return found


@dataclass(slots=True)
class KitBatch:
    """The part of a batch that plugins may use, filled as in the core."""

    phase: Phase
    size: int
    padded_size: int
    view: BatchView
    positions: torch.Tensor
    out_loc: torch.Tensor
    captured: bool = False
    mode: Any = "greedy"
    scratch: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Captured:
    """A captured step. ``outputs`` keep their addresses; each replay fills them."""

    outputs: tuple[torch.Tensor, ...]
    replay: Callable[[], None]
    close: Callable[[], None]


class DeviceFixture:
    """One device. Checks use it only through its platform, like the engine."""

    def __init__(self, device: DeviceFacts | str = "auto", index: int = 0) -> None:
        self.facts = detect_device(device) if isinstance(device, str) else device
        self.platform: Platform = CpuPlatform() if self.facts.about.on_host else CudaPlatform(index)
        self.device = self.platform.device

    @contextmanager
    def active(self) -> Iterator[None]:
        """Activate the engine's stream, inference mode, and float32 products at full precision."""
        precision = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("highest")
        self.platform.activate()
        try:
            with torch.inference_mode():
                yield
        finally:
            torch.set_float32_matmul_precision(precision)

    def generator(self, seed: int) -> torch.Generator:
        """A generator on the host, so that a check has the same data on every device."""
        return torch.Generator().manual_seed(seed)

    def capture(self, step: Callable[[], tuple[torch.Tensor, ...]], batch: BatchLike | None = None) -> Captured:
        """Capture ``step``, by the platform if it can, else by an installed graph runner for this device.

        ``batch``: the batch that graph runners receive; None = one without rows. Raises :class:`unittest.SkipTest` if
        nothing can capture.
        """
        if self.platform.can_capture():
            for _ in range(2):  # kernels are compiled and workspaces allocated before the capture
                step()
            self.platform.synchronize()
            graph, outputs, _ = self.platform.capture(step, None)
            return Captured(outputs, graph.replay, graph.close)
        host = _StepHost(step, batch or _no_rows(self.device))
        setup = GraphSetup(self.platform, self.device, host, (host.batch.padded_size,), ("greedy",), 1)
        runner = build(_capturing_runner(self.facts), setup)
        runner.capture()
        return Captured(host.outputs, lambda: runner.replay(host.batch), runner.close)

    @contextmanager
    def memory_watch(self) -> Iterator[Callable[[], int]]:
        """A function that returns the bytes of tensors in use.

        On a CPU it counts tensors that were created inside this block and that Python can reach.
        """
        if self.device.type != "cpu":
            yield self._allocated_on_device
            return
        gc.collect()
        gc.freeze()  # existing objects are neither searched nor counted
        try:
            yield _reachable_bytes
        finally:
            gc.unfreeze()

    def bytes_in_use(self) -> int:
        """Bytes allocated on the host by any code, and tensors on the device."""
        on_device = 0 if self.device.type == "cpu" else self._allocated_on_device()
        return heap_bytes() + on_device

    def _allocated_on_device(self) -> int:
        gc.collect()
        self.platform.synchronize()
        return torch.accelerator.memory_allocated(self.device)


def _reachable_bytes() -> int:
    gc.collect()
    storages = {}
    for item in gc.get_objects():
        if issubclass(type(item), torch.Tensor) and item.device.type == "cpu" and item.layout == torch.strided:
            storage = item.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


class _StepHost:
    """The host of a graph runner with one step of one size."""

    def __init__(self, step: Callable[[], tuple[torch.Tensor, ...]], batch: BatchLike) -> None:
        self._step, self.batch = step, batch
        self.outputs: tuple[torch.Tensor, ...] = ()

    def step(self, batch: Any) -> StepOutput:
        self.outputs = self._step()
        return StepOutput(self.outputs[0], self.outputs[-1])

    def make_capture_batch(self, size: int, mode: Any) -> Any:
        return self.batch

    def prepare_replay(self, batch: Any) -> None:
        """Nothing: the check itself calls the backend's method."""

    def input_buffers(self) -> Mapping[str, torch.Tensor]:
        return {}

    def expected_inputs(self, batch: Any) -> Mapping[str, tuple[torch.Tensor, torch.Tensor]]:
        return {}


def _no_rows(device: torch.device) -> KitBatch:
    none = torch.empty(0, dtype=torch.int32, device=device)
    return KitBatch("decode", 1, 1, None, none, none, captured=True)  # type: ignore[arg-type]  # not attention's


def _capturing_runner(device: DeviceFacts) -> Choice:
    """An installed graph runner that captures on this device, in strict mode if it has one."""
    offers = [
        item
        for item in discover().candidates("graph")
        if match(item.spec, Requirement(device=device, capture=True))[0] is not None
        and not check_requires(item.spec, Installed())
    ]
    if not offers:
        raise SkipTest(f"no installed graph runner captures on {device}; minisgl-cpu-sim has one for the CPU")
    chosen = min(offers, key=lambda item: item.spec.tier)
    spec = chosen.spec
    strict = spec.options is not None and "strict" in import_object(spec.options).model_fields
    return Choice(
        role="graph",
        name=spec.name,
        variant=spec.variant,
        distribution=chosen.distribution,
        version=chosen.version,
        factory=spec.factory,
        options_model=spec.options,
        options={"strict": True} if strict else {},
    )
