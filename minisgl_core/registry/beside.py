"""A backend beside a plan: chosen by name, for what a plan has chosen something else for already."""

from __future__ import annotations

from collections.abc import Sequence

from minisgl_core.plugin_api import Reason

from .checks import run_checks
from .loader import discover
from .plan import Choice, Plan
from .probe import run_probes
from .query import Joint, PlanEntry, PlanQuery
from .ranking import Selection
from .records import Registry
from .refusal import unknown_backend
from .requirements import Environment, Installed
from .resolve import Prober, choice_of, probe_request
from .solve import Verdict, verdicts_of

__all__ = ["choice_beside"]


def choice_beside(
    plan: Plan,
    query: PlanQuery,
    entry: PlanEntry,
    name: str,
    registry: Registry | None = None,
    *,
    environment: Environment | None = None,
    prober: Prober = run_probes,
) -> tuple[Choice | None, Sequence[Reason]]:
    """The backend ``name`` for a plan entry, on the pool of this plan and without graphs; or why it cannot serve there.

    Raises :class:`~minisgl_core.errors.BackendError` for a name that nobody offers.
    """
    registry = registry or discover(allow=query.allow, deny=query.deny)
    joint = Joint(plan.page_size, plan.kv_layout, graph=False)
    verdicts = verdicts_of(entry, Selection((name,)), query, joint, registry, environment or Installed())
    if not verdicts:
        raise unknown_backend(entry.role, name, query.device.kind, registry)
    reasons: list[Reason] = []
    for verdict in verdicts:
        refused = verdict.reasons or _probed(verdict, query, joint, prober)
        if not refused:
            return choice_of(verdict, query, plan.page_size), ()
        reasons.extend(refused)
    return None, reasons


def _probed(verdict: Verdict, query: PlanQuery, joint: Joint, prober: Prober) -> tuple[Reason, ...]:
    request = probe_request(verdict.candidate, query, joint)
    refused = run_checks([verdict.candidate]) or (prober([request]) if request.probe else {})
    return tuple(refused.values())
