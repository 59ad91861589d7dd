"""How a tool looks into a running engine: what it sees when a step begins, at each layer's call and when a step ends.

The engine knows no tool. A config may carry an :class:`ObserverFactory`; without one no backend is wrapped, and a step
is the same call as ever.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

if TYPE_CHECKING:
    from minisgl_core.core import Batch
    from minisgl_core.modelconfig import ModelConfig
    from minisgl_core.plugin_api import BatchView, KVPool, Role, StepOutput
    from minisgl_core.registry import Plan

    from .backend_factory import BackendFactory
    from .config import EngineConfig

__all__ = ["ObservedEngine", "Observer", "ObserverFactory", "ViewInPages", "observed_step"]

ViewInPages = Callable[["Batch", int], "BatchView"]
"""An eager batch's view, its pages counted in this size"""


class ObservedEngine(NamedTuple):
    """What an observer may use of the engine that it observes, before anything of it but the device is built."""

    config: EngineConfig
    plan: Plan
    model: ModelConfig
    backends: BackendFactory


class Observer(Protocol):
    """A tool inside one rank's engine. Only eager steps are observed: a graph's replay calls no layers."""

    @property
    def needs_finite_tail(self) -> bool:
        """Does a backend of the observer's own need the unused tail of a KV page finite?"""
        ...

    def wrap(self, role: Role, backend: Any, label: str) -> Any:
        """A backend that was just built, of the plan's choice ``label``: itself, or one that calls it and is observed
        while it does.
        """
        ...

    def bind(self, pool: KVPool, view_in_pages: ViewInPages) -> None:
        """The engine's KV pool exists now."""
        ...

    def begin_step(self, batch: Batch) -> None:
        """An eager step is about to run; the batch has its inputs and its view."""
        ...

    def end_step(self, batch: Batch, completed: bool) -> None:
        """The step has returned (``completed``) or raised."""
        ...

    def close(self) -> None:
        """Free what the observer holds of the device."""
        ...


@runtime_checkable
class ObserverFactory(Protocol):
    """Makes the observer of an engine. It travels to the processes of the other ranks in the config: it can be pickled,
    and each rank makes an observer of its own.
    """

    @property
    def forces_eager(self) -> bool:
        """Must every step run eagerly? Then no graphs are captured."""
        ...

    def __call__(self, engine: ObservedEngine) -> Observer: ...


def observed_step(step: Callable[[Batch], StepOutput], observer: Observer) -> Callable[[Batch], StepOutput]:
    """``step``, between the observer's ``begin_step`` and ``end_step``."""

    def run(batch: Batch) -> StepOutput:
        completed = False
        try:
            observer.begin_step(batch)
            out = step(batch)
            completed = True
            return out
        finally:
            observer.end_step(batch, completed)

    return run
