"""Observing the backends of one role: their inputs and results, layer by layer, in eager steps."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from minisgl_core.core import Batch
from minisgl_core.plugin_api import Phase

__all__ = ["ActiveStep", "LayerCall", "ObservedStep", "RoleObserver", "StepListener"]


@dataclass(frozen=True, slots=True)
class ObservedStep:
    """One eager step, as one role sees it."""

    number: int
    batch: Batch

    @property
    def phase(self) -> Phase:
        return self.batch.phase

    @property
    def uids(self) -> tuple[int, ...]:
        return tuple(req.uid for req in self.batch.reqs)

    @property
    def q_lens(self) -> tuple[int, ...]:
        """(B,) new tokens of each row, padded rows included"""
        assert self.batch.view is not None and self.batch.view.q_lens_host is not None
        return self.batch.view.q_lens_host

    @property
    def real_tokens(self) -> int:
        """Number of tokens in real rows."""
        return sum(self.q_lens[: self.batch.size])


@dataclass(frozen=True, slots=True)
class LayerCall:
    """The inputs of a backend for one layer, copied before it runs."""

    backend: str
    """The label of the backend that serves"""
    layer_id: int
    real_tokens: int
    """How many of its tokens are not padding; they come first"""


class StepListener(Protocol):
    """Receives the observed steps and calls of one role. No method may raise: serving must go on."""

    def wants(self, number: int) -> bool:
        """Is this step of interest?"""
        ...

    def begin(self, step: Any) -> bool:
        """A step of interest begins; its batch has a view. False = this step is not of interest after all."""
        ...

    def layer(self, step: Any, call: Any, out: torch.Tensor | None, error: str) -> None:
        """The backend returned ``out`` (T, ...), or raised ``error``."""
        ...

    def end(self, step: Any, completed: bool) -> None:
        """The step has no more layers; ``completed``: it did not raise."""
        ...


@dataclass(frozen=True, slots=True)
class ActiveStep:
    """The step that runs now, and the listeners that want it."""

    step: Any
    listeners: Sequence[StepListener]

    def run(self, call: LayerCall, forward: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Run one layer's backend and notify the listeners."""
        try:
            out = forward()
        except Exception as error:
            self._notify(call, None, f"{type(error).__name__}: {error}")
            raise
        self._notify(call, out, "")
        return out

    def _notify(self, call: LayerCall, out: torch.Tensor | None, error: str) -> None:
        for listener in self.listeners:
            listener.layer(self.step, call, out, error)


class RoleObserver(ABC):
    """Wraps the backends of one role and notifies listeners of what they do in the steps that these want."""

    def __init__(self, listeners: Sequence[StepListener]) -> None:
        self._listeners = tuple(listeners)
        self.active: ActiveStep | None = None

    @abstractmethod
    def wrap(self, backend: Any, label: str) -> Any:
        """An observed backend that calls this one."""

    @abstractmethod
    def step_of(self, number: int, batch: Batch) -> ObservedStep:
        """A batch with its view, as listeners of this role see it."""

    def begin(self, number: int, batch: Batch) -> None:
        """An eager step begins."""
        interested = [listener for listener in self._listeners if listener.wants(number)]
        if interested:
            step = self.step_of(number, batch)
            listeners = [listener for listener in interested if listener.begin(step)]
            self.active = ActiveStep(step, listeners) if listeners else None

    def end(self, completed: bool) -> None:
        """The step is over."""
        active, self.active = self.active, None
        if active is not None:
            for listener in active.listeners:
                listener.end(active.step, completed)
