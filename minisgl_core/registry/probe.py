"""What backends' own code says about this machine: quick checks in this process, probes in a throw-away one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from minisgl_core.errors import MinisglError
from minisgl_core.installation import installed_version
from minisgl_core.plugin_api import CannotRun, Reason
from minisgl_core.sandbox import Sandbox, SandboxError, diverted_output, import_object

from .query import Joint, PlanQuery
from .records import Candidate

__all__ = ["ProbeRequest", "probe_request", "run_checks", "run_probes"]


@dataclass(frozen=True, slots=True)
class ProbeRequest:
    """One backend's probe and its argument. ``key`` names the candidate; version and driver date the answer."""

    key: str
    probe: str
    """``"package.module:function"``; empty = it has none"""
    facts: Mapping[str, Any]
    version: str = ""
    driver: str = ""


def probe_request(candidate: Candidate, query: PlanQuery, joint: Joint) -> ProbeRequest:
    """The call of a candidate's probe; its ``probe`` is empty if it has none."""
    q_heads, kv_heads = query.model.rank_heads(query.tp_size)
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


def run_probes(requests: Sequence[ProbeRequest]) -> dict[str, Reason]:
    """Run probes in one child; returns the refusals by key. What works is kept until a version changes."""
    found: dict[str, Reason | None] = {}
    with Sandbox() as child:
        for request in requests:
            versions = (request.key, request.version, request.driver, installed_version("torch"))
            try:
                answer = child.call(request.probe, request.facts, versions)
            except SandboxError as error:
                longer = "MINISGL_PROBE_TIMEOUT_S gives it longer" if error.timed_out else ""
                found[request.key] = Reason("probe", "probe", "a working backend", f"the probe {error}", longer)
            else:
                found[request.key] = None if answer["ok"] else _reason(answer)
    return {key: reason for key, reason in found.items() if reason is not None}


def _reason(answer: Mapping[str, Any]) -> Reason:
    if "reason" in answer:
        return Reason(*answer["reason"])
    return Reason("probe", "probe", "a working backend", f"the probe raised {answer['error']}")


def run_checks(candidates: Iterable[Candidate]) -> dict[str, Reason]:
    """The refusals by :attr:`Candidate.key`. Backends that share a check share its answer.

    A :class:`MinisglError` passes: it is about a setting, whichever backend is chosen.
    """
    checked = [candidate for candidate in candidates if candidate.spec.check is not None]
    answers = {check: _ask(check) for check in dict.fromkeys(one.spec.check for one in checked) if check is not None}
    return {one.key: reason for one in checked if one.spec.check and (reason := answers[one.spec.check]) is not None}


def _ask(check: str) -> Reason | None:
    try:
        with diverted_output():
            import_object(check)()
    except CannotRun as refusal:
        return refusal.reason
    except MinisglError:
        raise
    except (Exception, SystemExit) as error:
        return Reason("check", "check", "a working backend", f"the check raised {type(error).__name__}: {error}")
    return None
