"""Building the second backend of a shadow, on the pool of the plan that serves."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from minisgl_core.builtin.devices import detect_device
from minisgl_core.engine.plan_resolution import plan_query
from minisgl_core.errors import BackendError
from minisgl_core.registry import PlanEntry, build
from minisgl_core.registry.resolve import alternate_choice

from .attention.candidate import AttentionCandidate, PhaseBackend
from .moe.candidate import MoECandidate

if TYPE_CHECKING:
    from minisgl_core.engine.observer import ObservedEngine
    from minisgl_core.plugin_api import Phase, Role
    from minisgl_core.registry import Choice

__all__ = ["build_candidate"]

logger = logging.getLogger(__name__)
PHASES: Final[tuple[Phase, ...]] = ("prefill", "decode")


def build_candidate(engine: ObservedEngine, role: Role, name: str) -> AttentionCandidate | MoECandidate:
    """The backend ``name`` of role attention or moe, for all that it can serve on the engine's pool.

    Raises :class:`~minisgl_core.errors.BackendError` with all reasons if there is nothing that it can serve.
    """
    choices = _choices(engine, role, name)
    if role == "moe":
        (choice,) = choices.values()
        return MoECandidate(build(choice, engine.backends.moe_setup()), choice.label, choice.tolerance)
    finite_tail = any(choice.finite_tail for choice in choices.values())
    tolerance = max(choice.tolerance for choice in choices.values())
    return AttentionCandidate(_by_phase(engine, choices), finite_tail, tolerance)


def _choices(engine: ObservedEngine, role: Role, name: str) -> Mapping[PlanEntry, Choice]:
    """By plan entry, the phases of attention or moe as a whole."""
    query = plan_query(engine.config, engine.model, detect_device(engine.config.device))
    entries = [PlanEntry(role, phase=phase) for phase in PHASES] if role == "attention" else [PlanEntry(role)]
    found: dict[PlanEntry, Choice] = {}
    reasons: list[str] = []
    for entry in entries:
        choice, why = alternate_choice(engine.plan, query, entry, name)
        reasons.extend(f"{entry.phase or role}: {reason}" for reason in why)
        if choice is not None:
            found[entry] = choice
    if not found:
        raise BackendError(
            f"the shadow {role} backend {name!r} cannot run with this plan: {'; '.join(reasons)}",
            field=f"shadow.{role}",
            value=name,
            remedy="name another, or none",
        )
    for entry in (entry for entry in entries if entry not in found):
        logger.warning("the shadow %s backend %s does not serve %s: %s", role, name, entry.phase, "; ".join(reasons))
    return found


def _by_phase(engine: ObservedEngine, choices: Mapping[PlanEntry, Choice]) -> dict[Phase, PhaseBackend]:
    built: dict[Any, PhaseBackend] = {}
    found: dict[Phase, PhaseBackend] = {}
    for entry, choice in choices.items():
        page_size = choice.page_size or engine.plan.page_size
        key = (choice.label, page_size)
        if key not in built:
            backend = build(choice, engine.backends.attention_setup(page_size))
            built[key] = PhaseBackend(backend, page_size, choice.label)
        assert entry.phase is not None
        found[entry.phase] = built[key]
    return found
