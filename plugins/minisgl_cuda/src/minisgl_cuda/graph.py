"""Graph backend ``cuda``: whole decode steps recorded as CUDA graphs, one per (padded size, sampling mode)."""

from __future__ import annotations

import weakref
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from minisgl_core.plugin_api import StepOutput, padded_size

from .borrow import Lease, borrowed

if TYPE_CHECKING:
    from minisgl_core.plugin_api import BatchLike, CapturedGraph, GraphSetup, SamplingMode

__all__ = ["CudaGraphRunner"]

Key = tuple[int, "SamplingMode"]
WARM_UPS = 2
"""Runs before a capture: on the first, kernels compile and libraries allocate; the second shows that they are done."""


class _Recorded(NamedTuple):
    graph: CapturedGraph
    output: StepOutput
    """Borrowed from the shared memory pool"""


class CudaGraphRunner:
    """Captured decode steps. A replay is one launch and copies nothing: the inputs are the core's fixed buffers.

    The result of :meth:`replay` is valid until the next replay of any size, because all graphs share one memory pool.
    The runner holds no tensor in that pool: the logits of all sizes and modes would add up to gigabytes.
    """

    def __init__(self, setup: GraphSetup, options: Any = None) -> None:
        self._setup, self._host, self._platform = setup, setup.host, setup.platform
        self._sizes = tuple(sorted(setup.bs_list))
        self._graphs: dict[Key, _Recorded] = {}

    @torch.inference_mode()
    def capture(self) -> None:
        """Capture every size and mode, the largest first, so that smaller graphs fit into the memory of larger ones."""
        keys: list[Key] = [(size, mode) for size in reversed(self._sizes) for mode in self._setup.modes]
        report = self._setup.progress
        finished = report("Capturing graphs", len(keys)) if report is not None and keys else None
        pool = None
        for key in keys:
            pool = self._capture_one(key, pool)
            if finished is not None:
                finished()

    def _capture_one(self, key: Key, pool: Any) -> Any:
        batch = self._host.make_capture_batch(*key)
        step = partial(self._host.step, batch)
        for _ in range(WARM_UPS):
            step()
        self._platform.synchronize()
        graph, output, pool = self._platform.capture(step, pool)
        lease = Lease()
        # The graph is freed when neither the runner nor a caller that kept an output needs its memory.
        weakref.finalize(lease, graph.close).atexit = False
        kept = StepOutput(borrowed(output.logits, lease), borrowed(output.next_tokens, lease))
        self._graphs[key] = _Recorded(graph, kept)
        return pool

    def pad_batch(self, batch: BatchLike) -> None:
        """Set ``batch.padded_size``: the smallest captured size that holds a decode batch, else its own size."""
        batch.padded_size = padded_size(batch, self._sizes)

    def can_replay(self, batch: BatchLike) -> bool:
        """True if there is a graph of this batch's padded size and sampling mode."""
        return batch.phase == "decode" and (batch.padded_size, batch.mode) in self._graphs

    def replay(self, batch: BatchLike) -> StepOutput:
        """Replay the captured step of ``batch.padded_size`` rows. The result is valid until the next replay."""
        self._host.prepare_replay(batch)
        graph, output = self._graphs[batch.padded_size, batch.mode]
        graph.replay()
        return output

    def close(self) -> None:
        """Free all graphs. Their memory is freed with them, or with the last of their outputs that a caller still
        holds.
        """
        self._graphs.clear()
