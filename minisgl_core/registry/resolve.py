"""From a query to a plan: check the config's names, solve, probe the chosen, solve again without those that failed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from packaging.utils import canonicalize_name

from minisgl_core import __version__
from minisgl_core.errors import BackendError, ConfigError
from minisgl_core.plugin_api import Reason, Role

from .checks import run_checks
from .loader import discover
from .matching import kernel_page_size
from .named import check_used, named_by
from .options import check_options, options_for
from .plan import Bucket, Choice, Plan
from .probe import ProbeRequest, run_probes
from .query import Joint, PlanEntry, PlanQuery, rank_heads
from .ranking import AUTO, check_backends, selects
from .records import Candidate, PluginRecord, Registry
from .refusal import refusal, unknown_backend
from .remarks import remarks
from .requirements import Environment, Installed
from .solve import Solution, Verdict, solve

__all__ = [
    "Prober",
    "check_choice",
    "check_query",
    "choice_of",
    "plan_of",
    "probe_request",
    "resolve_loop",
    "resolve_plan",
]

Prober = Callable[[Sequence[ProbeRequest]], Mapping[str, Reason]]
"""Runs probes; returns the refusals by :attr:`ProbeRequest.key`."""

logger = logging.getLogger("minisgl.registry")


def resolve_plan(
    query: PlanQuery,
    registry: Registry | None = None,
    *,
    environment: Environment | None = None,
    prober: Prober | None = None,
) -> Plan:
    """The plan for a query. Logs fallbacks and failed plugins and tells the observers.

    Raises :class:`BackendError`, with every candidate's reasons, if there is none, and :class:`ConfigError` for a
    config that makes no sense.
    """
    if registry is None:
        registry = discover(allow=query.allow, deny=query.deny)
    registry = registry.restricted(query.allow, query.deny)
    environment = environment or Installed()
    check_query(query, registry)
    for plugin in registry.failures():
        logger.warning("plugin %s is not used: %s", plugin.distribution, plugin.failure)
    solution = resolve_loop(query, registry, environment, prober or run_probes)
    if solution.conflict:
        raise refusal(query, solution, registry, environment)
    plan = plan_of(query, solution)
    for line in (*plan.fallbacks, *remarks(query, solution)):
        logger.warning("%s", line)
    registry.announce(plan.to_json())
    return plan


def resolve_loop(
    query: PlanQuery, registry: Registry, environment: Environment | None, prober: Prober | None
) -> Solution:
    """Solve, strike what its own check or probe refuses, and solve again. It may end in a conflict.

    Without an environment (the device is not here) nothing is checked, without a prober nothing is probed.
    """
    struck: dict[str, Reason] = {}
    passed: set[str] = set()
    while True:
        solution = solve(query, registry, environment, struck)
        chosen = [verdict.candidate for some in solution.by_batch(query).values() for _, verdict in some]
        asked = {candidate.key: candidate for candidate in chosen if candidate.key not in passed}
        refused: Mapping[str, Reason] = {} if environment is None else run_checks(asked.values())
        if prober is not None and not refused:
            requests = [probe_request(candidate, query, solution.joint) for candidate in asked.values()]
            requests = [request for request in requests if request.probe]
            refused = prober(requests) if requests else {}
            passed.update(asked)
        struck.update(refused)
        if not refused:
            return solution


def probe_request(candidate: Candidate, query: PlanQuery, joint: Joint) -> ProbeRequest:
    """What a candidate's probe is asked; its ``probe`` is empty if it has none."""
    q_heads, kv_heads = rank_heads(query)
    facts: dict[str, Any] = {
        "role": candidate.spec.role,
        "name": candidate.spec.name,
        "variant": candidate.spec.variant,
        "device": {"kind": query.device.kind, "sm": query.device.sm, "name": query.device.name},
        "dtype": query.dtype,
        "kv_dtype": query.pool_dtype,
        "q_heads": q_heads,
        "kv_heads": kv_heads,
        "head_dim": query.model.head_dim,
        "page_size": joint.page_size,
        "kv_layout": joint.kv_layout,
    }
    return ProbeRequest(candidate.key, candidate.spec.probe or "", facts, candidate.version, query.device.driver)


