"""The engine's observer that records steps and compares a second backend with the one that serves."""

from __future__ import annotations

import importlib.metadata
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minisgl_core import __version__
from minisgl_core.env import ENV
from minisgl_core.errors import ConfigError
from minisgl_core.files import require_writable_folder

from .attention.make import AttentionMaker
from .attention.observer import AttentionObserver
from .candidate import build_candidate
from .moe.make import MoEMaker
from .moe.observer import MoEObserver
from .record import CapsuleMaker, Recorder
from .roles import ROLES
from .shadow import Shadow
from .steps import StepChoice

if TYPE_CHECKING:
    from minisgl_core.core import Batch
    from minisgl_core.engine.observer import ObservedEngine, ViewInPages
    from minisgl_core.plugin_api import KVPool, Role

    from .instrumentation import Instrumentation
    from .role_observer import RoleObserver, StepListener
    from .shadow import ShadowReport

__all__ = ["StepObserver"]

logger = logging.getLogger(__name__)


class StepObserver:
    """A :class:`~minisgl_core.engine.observer.Observer` of the roles that the settings name; it counts eager steps.

    A shadow runs on rank 0 alone: no role that can have one needs the other ranks. Each rank records its own heads, or
    its own part of the experts.
    """

    def __init__(self, settings: Instrumentation, engine: ObservedEngine) -> None:
        self._settings, self._engine = settings, engine
        self._folder, self._origin = _capsule_folder(settings), _origin(engine)
        self._steps = 0
        self.recorder = self._make_recorder() if settings.record else None
        self.shadow = self._make_shadow() if settings.shadow and engine.config.tp_info.is_primary else None
        self._roles: dict[Role, RoleObserver] = {}
        attention, moe = self._listeners("attention"), self._listeners("moe")
        if attention:
            self._roles["attention"] = AttentionObserver(attention)
        if moe:
            logger.warning("moe is observed: the weights of all experts are kept in host memory once more")
            self._roles["moe"] = MoEObserver(moe, self.shadow if self.shadow in moe else None)

    def _listeners(self, role: Role) -> list[StepListener]:
        settings = self._settings
        wanted = ((settings.record_role, self.recorder), (settings.shadow_role, self.shadow))
        return [listener for of, listener in wanted if listener is not None and of == role]

    def _make_recorder(self) -> Recorder:
        settings, tp = self._settings, self._engine.config.tp_info
        maker = self._make_maker(settings.record_role, "record_role")
        if tp.is_primary:
            logger.warning("recording to %s: all steps run eagerly, without graphs", settings.record)
        steps, suffix = StepChoice.parse(settings.record_steps), f"-rank{tp.rank}" if tp.size > 1 else ""
        return Recorder(self._folder, steps, settings.record_max_mb, maker, self._origin, suffix)

    def _make_shadow(self) -> Shadow:
        settings, role = self._settings, self._settings.shadow_role
        maker = self._make_maker(role, f"shadow.{role}")
        candidate = build_candidate(self._engine, role, settings.shadow[role])
        logger.info("shadow %s %s, on every %s. eager step", role, candidate.label, settings.shadow_every)
        stated = max(choice.tolerance for choice in self._engine.plan.choices(role))
        kind = ROLES[role].capsule
        return Shadow(candidate, settings.shadow_every, self._folder, kind, maker, self._origin, stated)

    def _make_maker(self, role: Role, field: str) -> CapsuleMaker:
        backends, page_size, model = self._engine.backends, self._engine.plan.page_size, self._engine.model
        if role == "attention":
            return AttentionMaker(backends.attention_setup(page_size), page_size)
        if model.moe is None:
            raise ConfigError(
                f"`{field}` needs experts, and {model.architecture} has none",
                field=field,
                value=role,
                remedy="name attention, or a model with experts",
            )
        return MoEMaker(backends.moe_setup(), len(model.moe.layers))

    # The engine's protocol.

    @property
    def needs_finite_tail(self) -> bool:
        return self.shadow is not None and self.shadow.needs_finite_tail

    def wrap(self, role: Role, backend: Any, label: str) -> Any:
        return self._roles[role].wrap(backend, label) if role in self._roles else backend

    def bind(self, pool: KVPool, view_in_pages: ViewInPages) -> None:
        attention = self._roles.get("attention")
        if isinstance(attention, AttentionObserver):
            attention.bind(pool, view_in_pages)
        if self.shadow is not None:
            self.shadow.bind(pool)

    def begin_step(self, batch: Batch) -> None:
        number, self._steps = self._steps, self._steps + 1
        for role in self._roles.values():
            role.begin(number, batch)

    def end_step(self, batch: Batch, completed: bool) -> None:
        for role in self._roles.values():
            role.end(completed)

    def close(self) -> None:
        """Free the shadow backend; its report stays."""
        if self.shadow is not None:
            self.shadow.close()

    # What was found.

    @property
    def shadow_report(self) -> ShadowReport | None:
        """What the second backend has shown so far; None without one."""
        return None if self.shadow is None else self.shadow.report


def _capsule_folder(settings: Instrumentation) -> Path:
    """The folder for capsules, created and tried: the first one is written long after the weights were read.

    Raises :class:`~minisgl_core.errors.UsageError` if nothing can be written there.
    """
    if settings.record:
        folder = Path(settings.record)
        require_writable_folder(folder, "capsules", field="record")
        return folder
    folder, variable = ENV.CACHE_DIR.value / "capsules", ENV.CACHE_DIR.name
    require_writable_folder(
        folder, "capsules", field=variable, remedy=f"set {variable} to a folder that you may write to"
    )
    return folder


def _origin(engine: ObservedEngine) -> dict[str, Any]:
    """What a capsule records about the engine that it comes from."""
    return {
        "architecture": engine.plan.architecture,
        "device": engine.plan.device,
        "rank": engine.config.tp_info.rank,
        "versions": {"minisgl-core": __version__, "torch": importlib.metadata.version("torch")},
        "plan": engine.plan.to_json(),
    }
