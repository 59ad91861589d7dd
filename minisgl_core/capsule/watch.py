"""Looking over the shoulder of an engine's backends: what they are given and return, layer by layer.

Only eager steps can be watched. Without a watcher neither the model nor a backend is wrapped, and nothing here runs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from minisgl_core.core import Batch
from minisgl_core.plugin_api import Phase

__all__ = ["ActiveStep", "LayerCall", "RoleWatch", "WatchedModel", "WatchedStep", "Watcher"]


@dataclass(frozen=True, slots=True)
class WatchedStep:
    """One eager step, as one role sees it."""

    number: int
    label: str
    """Of the backend that serves it"""
    batch: Batch

    @property
    def phase(self) -> Phase:
        return self.batch.phase

    @property
    def uids(self) -> tuple[int, ...]:
        return tuple(req.uid for req in self.batch.reqs)

    @property
    def q_lens(self) -> tuple[int, ...]:
        """(B,) padded rows included"""
        assert self.batch.view is not None and self.batch.view.q_lens_host is not None
        return self.batch.view.q_lens_host

    @property
    def real_tokens(self) -> int:
        """Of the rows that are no padding."""
        return sum(self.q_lens[: self.batch.size])


@dataclass(frozen=True, slots=True)
class LayerCall:
    """What a backend is given for one layer, copied before it runs."""

    layer_id: int
    real_tokens: int
    """Of its tokens, those that are no padding; they come first"""


class Watcher(Protocol):
    """Someone who looks. No method may raise: serving goes on whatever they find. Steps and calls are of one role."""

    def wants(self, number: int) -> bool:
        """Is this step of interest?"""
        ...

    def begin(self, step: Any) -> bool:
        """A step of interest has its metadata. False = not this one after all."""
        ...

    def layer(self, step: Any, call: Any, out: torch.Tensor | None, error: str) -> None:
        """The backend returned ``out`` (T, ...), or raised ``error``."""
        ...

    def end(self, step: Any, whole: bool) -> None:
        """No more layers of this step come; ``whole``: it ran to its end."""
        ...


@dataclass(frozen=True, slots=True)
class ActiveStep:
    """A step under watch."""

    step: Any
    watchers: Sequence[Watcher]

    def run(self, call: LayerCall, forward: Callable[[], torch.Tensor]) -> torch.Tensor:
        """One layer, before witnesses."""
        try:
            out = forward()
        except Exception as error:
            self._tell(call, None, f"{type(error).__name__}: {error}")
            raise
        self._tell(call, out, "")
        return out

    def _tell(self, call: LayerCall, out: torch.Tensor | None, error: str) -> None:
        for watcher in self.watchers:
            watcher.layer(self.step, call, out, error)


class RoleWatch(ABC):
    """Who looks at the backends of one role, and the step that they look at now."""

    def __init__(self, watchers: Sequence[Watcher]) -> None:
        self._watchers = tuple(watchers)
        self.active: ActiveStep | None = None

    @abstractmethod
    def step_of(self, number: int, batch: Batch) -> WatchedStep:
        """A batch with metadata, as watchers of this role see it."""

    def begin(self, number: int, batch: Batch) -> None:
        """An eager step begins."""
        wanting = [watcher for watcher in self._watchers if watcher.wants(number)]
        if wanting:
            step = self.step_of(number, batch)
            watching = [watcher for watcher in wanting if watcher.begin(step)]
            self.active = ActiveStep(step, watching) if watching else None

    def end(self, whole: bool) -> None:
        """It is over."""
        active, self.active = self.active, None
        if active is not None:
            for watcher in active.watchers:
                watcher.end(active.step, whole)


class WatchedModel:
    """A model that counts its eager steps and tells when they begin and end."""

    def __init__(self, model: Any, watches: Sequence[RoleWatch]) -> None:
        self._model, self._watches = model, tuple(watches)
        self._next = 0

    def bind_kv(self) -> None:
        self._model.bind_kv()

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """The model's head."""
        logits: torch.Tensor = self._model.logits(hidden)
        return logits

    def forward(self, batch: Batch) -> torch.Tensor:
        """The model's logits."""
        if batch.captured:
            captured: torch.Tensor = self._model.forward(batch)
            return captured
        number, self._next = self._next, self._next + 1
        whole = False
        try:
            for watch in self._watches:
                watch.begin(number, batch)
            logits: torch.Tensor = self._model.forward(batch)
            whole = True
            return logits
        finally:
            for watch in self._watches:
                watch.end(whole)