def plan_of(query: PlanQuery, solution: Solution) -> Plan:
    """A solution as a plan."""
    return Plan(
        page_size=solution.joint.page_size,
        kv_layout=solution.joint.kv_layout,
        graph=solution.joint.graph,
        dtype=query.dtype,
        kv_dtype=query.pool_dtype,
        tp_size=query.tp_size,
        device=str(query.device),
        architecture=query.model.architecture,
        core_version=__version__,
        buckets=tuple(
            bucket
            for entry, verdicts in solution.by_batch(query).items()
            for bucket in _buckets(entry, verdicts, query, solution.joint.page_size)
        ),
        fallbacks=_fallbacks(query, solution),
    )


def _buckets(
    entry: PlanEntry, verdicts: Sequence[tuple[int | None, Verdict]], query: PlanQuery, pool_page_size: int
) -> list[Bucket]:
    buckets, low = [], 1
    for largest, verdict in verdicts:
        rows = None if largest is None else (low, largest)
        buckets.append(Bucket(entry, choice_of(verdict, query, pool_page_size), rows))
        low = (largest or low) + 1
    return buckets


def choice_of(verdict: Verdict, query: PlanQuery, pool_page_size: int) -> Choice:
    """A verdict without reasons as a plan holds it."""
    candidate, box = verdict.candidate, verdict.box
    if box is None:
        raise AssertionError(f"{candidate.key} was chosen although it does not fit")
    spec = candidate.spec
    return Choice(
        role=spec.role,
        name=spec.name,
        variant=spec.variant,
        distribution=candidate.distribution,
        version=candidate.version,
        factory=spec.factory,
        options_model=spec.options,
        options=options_for(candidate, query.options),
        ops=tuple(box.ops),
        page_size=kernel_page_size(box.page_sizes, pool_page_size),
        host_plan=box.host_plan,
        finite_tail=box.finite_tail,
        tolerance=box.tolerance,
        graph=box.graph,
    )


def _fallbacks(query: PlanQuery, solution: Solution) -> tuple[str, ...]:
    lines = []
    for field in solution.fields:
        taken = solution.chosen[field.entry].candidate
        place = field.selection.place(taken) or 0
        for verdict in field.verdicts(query, solution.joint) if place else ():
            if (field.selection.place(verdict.candidate) or 0) < place:
                why = "; ".join(str(reason) for reason in verdict.reasons) or "it does not go with the other choices"
                lines.append(f"{field.entry.label}: {verdict.candidate.label} cannot run ({why}); using {taken.label}")
    return tuple(lines)


def check_query(query: PlanQuery, registry: Registry) -> None:
    """Refuse what no solve could make sense of: names that are unknown or that this model has no use for, options of
    nobody, heads that cannot be cut.
    """
    if query.page_size != "auto" and query.page_size < 1:
        raise ConfigError(
            f"page_size {query.page_size} is not positive",
            field="page_size",
            value=query.page_size,
            remedy="use auto, or a number of tokens such as 16",
        )
    rank_heads(query)
    allowed = {canonicalize_name(name) for name in query.allow or ()}
    for plugin in registry.failures():
        if canonicalize_name(plugin.distribution) in allowed:
            raise _asked_for(plugin, "plugins.allow")
    check_choice(query.backends, query.options, registry, query.device.kind)
    check_used(query, registry)


def check_choice(backends: Mapping[str, Any], options: Mapping[str, Any], registry: Registry, device_kind: str) -> None:
    """What can be wrong with a choice of backends whatever the model: unknown roles and names, options of nobody."""
    check_backends(backends)
    for named in named_by(backends):
        for name in named.names:
            if name != AUTO:
                _check_name(named.role, name, device_kind, registry)
    check_options(options, registry)


def _check_name(role: Role, text: str, device_kind: str, registry: Registry) -> None:
    if any(selects(text, candidate) for candidate in registry.candidates(role)):
        return
    _, _, distribution = text.partition("@")
    for plugin in registry.failures():
        if distribution and canonicalize_name(plugin.distribution) == canonicalize_name(distribution):
            raise _asked_for(plugin, f"backends.{role}")
    raise unknown_backend(role, text, device_kind, registry)


def _asked_for(plugin: PluginRecord, setting: str) -> BackendError:
    return BackendError(
        f"plugin {plugin.distribution}, named by {setting}, failed to load: {plugin.failure}",
        field=setting,
        value=plugin.distribution,
        remedy="repair or remove it, or do not name it",
    )
