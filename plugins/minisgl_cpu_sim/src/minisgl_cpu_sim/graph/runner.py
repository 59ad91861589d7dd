"""Graph backend ``emulated``: captures decode steps once per (padded size, sampling mode) and replays them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch

from minisgl_core.plugin_api import PoisonHost, padded_size

from .emulated import EmulatedGraph
from .memory import MemoryPool
from .options import EmulatedGraphOptions
from .poison import Places, Rows
from .strict import StrictReplay

if TYPE_CHECKING:
    from minisgl_core.plugin_api import BatchLike, GraphSetup, SamplingMode, StepOutput

__all__ = ["EmulatedGraphRunner"]

Key = tuple[int, "SamplingMode"]


class EmulatedGraphRunner:
    """Runs decode steps like a CUDA graph runner.

    Inputs are the core's fixed buffers, so a replay copies nothing. The result of :meth:`replay` is valid until the
    next replay of any size.
    """

    def __init__(self, setup: GraphSetup, options: EmulatedGraphOptions | None = None) -> None:
        self._setup, self._host = setup, setup.host
        self._strict = options is not None and options.strict
        self._sizes = tuple(sorted(setup.bs_list))
        self._graphs: dict[Key, EmulatedGraph[StepOutput]] = {}
        self._checks: dict[Key, StrictReplay[StepOutput]] = {}

    @torch.inference_mode()
    def capture(self) -> None:
        """Capture every size and mode, the largest first, so that smaller graphs fit into the memory of larger ones."""
        pool = MemoryPool()
        keys = [(size, mode) for size in reversed(self._sizes) for mode in self._setup.modes]
        report = self._setup.progress
        finished = report("Capturing graphs", len(keys)) if report is not None and keys else None
        for key in keys:
            self._capture_one(key, pool)
            if finished is not None:
                finished()

    def _capture_one(self, key: Key, pool: MemoryPool) -> None:
        batch = self._host.make_capture_batch(*key)
        step: Callable[[], StepOutput] = partial(self._host.step, batch)
        graph = self._graphs[key] = EmulatedGraph.capture(step, pool=pool, strict=self._strict)
        if self._strict:
            self._checks[key] = StrictReplay(graph, step, self._host.input_buffers())

    def pad_batch(self, batch: BatchLike) -> None:
        """Set ``batch.padded_size``: the smallest captured size that holds a decode batch, else its own size."""
        batch.padded_size = padded_size(batch, self._sizes)

    def can_replay(self, batch: BatchLike) -> bool:
        """True if there is a graph of this batch's padded size and sampling mode."""
        return batch.phase == "decode" and (batch.padded_size, batch.mode) in self._graphs

    def replay(self, batch: BatchLike) -> StepOutput:
        """Run the recorded step of ``batch.padded_size`` rows; valid until the next replay.

        Strict: raises :class:`~minisgl_cpu_sim.graph.GraphViolation` at the first violation.
        """
        self._host.prepare_replay(batch)
        key = (batch.padded_size, batch.mode)
        if not self._strict:
            return self._graphs[key].replay()
        places: Places = self._host.poison_targets(batch) if isinstance(self._host, PoisonHost) else {}
        expected = self._host.expected_inputs(batch)
        return self._checks[key](self._host.input_buffers(), expected, Rows(batch.size, batch.padded_size), places)

    def close(self) -> None:
        """Free all graphs and their memory."""
        for graph in self._graphs.values():
            graph.close()
        self._graphs.clear()
        self._checks.clear()
