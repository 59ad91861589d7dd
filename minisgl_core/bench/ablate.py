"""Ablations: the same work with one thing changed at a time.

All rows run in one child process, one engine after the other, so that imports, compiled kernels and measured
ceilings are shared. A row that breaks may leave a device that answers nothing any more: the rows after it get a fresh
process. A backend's refusal costs nothing of the kind.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from minisgl_core.engine import EngineConfig
from minisgl_core.engine.backend_factory import capture_sizes
from minisgl_core.engine.plan_resolution import make_plan
from minisgl_core.env import ENV
from minisgl_core.errors import BackendError, ConfigError
from minisgl_core.modelconfig import read_model_config

from .isolated import Finished, Lost, Target, supervised
from .report import one_line
from .session import open_session, thrifty
from .variants import DEFAULT, Variant

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from minisgl_core.registry import Plan

    from .limits import Ceilings
    from .measure import Result
    from .session import Session
    from .workloads import Workload

__all__ = ["Job", "Row", "ablate", "measure_rows"]

Row = dict[str, Any]
"""JSON data. Always ``variant``, ``mode`` and ``relative`` (to the default on the same work; None where there is no
rate). Measured: ``rate`` (tokens per second: in for prefill, out for the rest) and other figures, and the backends that
``changed`` (of the default: its whole ``plan``). Not measured: ``note``, why it would be the default again, or
``error``, with ``refused`` where nothing was run.
"""
WARM_UP: Final = 8
"""A row's warm-up is this much shorter than its work."""
LONGEST_ERROR: Final = 4000
"""Characters of an error that are kept: enough for all reasons against a backend, not for all compiler output."""
REFUSALS: Final = (BackendError, ConfigError)
"""Errors that are raised before anything has run."""


@dataclass(frozen=True, slots=True)
class Job:
    """What an ablation measures; it travels to another process."""

    config: EngineConfig
    mode: str
    workloads: Mapping[str, Workload]
    """Workloads by mode: that of ``mode``, and those that some variants name."""
    tp_size: int = 1
    repeat: int = 1

    def mode_of(self, variant: Variant) -> str:
        """The mode on which a variant is measured."""
        return variant.mode if variant.mode is not None and variant.mode in self.workloads else self.mode


def ablate(
    job: Job, variants: tuple[Variant, ...], limit_s: float = 600.0, target: Target | None = None
) -> Iterator[Row]:
    """Yield every row as soon as it is measured, the default first.

    A row without progress for ``limit_s`` seconds is stopped. Raises :class:`BackendError` if there is no plan for the
    default. ``target``: the function that the process runs; other than :func:`measure_rows` only in tests.
    """
    make_plan(job.config, read_model_config(job.config.model_path))
    base: dict[str, float] = {}
    for variant, message in supervised(target or measure_rows, job, (DEFAULT, *variants), limit_s):
        row = message
        if isinstance(message, Lost):
            why = f"{message.why} (--row-limit)" if message.silent else message.why
            row = {"variant": variant.name, "mode": job.mode_of(variant), "error": why}
        rate = row.get("rate")
        if variant == DEFAULT and rate:
            base[row["mode"]] = rate
        whole = base.get(row["mode"])
        yield {**row, "relative": rate / whole if rate and whole else None}


def measure_rows(connection: Connection, job: Job, variants: tuple[Variant, ...], switches: Mapping[str, Any]) -> None:
    """Measure the rows of one variant after the other and send them. Runs in a separate process: see
    :mod:`.isolated`.
    """
    for switch in ENV.all():
        switch.value = switches[switch.name]
    bench = _Bench(job, variants)
    for variant in variants:
        suspect = False
        try:
            for row in bench.rows(variant):
                connection.send({"variant": variant.name, **row})
        except Exception as error:  # the table must still show the others
            suspect = not isinstance(error, REFUSALS)
            text = one_line(str(error), LONGEST_ERROR) or type(error).__name__
            row = {"variant": variant.name, "mode": job.mode_of(variant), "error": text}
            connection.send(row if suspect else {**row, "refused": True})
        connection.send(Finished(suspect))


class _Bench:
    """State shared by the rows of one process."""

    def __init__(self, job: Job, variants: tuple[Variant, ...]) -> None:
        self._job = job
        self._model = read_model_config(job.config.model_path)
        self._modes = list(dict.fromkeys([job.mode, *map(job.mode_of, variants)]))
        self._base_plan = make_plan(job.config, self._model)
        self._ceilings: Ceilings | None = None
        self._overlap = not ENV.DISABLE_OVERLAP_SCHEDULING.value

    def rows(self, variant: Variant) -> Iterator[Row]:
        """One row per mode: the default on all modes of this process, the others on their own."""
        job = self._job
        modes = self._modes if variant == DEFAULT else [job.mode_of(variant)]
        if variant.needs_experts and self._model.moe is None:
            yield {"mode": modes[0], "note": "the model has no experts"}
            return
        config = variant.applied_to(job.config)
        plan = make_plan(config, self._model)
        chosen = {f"{bucket.choice.role}:{bucket.choice.name}" for bucket in plan.buckets}
        if unused := sorted(set(variant.options) - chosen):
            yield {"mode": modes[0], "note": f"the plan has no {' or '.join(unused)}"}
            return
        if variant != DEFAULT and not variant.repeats and self._is_default(variant, config, plan):
            yield {"mode": modes[0], "note": "the default is the same"}
            return
        ENV.DISABLE_OVERLAP_SCHEDULING.value = not (self._overlap and variant.overlap)
        workloads = [job.workloads[mode] for mode in modes]
        config = replace(thrifty(config, workloads), plan=plan.to_json())
        first = self._ceilings is None
        with open_session(config, job.tp_size, self._ceilings) as session:
            self._ceilings = session.ceilings
            for workload in workloads:
                # the first engine of a process compiles kernels for every size of a pass, so it meets all of them
                warm_up = workload.shortened(WARM_UP) if first else workload.warm_up(WARM_UP)
                result = session.measure(workload, job.repeat, warm_up=warm_up)
                served = {"plan": plan.summary()} if variant == DEFAULT else {"changed": self._changed(variant, plan)}
                yield {"mode": workload.mode, **_figures(workload, result, session), **served}

    def _is_default(self, variant: Variant, config: EngineConfig, plan: Plan) -> bool:
        """True if the variant's engine would be the same as the default's."""

        def facts(config: EngineConfig, plan: Plan, overlap: bool) -> tuple[Any, ...]:
            return plan.to_json(), capture_sizes(config, plan), config.cache, config.max_prefill_tokens, overlap

        mine = facts(config, plan, self._overlap and variant.overlap)
        return mine == facts(self._job.config, self._base_plan, self._overlap)

    def _changed(self, variant: Variant, plan: Plan) -> dict[str, str]:
        """For each plan entry the backend that replaces the default's, and options that differ."""
        before = self._base_plan.summary()
        changed = {entry: label for entry, label in plan.summary().items() if before.get(entry) != label}
        if plan.page_size != self._base_plan.page_size:
            changed["page_size"] = str(plan.page_size)
        for backend, options in variant.options.items():
            changed |= {f"{backend} {name}": str(value) for name, value in options.items()}
        return changed


def _figures(workload: Workload, result: Result, session: Session) -> Row:
    figures = result.to_json()
    return {
        "rate": figures["in_tok_s"] if workload.mode == "prefill" else figures["tok_s"],
        **figures,
        "start_s": session.start_s,
        "memory": session.memory.to_json(),
    }
