"""From a query to a plan: check the config's names, solve, probe the chosen, solve again without those that failed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from packaging.utils import canonicalize_name

from minisgl_core import __version__
from minisgl_core.errors import BackendError, ConfigError
from minisgl_core.installation import Environment, Installed
from minisgl_core.plan import Bucket, Choice, Plan, PlanEntry
from minisgl_core.plugin_api import Reason, Role

from .discover import discover
from .matching import kernel_page_size
from .options import check_options, options_for
from .probe import ProbeRequest, probe_request, run_checks, run_probes
from .query import Joint, PlanQuery
from .records import Candidate, PluginRecord, Registry
from .refusal import refusal, unknown_backend
from .remarks import remarks
from .selection import AUTO, check_used, named_by, selects
from .solve import Solution, Verdict, fields_of, solve

__all__ = ["Prober", "alternate_choice", "check_choice", "check_query", "plan_of", "resolve_loop", "resolve_plan"]

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
    """The plan for a query. Logs fallbacks and failed plugins and notifies the observers.

    Raises :class:`BackendError`, with every candidate's reasons, if there is none, and :class:`ConfigError` for a
    config that makes no sense.
    """
    registry = (registry or discover(allow=query.allow, deny=query.deny)).restricted(query.allow, query.deny)
    environment = environment or Installed()
    check_query(query, registry)
    for plugin in registry.failures():
        logger.warning("plugin %s is not used: %s", plugin.distribution, plugin.failure)
    solution = resolve_loop(query, registry, environment, prober or run_probes)
    if solution.conflict:
        raise refusal(solution, registry, environment)
    plan = plan_of(solution)
    for line in (*plan.fallbacks, *remarks(solution)):
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
    refused: Mapping[str, Reason]
    passed: set[str] = set()
    while True:
        solution = solve(query, registry, environment, struck)
        chosen = [verdict.candidate for some in solution.by_batch().values() for _, verdict in some]
        pending = {candidate.key: candidate for candidate in chosen if candidate.key not in passed}
        refused = {} if environment is None else run_checks(pending.values())
        if prober is not None and not refused:
            refused = _probe(pending.values(), query, solution.joint, prober)
            passed.update(pending)
        struck.update(refused)
        if not refused:
            return solution


def _probe(candidates: Iterable[Candidate], query: PlanQuery, joint: Joint, prober: Prober) -> Mapping[str, Reason]:
    requests = [probe_request(candidate, query, joint) for candidate in candidates if candidate.spec.probe]
    return prober(requests) if requests else {}


def alternate_choice(
    plan: Plan,
    query: PlanQuery,
    entry: PlanEntry,
    name: str,
    registry: Registry | None = None,
    *,
    environment: Environment | None = None,
    prober: Prober = run_probes,
) -> tuple[Choice | None, Sequence[Reason]]:
    """The backend ``name`` for an entry that the plan gives to another, on the same pool and without graphs; or why it
    cannot serve there.

    Raises :class:`~minisgl_core.errors.BackendError` for a name that no plugin offers.
    """
    registry = registry or discover(allow=query.allow, deny=query.deny)
    query = replace(query, backends={entry.role: {entry.part: name} if entry.part else name})
    joint = Joint(plan.page_size, plan.kv_layout, graph=False)
    fields = fields_of(query, registry, environment or Installed(), {})
    verdicts = next(field for field in fields if field.entry == entry).verdicts(joint)
    if not verdicts:
        raise unknown_backend(entry.role, name, query.device.kind, registry)
    reasons: list[Reason] = []
    for verdict in verdicts:
        one = [verdict.candidate]
        refused = verdict.reasons or (run_checks(one) or _probe(one, query, joint, prober)).values()
        if not refused:
            return _choice(verdict, query, plan.page_size), ()
        reasons.extend(refused)
    return None, reasons


def plan_of(solution: Solution) -> Plan:
    """A solution as a plan."""
    query, joint = solution.query, solution.joint
    return Plan(
        page_size=joint.page_size,
        kv_layout=joint.kv_layout,
        graph=joint.graph,
        dtype=query.dtype,
        kv_dtype=query.pool_dtype,
        tp_size=query.tp_size,
        device=str(query.device),
        architecture=query.model.architecture,
        core_version=__version__,
        buckets=tuple(_buckets(solution)),
        fallbacks=tuple(_fallbacks(solution)),
    )


def _buckets(solution: Solution) -> Iterator[Bucket]:
    for entry, verdicts in solution.by_batch().items():
        low = 1
        for largest, verdict in verdicts:
            choice = _choice(verdict, solution.query, solution.joint.page_size)
            yield Bucket(entry, choice, None if largest is None else (low, largest))
            low = (largest or low) + 1


def _choice(verdict: Verdict, query: PlanQuery, pool_page_size: int) -> Choice:
    """A verdict without reasons as a plan holds it."""
    candidate, caps = verdict.candidate, verdict.caps
    if caps is None:
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
        ops=tuple(caps.ops),
        grammars=tuple(caps.grammars),
        page_size=kernel_page_size(caps.page_sizes, pool_page_size),
        host_plan=caps.host_plan,
        finite_tail=caps.finite_tail,
        tolerance=caps.tolerance,
        graph=caps.graph,
    )


def _fallbacks(solution: Solution) -> Iterator[str]:
    for field in solution.fields:
        taken = solution.chosen[field.entry]
        for verdict in solution.verdicts(field) if taken.rank.place else ():
            if verdict.rank.place < taken.rank.place:
                why = "; ".join(map(str, verdict.reasons)) or "it does not go with the other choices"
                using = taken.candidate.label
                yield f"{field.entry.label}: {verdict.candidate.label} cannot run ({why}); using {using}"


def check_query(query: PlanQuery, registry: Registry) -> None:
    """Refuse what no solve could make sense of: names that are unknown or of no use to this model, options that belong
    to no backend, heads that cannot be cut.
    """
    if query.page_size != AUTO and int(query.page_size) < 1:
        raise ConfigError(
            f"page_size {query.page_size} is not positive",
            field="page_size",
            value=query.page_size,
            remedy="use auto, or a number of tokens such as 16",
        )
    query.model.rank_heads(query.tp_size)
    allowed = {canonicalize_name(name) for name in query.allow or ()}
    for plugin in registry.failures():
        if canonicalize_name(plugin.distribution) in allowed:
            raise _failed(plugin, "plugins.allow")
    check_choice(query.backends, query.options, registry, query.device.kind)
    check_used(query, registry)


def check_choice(backends: Mapping[str, Any], options: Mapping[str, Any], registry: Registry, device_kind: str) -> None:
    """What can be wrong with a choice of backends whatever the model: unknown roles and names, unowned options."""
    for named in list(named_by(backends)):
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
            raise _failed(plugin, f"backends.{role}")
    raise unknown_backend(role, text, device_kind, registry)


def _failed(plugin: PluginRecord, setting: str) -> BackendError:
    name = plugin.distribution
    return BackendError(
        f"plugin {name}, named by {setting}, failed to load: {plugin.failure}",
        field=setting,
        value=name,
        remedy=f"`pip install --force-reinstall {name}`, or take it out of {setting}",
    )
