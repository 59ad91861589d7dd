"""The settings of step recordings and of a shadow backend, from which an engine's observer is made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from minisgl_core.engine.checks import check_choice, check_integer, check_kind, check_mapping
from minisgl_core.errors import ConfigError, nearest

from .steps import RECORDED_ROLES, StepChoice

if TYPE_CHECKING:
    from minisgl_core.engine.observer import ObservedEngine
    from minisgl_core.plugin_api import Role

    from .observer import StepObserver

__all__ = ["Instrumentation"]


@dataclass(frozen=True, slots=True)
class Instrumentation:
    """A :class:`~minisgl_core.engine.observer.ObserverFactory` for step recordings (capsules) and a shadow backend.

    Raises :class:`ConfigError` for a wrong value.
    """

    record: str | Path | None = None
    """Folder for capsules of chosen steps; recording forces eager steps. None = do not record."""
    record_role: Literal["attention", "moe"] = "attention"
    """What the capsules hold. Those of experts need the weights of all experts once more, in host memory."""
    record_steps: str = "first:8"
    """``first:N``, ``every:N``, or the numbers of steps such as ``0,5,7``"""
    record_max_mb: int = 256
    """Steps whose capsule would be larger are skipped."""
    shadow: Mapping[str, Any] = field(default_factory=dict)
    """``{ROLE: NAME, "every": N}``: compare a second backend on every N-th eager step. ROLE: attention or moe."""

    def __post_init__(self) -> None:
        if self.record is not None:
            check_kind("record", self.record, (str, Path), "give a folder, or None")
        check_choice("record_role", self.record_role, RECORDED_ROLES)
        check_kind("record_steps", self.record_steps, str, "use such as first:8, every:100 or 0,5,7")
        StepChoice.parse(self.record_steps)
        check_integer("record_max_mb", self.record_max_mb, 1)
        check_mapping("shadow", self.shadow, 'give {"attention": "NAME"}')
        if self.shadow:
            self._check_shadow()

    def _check_shadow(self) -> None:
        known = (*RECORDED_ROLES, "every")
        for key in self.shadow:
            if key not in known:
                raise ConfigError(
                    f"unknown key {key!r} in `shadow`",
                    field=f"shadow.{key}",
                    value=self.shadow[key],
                    remedy=nearest(key, known) or f"it has {', '.join(known)}",
                )
        if all(role in self.shadow for role in RECORDED_ROLES):
            raise ConfigError(
                f"`shadow` names a backend for each of {' and '.join(RECORDED_ROLES)}",
                field="shadow",
                value=dict(self.shadow),
                remedy="compare one at a time",
            )
        name = self.shadow.get(self.shadow_role)
        if not isinstance(name, str) or name in ("", "auto"):
            raise ConfigError(
                f"`shadow.{self.shadow_role}` is {name!r}",
                field=f"shadow.{self.shadow_role}",
                value=name,
                remedy="name the backend to compare",
            )
        check_integer("shadow.every", self.shadow_every, 1)

    @property
    def shadow_role(self) -> Role:
        """The role of the backend that is compared."""
        return next((role for role in RECORDED_ROLES if role in self.shadow), RECORDED_ROLES[0])

    @property
    def shadow_every(self) -> int:
        """One in this many eager steps is compared."""
        every = self.shadow.get("every", 1)
        return int(every) if isinstance(every, str) and every.isdecimal() else every

    @property
    def active(self) -> bool:
        """Is there anything to record or to compare?"""
        return bool(self.record or self.shadow)

    @property
    def forces_eager(self) -> bool:
        """A recording needs every layer's call. A shadow leaves the steps in graphs alone."""
        return bool(self.record)

    def __call__(self, engine: ObservedEngine) -> StepObserver:
        from .observer import StepObserver  # with the conformance kit, which no other engine needs

        return StepObserver(self, engine)
