"""Who looks at this engine's attention: the recorder of capsules, and a second backend beside the one that serves.

Imported only where the config asks for one of them.
"""

from __future__ import annotations

import importlib.metadata
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minisgl_core import __version__
from minisgl_core.capsule.record import Recorder
from minisgl_core.capsule.shadow import Shadow, ShadowCandidate
from minisgl_core.capsule.steps import StepChoice
from minisgl_core.capsule.watch import AttentionWatch
from minisgl_core.env import ENV
from minisgl_core.registry import build

from .planning import shadow_choices

if TYPE_CHECKING:
    from collections.abc import Mapping

    from minisgl_core.modelconfig import ModelConfig
    from minisgl_core.plugin_api import KVPool, Phase
    from minisgl_core.registry import Plan

    from .config import EngineConfig
    from .setups import Setups

__all__ = ["Watching"]

logger = logging.getLogger(__name__)


class Watching:
    """What the config asks for; ``attention`` sees the steps.

    A shadow runs on rank 0 alone: attention needs no other rank. Each rank records its own heads.
    """

    def __init__(self, config: EngineConfig, plan: Plan, model: ModelConfig, setups: Setups) -> None:
        origin = _origin(config, plan)
        setup = setups.attention(plan.page_size)
        self.recorder: Recorder | None = None
        self.shadow: Shadow | None = None
        folder = Path(config.record) if config.record else ENV.CACHE_DIR.value / "capsules"
        if config.record:
            rank, size = config.tp_info
            suffix = f"-rank{rank}" if size > 1 else ""
            steps = StepChoice.parse(config.record_steps)
            self.recorder = Recorder(folder, steps, config.record_max_mb, setup, plan.page_size, origin, suffix)
            if config.tp_info.is_primary:
                logger.warning("recording to %s: all steps run eagerly, without graphs", config.record)
        if config.shadow and config.tp_info.is_primary:
            candidates = _candidates(shadow_choices(config, model, plan), plan, setups)
            self.shadow = Shadow(candidates, config.shadow_every, folder, setup, plan.page_size, origin)
            logger.info("shadow attention %s, on every %s. eager step", self.shadow.report.backend, config.shadow_every)
        self.attention = AttentionWatch([item for item in (self.recorder, self.shadow) if item is not None])

    def bind(self, pool: KVPool) -> None:
        """The pool exists now."""
        if self.shadow is not None:
            self.shadow.bind(pool)

    def close(self) -> None:
        """Free the shadow backend; its report stays."""
        if self.shadow is not None:
            self.shadow.close()


def _candidates(choices: Mapping[Phase, Any], plan: Plan, setups: Setups) -> dict[Phase, ShadowCandidate]:
    built: dict[Any, ShadowCandidate] = {}
    for choice in choices.values():
        page_size = choice.page_size or plan.page_size
        key = (choice.label, page_size)
        if key not in built:
            built[key] = ShadowCandidate(build(choice, setups.attention(page_size)), page_size, choice.label)
    return {phase: built[choice.label, choice.page_size or plan.page_size] for phase, choice in choices.items()}


def _origin(config: EngineConfig, plan: Plan) -> dict[str, Any]:
    """What a capsule says of the engine that it comes from."""
    return {
        "architecture": plan.architecture,
        "device": plan.device,
        "rank": config.tp_info.rank,
        "versions": {"minisgl-core": __version__, "torch": importlib.metadata.version("torch")},
        "plan": plan.to_json(),
    }
