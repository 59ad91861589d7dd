"""Who looks at this engine's backends: the recorder of capsules, and a second backend beside the one that serves.

Imported only where the config asks for one of them.
"""

from __future__ import annotations

import importlib.metadata
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minisgl_core import __version__
from minisgl_core.capsule.attention.candidate import AttentionCandidate, PhaseBackend
from minisgl_core.capsule.attention.make import AttentionMaker
from minisgl_core.capsule.attention.watch import AttentionWatch
from minisgl_core.capsule.moe.candidate import MoECandidate
from minisgl_core.capsule.moe.make import MoEMaker
from minisgl_core.capsule.moe.watch import MoEWatch, WatchedExperts
from minisgl_core.capsule.record import CapsuleMaker, Recorder
from minisgl_core.capsule.roles import ROLES
from minisgl_core.capsule.shadow import Shadow
from minisgl_core.capsule.steps import StepChoice
from minisgl_core.capsule.watch import RoleWatch, WatchedModel
from minisgl_core.env import ENV
from minisgl_core.errors import ConfigError
from minisgl_core.files import require_writable_folder
from minisgl_core.registry import build

from .planning import shadow_choices

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from minisgl_core.capsule.watch import Watcher
    from minisgl_core.modelconfig import ModelConfig
    from minisgl_core.plugin_api import KVPool, MoEExecutor, Phase, Role
    from minisgl_core.registry import Plan, PlanEntry

    from .config import EngineConfig
    from .setups import Setups

__all__ = ["Watching"]

logger = logging.getLogger(__name__)


class Watching:
    """What the config asks for. ``attention`` sees attention's layers, if anybody looks at them.

    A shadow runs on rank 0 alone: no role that can have one needs the other ranks. Each rank records its own heads, or
    its own part of the experts.
    """

    def __init__(self, config: EngineConfig, plan: Plan, model: ModelConfig, setups: Setups) -> None:
        self._config, self._plan, self._model, self._setups = config, plan, model, setups
        self._folder = _capsule_folder(config)
        self._origin = _origin(config, plan)
        self._candidate: AttentionCandidate | MoECandidate | None = None
        self.needs_finite_tail = False
        """Does an attention backend that only looks on need the unused tail of a page finite?"""
        watchers: dict[Role, list[Watcher]] = {"attention": [], "moe": []}
        self.recorder = self._recorder() if config.record else None
        if self.recorder is not None:
            watchers[config.record_role].append(self.recorder)
        self.shadow = self._shadow() if config.shadow and config.tp_info.is_primary else None
        if self.shadow is not None:
            watchers[config.shadow_role].append(self.shadow)
        self.attention = AttentionWatch(watchers["attention"]) if watchers["attention"] else None
        self._experts = self._watch_experts(watchers["moe"]) if watchers["moe"] else None

    def _recorder(self) -> Recorder:
        config = self._config
        maker = self._maker(config.record_role, "record_role")
        rank, size = config.tp_info
        if config.tp_info.is_primary:
            logger.warning("recording to %s: all steps run eagerly, without graphs", config.record)
        steps, suffix = StepChoice.parse(config.record_steps), f"-rank{rank}" if size > 1 else ""
        return Recorder(self._folder, steps, config.record_max_mb, maker, self._origin, suffix)

    def _shadow(self) -> Shadow:
        config, role = self._config, self._config.shadow_role
        maker = self._maker(role, f"shadow.{role}")
        choices = shadow_choices(config, self._model, self._plan)
        if role == "attention":
            self.needs_finite_tail = any(choice.finite_tail for choice in choices.values())
            self._candidate = AttentionCandidate(_by_phase(choices, self._plan, self._setups))
        else:
            (choice,) = choices.values()
            self._candidate = MoECandidate(build(choice, self._setups.moe()), choice.label)
        logger.info("shadow %s %s, on every %s. eager step", role, self._candidate.label, config.shadow_every)
        kind = ROLES[role].capsule
        return Shadow(self._candidate, config.shadow_every, self._folder, kind, maker, self._origin)

    def _maker(self, role: Role, field: str) -> CapsuleMaker:
        if role == "attention":
            page_size = self._plan.page_size
            return AttentionMaker(self._setups.attention(page_size), page_size)
        moe = self._model.moe
        if moe is None:
            raise ConfigError(
                f"`{field}` asks for experts, and {self._model.architecture} has none",
                field=field,
                value=role,
                remedy="name attention, or a model with experts",
            )
        return MoEMaker(self._setups.moe(), len(moe.layers))

    def _watch_experts(self, watchers: list[Watcher]) -> MoEWatch:
        label = self._plan.choice("moe").label
        logger.warning("moe is watched: the weights of all experts are kept in host memory once more")
        return MoEWatch(watchers, label, self._prepare if isinstance(self._candidate, MoECandidate) else None)

    def _prepare(self, layer_id: int, w13: torch.Tensor, w2: torch.Tensor) -> None:
        candidate, shadow = self._candidate, self.shadow
        assert isinstance(candidate, MoECandidate) and shadow is not None
        shadow.tell("prepare_weights", lambda: candidate.prepare_weights(layer_id, w13, w2))

    def experts(self, executor: MoEExecutor | None) -> MoEExecutor | None:
        """The executor, watched if anybody looks at it."""
        return executor if executor is None or self._experts is None else WatchedExperts(executor, self._experts)

    def model(self, model: Any) -> WatchedModel:
        """The model whose steps are counted."""
        watches: list[RoleWatch] = [watch for watch in (self.attention, self._experts) if watch is not None]
        return WatchedModel(model, watches)

    def bind(self, pool: KVPool) -> None:
        """The pool exists now."""
        candidate = self._candidate
        if self.shadow is not None and isinstance(candidate, AttentionCandidate):
            self.shadow.tell("bind_kv", lambda: candidate.bind(pool))

    def close(self) -> None:
        """Free the shadow backend; its report stays."""
        if self.shadow is not None:
            self.shadow.close()


def _capsule_folder(config: EngineConfig) -> Path:
    """Where capsules go, made and tried out: steps are run long after the weights were read.

    Raises :class:`~minisgl_core.errors.UsageError` if nothing can be written there.
    """
    if config.record:
        folder = Path(config.record)
        require_writable_folder(folder, "capsules", field="record")
        return folder
    folder, variable = ENV.CACHE_DIR.value / "capsules", ENV.CACHE_DIR.name
    require_writable_folder(
        folder, "capsules", field=variable, remedy=f"set {variable} to a folder that you may write to"
    )
    return folder


def _by_phase(choices: Mapping[PlanEntry, Any], plan: Plan, setups: Setups) -> dict[Phase, PhaseBackend]:
    built: dict[Any, PhaseBackend] = {}
    found: dict[Phase, PhaseBackend] = {}
    for entry, choice in choices.items():
        page_size = choice.page_size or plan.page_size
        key = (choice.label, page_size)
        if key not in built:
            built[key] = PhaseBackend(build(choice, setups.attention(page_size)), page_size, choice.label)
        assert entry.phase is not None
        found[entry.phase] = built[key]
    return found


def _origin(config: EngineConfig, plan: Plan) -> dict[str, Any]:
    """What a capsule says of the engine that it comes from."""
    return {
        "architecture": plan.architecture,
        "device": plan.device,
        "rank": config.tp_info.rank,
        "versions": {"minisgl-core": __version__, "torch": importlib.metadata.version("torch")},
        "plan": plan.to_json(),
    }
