"""The plan that each tensor-parallel rank would get, and what its backends' probes say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from minisgl_core.errors import BackendError
from minisgl_core.plugin_api import Reason
from minisgl_core.registry import DeviceFacts, Plan, PlanQuery, Registry, resolve_plan
from minisgl_core.registry.probe import ProbeRequest, run_probes

from .backends import another
from .finding import Finding
from .isolated import with_signal_names

__all__ = ["RankPlan", "plans_of_ranks"]


@dataclass(frozen=True, slots=True)
class RankPlan:
    """What one rank would run. Head counts are that rank's."""

    rank: int
    device: str
    q_heads: int
    kv_heads: int
    plan: Plan

    def to_json(self) -> dict[str, Any]:
        """As plain JSON data."""
        return {
            "rank": self.rank,
            "device": self.device,
            "q_heads": self.q_heads,
            "kv_heads": self.kv_heads,
            "digest": self.plan.digest(),
            "backends": self.plan.summary(),
        }


class _Prober:
    """Runs probes and remembers what they refused."""

    def __init__(self) -> None:
        self.refused: dict[str, Reason] = {}

    def __call__(self, requests: Sequence[ProbeRequest]) -> Mapping[str, Reason]:
        found = run_probes(requests)
        self.refused.update(found)
        return found


def plans_of_ranks(
    query: PlanQuery, registry: Registry, devices: Sequence[DeviceFacts]
) -> tuple[list[RankPlan], list[Finding]]:
    """Resolve for each rank's own device. ``devices``: those that are here; on a CPU all ranks share one.

    Raises :class:`~minisgl_core.errors.ConfigError` for a config that makes no sense.
    """
    ranks: list[RankPlan] = []
    prober, (q_heads, kv_heads) = _Prober(), query.model.rank_heads(query.tp_size)
    findings = []
    resolved: dict[DeviceFacts, Plan] = {}
    for rank in range(query.tp_size):
        device = query.device if query.device.about.on_host else next(iter(devices[rank : rank + 1]), None)
        if device is None:
            text = f"there is no device for it: {len(devices)} {query.device.kind.upper()} devices are visible"
            findings.append(Finding("wrong", "plan", f"rank {rank}", text, f"use --tp-size {max(1, len(devices))}"))
            continue
        try:
            if device not in resolved:
                resolved[device] = resolve_plan(replace(query, device=device), registry, prober=prober)
        except BackendError as error:
            remedy = error.remedy or "`minisgl explain` has all the reasons"
            findings.append(Finding("wrong", "plan", f"rank {rank}", error.message, remedy))
            break
        ranks.append(RankPlan(rank, str(device), q_heads, kv_heads, resolved[device]))
    findings.extend(_refusal(key, reason) for key, reason in prober.refused.items())
    return ranks, [*findings, *_disagreements(ranks)]


def _refusal(key: str, reason: Reason) -> Finding:
    text = with_signal_names(reason.supported if reason.code == "probe" else str(reason))
    return Finding("wrong", "probe", key, text, reason.fix or another(key))


def _disagreements(ranks: Sequence[RankPlan]) -> list[Finding]:
    """All ranks run rank 0's plan, so a device that would choose otherwise may not be able to."""
    return [
        Finding(
            "wrong",
            "plan",
            f"rank {rank.rank}",
            f"its {rank.device} would get plan {rank.plan.digest()}, rank 0's {ranks[0].device} gets another",
            "use equal devices (CUDA_VISIBLE_DEVICES), or name the backends",
        )
        for rank in ranks
        if rank.plan.digest() != ranks[0].plan.digest()
    ]
