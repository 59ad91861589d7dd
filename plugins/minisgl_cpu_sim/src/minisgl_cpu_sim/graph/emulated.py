"""A captured step on a CPU, with the semantics of a CUDA graph: a list of operations on fixed memory, and no Python."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Generic, TypeVar

import torch

from .memory import MemoryPool
from .program import Call, compile_record
from .recorder import HostAccess, Recorder
from .trace import OpRecord, Trace

__all__ = ["EmulatedGraph", "record"]

T = TypeVar("T")


class EmulatedGraph(Generic[T]):
    """The operations that one call of a step made, to be run again on the same memory.

    Everything the step read from the host (a length, a flag, ``.item()``) is frozen; everything it read from tensors
    made before the capture is read again, at the same addresses. ``result`` is what the step returned: its tensors
    keep their addresses, and each replay fills them. Operations from ``torch.library`` are recorded as one, whatever
    their bodies do. Work that does not pass through torch's dispatcher (``data_ptr``, numpy) is not seen.
    """

    def __init__(self, trace: Trace, result: T, inference: bool, pool: MemoryPool) -> None:
        self.trace, self.result, self.pool = trace, result, pool
        self._inference = inference
        with self.mode():
            pool.absorb(trace)
            self._calls: list[Call | None] = [compile_record(op) for op in trace.ops]
        self._program = [call for call in self._calls if call is not None]

    @classmethod
    def capture(
        cls, step: Callable[[], T], *, pool: MemoryPool | None = None, strict: bool = False, warmup: int = 1
    ) -> EmulatedGraph[T]:
        """Call ``step`` ``warmup`` times, then once more under the recorder.

        A capture runs the step (a device would not), so its effects on outside tensors happen ``warmup + 1`` times.
        ``pool``: memory to share with other graphs; replaying one of them overwrites what the others left there,
        except tensors that the caller still holds. Raises :class:`GraphViolation` where an operation has no meaning in
        a graph, and with ``strict`` at every host read too.
        """
        for _ in range(warmup):
            step()
        trace, result = record(step, strict=strict)
        gc.collect(1)  # collect cycles first, so that their memory can be reused
        return cls(trace, result, torch.is_inference_mode_enabled(), pool or MemoryPool())

    @property
    def ops(self) -> tuple[OpRecord, ...]:
        """All operations in order, for printing."""
        return tuple(self.trace.ops)

    def replay(self) -> T:
        """Run the recorded operations on the current contents of their inputs; returns ``result``."""
        with self.mode():
            for function, args, kwargs, finish in self._program:
                result = function(*args, **kwargs)
                if finish is not None:
                    finish(result)
        return self.result

    def run_each(self) -> Iterator[OpRecord]:
        """Like :meth:`replay`, yielding after every operation. The caller keeps :meth:`mode` active."""
        for operation, call in zip(self.trace.ops, self._calls, strict=True):
            if call is not None:
                result = call.function(*call.args, **call.kwargs)
                if call.finish is not None:
                    call.finish(result)
            yield operation

    @contextmanager
    def mode(self) -> Iterator[None]:
        """The autograd mode of the capture; without it, tensors made in inference mode could not be written."""
        with torch.inference_mode() if self._inference else torch.no_grad():
            yield

    def close(self) -> None:
        """Free the operations and their memory. ``result`` stays with its holders."""
        self.trace, self._calls, self._program = Trace(), [], []


def record(
    step: Callable[[], T],
    *,
    strict: bool = False,
    checked: bool = False,
    before_write: Callable[[torch.Tensor], None] | None = None,
) -> tuple[Trace, T]:
    """Run ``step`` once and return its operations and its result. The options are :class:`Recorder`'s."""
    recorder = Recorder(strict=strict, checked=checked, before_write=before_write)
    with torch.no_grad(), HostAccess() if strict else nullcontext(), recorder:
        result = step()
    return recorder.trace, result
