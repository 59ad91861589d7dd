"""Runs a workload through ``LLM`` like a user, and computes its figures from the times."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from minisgl_core.core import SamplingParams
from minisgl_core.errors import EngineError
from minisgl_core.progress import progress_bar

from .instrumentation import Clock, Instrumentation, StepKind, StepTime
from .limits import pass_seconds

if TYPE_CHECKING:
    from minisgl_core.llm import LLM

    from .limits import Ceilings
    from .workloads import Workload

__all__ = ["Figures", "Result", "measure"]


@dataclass(frozen=True, slots=True)
class Figures:
    """The figures of one run; None where the work has no such figure.

    Milliseconds per request are medians over requests, microseconds per step medians over steps.
    """

    seconds: float
    """Seconds from the call to the last answer."""
    tok_s: float
    """Output tokens per second."""
    in_tok_s: float
    """Prompt tokens per second."""
    cached_tokens: int
    """Prompt tokens that were found in the prefix cache."""
    ttft_ms: float
    """Time from the call to the first token of a request."""
    tpot_ms: float | None
    """Time from the first to the last token of a request, per token after the first."""
    limit_share: float
    """Shortest possible time of all passes, divided by ``seconds``."""
    device_pass_share: float
    """Time between the first and the last operation of passes on the device, divided by ``seconds``; gaps between the
    launches of an eager pass are included.
    """
    host_us_per_step: float | None
    """Host time of a decode step: see :class:`~.instrumentation.StepTime`."""
    host_us_steady: float | None
    """Host time of decode steps in which no row joined or left,"""
    launch_us_steady: float | None
    """and the part of it that launches the pass."""
    host_us_changed: float | None
    """Host time of decode steps in which rows joined or left."""
    host_us_prefill: float | None
    """Host time of a step that launches a prefill pass."""
    steps_steady: int
    steps_changed: int
    steps_prefill: int


Choose = Callable[[Sequence[float]], float]
_WORST: Final[Mapping[str, Choose]] = {"seconds": max, "tok_s": min, "in_tok_s": min, "ttft_ms": max, "tpot_ms": max}


@dataclass(frozen=True, slots=True)
class Result:
    """The results of equal runs of one workload."""

    runs: tuple[Figures, ...]

    @property
    def median(self) -> Figures:
        """The median of each figure."""
        return Figures(**{field.name: _over(statistics.median, field.name, self.runs) for field in fields(Figures)})

    @property
    def slowest(self) -> dict[str, float | None]:
        """The worst value of each figure: the lowest rate, the longest time."""
        return {name: _over(worst, name, self.runs) for name, worst in _WORST.items()}

    def to_json(self) -> dict[str, object]:
        """Medians by name, ``slowest``, and ``runs`` with the raw figures of each run."""
        return {**asdict(self.median), "slowest": self.slowest, "runs": [asdict(run) for run in self.runs]}


def _over(choose: Choose, name: str, runs: Sequence[Figures]) -> Any:
    """One figure over all runs; None if no run has it."""
    values = [getattr(run, name) for run in runs]
    return None if None in values else choose(values)


def measure(
    llm: LLM,
    workload: Workload,
    ceilings: Ceilings,
    repeat: int = 3,
    *,
    progress: bool = True,
    warm_up: Workload | None = None,
    until: float = math.inf,
    clock: Clock = time.perf_counter,
) -> Result:
    """Run the workload ``repeat`` times after a warm-up, each time with only a shared prefix in the cache.

    ``warm_up``: shorter work of the same kind, for workloads that take long. ``until``: a time by ``time.monotonic``;
    no further run starts that would end later if it took as long as the previous one.
    """
    runs: list[Figures] = []
    ids = llm.engine.vocab_size
    with progress_bar(f"{workload.mode}, runs", repeat + 1, shown=progress) as bar:
        _run(llm, (warm_up or workload).within(ids), ceilings, clock)
        bar.update()
        # The first run always takes place, so that there is a result.
        while len(runs) < repeat and (not runs or time.monotonic() + runs[-1].seconds <= until):
            # New tokens in each run: the prefix cache must contain nothing but the shared prefix.
            runs.append(_run(llm, workload.redrawn(len(runs) + 1).within(ids), ceilings, clock))
            bar.update()
    return Result(tuple(runs))


class _Served(NamedTuple):
    """What the caller observed."""

    begin: float
    end: float
    ttft: float
    tpot: float | None


def _run(llm: LLM, workload: Workload, ceilings: Ceilings, clock: Clock) -> Figures:
    """One run on an engine whose cache contains only the shared prefix."""
    llm.clear_cache()
    if workload.shared:
        llm.generate([list(workload.prefix)], SamplingParams(max_tokens=1, ignore_eos=True), progress=False)
    with Instrumentation(llm.engine, llm.scheduler, clock) as seen:
        served = _stream(llm, workload, clock) if workload.mode == "latency" else _generate(llm, workload, seen, clock)
        device = seen.device_seconds()
    seconds = served.end - served.begin
    model, engine = llm.engine.model_config, llm.engine
    limit = sum(pass_seconds(model, one, ceilings, engine.dtype.itemsize, engine.tp.size) for one in seen.passes)
    return Figures(
        seconds=seconds,
        tok_s=workload.tokens_out / seconds,
        in_tok_s=workload.tokens_in / seconds,
        cached_tokens=seen.cached_tokens,
        ttft_ms=served.ttft * 1000,
        tpot_ms=None if served.tpot is None else served.tpot * 1000,
        limit_share=limit / seconds,
        device_pass_share=min(1.0, device / seconds),
        **_host(seen.steps),
    )


def _params(workload: Workload) -> list[SamplingParams]:
    return [SamplingParams(temperature=workload.temperature, max_tokens=n, ignore_eos=True) for n in workload.outputs]


def _generate(llm: LLM, workload: Workload, seen: Instrumentation, clock: Clock) -> _Served:
    """All requests in one call of ``generate``; token times are those of the scheduler."""
    prompts, params = [list(prompt) for prompt in workload.prompts], _params(workload)
    begin = clock()
    answers = llm.generate(prompts, params, progress=False)
    end = clock()
    for index, (answer, wanted) in enumerate(zip(answers, workload.outputs, strict=True)):
        _check(index, len(answer["token_ids"]), wanted, workload)
    gaps = [(seen.last[uid] - seen.first[uid]) / (n - 1) for uid, n in seen.tokens.items() if n > 1]
    ttft = statistics.median(first - begin for first in seen.first.values())
    return _Served(begin, end, ttft, statistics.median(gaps) if gaps else None)


def _stream(llm: LLM, workload: Workload, clock: Clock) -> _Served:
    """The only request, read token by token."""
    (prompt,), (params,), (wanted,) = workload.prompts, _params(workload), workload.outputs
    begin = clock()
    chunks = llm.stream(list(prompt), params)
    times = [(clock(), len(chunk.token_ids)) for chunk in chunks if chunk.token_ids]
    end = clock()
    llm.clear_cache()  # returns when the engine is idle: until then a pass may be in flight
    _check(0, sum(count for _, count in times), wanted, workload)
    (first, at_first), (last, _) = times[0], times[-1]
    return _Served(begin, end, first - begin, (last - first) / (wanted - at_first) if wanted > at_first else None)


def _check(index: int, tokens: int, wanted: int, workload: Workload) -> None:
    """Raise if tokens are missing: the figures would be those of other work."""
    if tokens != wanted:
        raise EngineError(
            f"request {index} gave {tokens} tokens instead of {wanted}",
            field="mode",
            value=workload.mode,
            remedy="give the engine a longer context or a larger KV pool",
        )


def _host(steps: Sequence[StepTime]) -> Mapping[str, Any]:
    """The host times."""

    def microseconds(*kinds: StepKind, part: str = "host") -> float | None:
        values = [getattr(step, part) for step in steps if step.kind in kinds]
        return statistics.median(values) * 1e6 if values else None

    def count(kind: StepKind) -> int:
        return sum(step.kind == kind for step in steps)

    return {
        "host_us_per_step": microseconds("steady", "changed"),
        "host_us_steady": microseconds("steady"),
        "launch_us_steady": microseconds("steady", part="launch"),
        "host_us_changed": microseconds("changed"),
        "host_us_prefill": microseconds("prefill"),
        "steps_steady": count("steady"),
        "steps_changed": count("changed"),
        "steps_prefill": count("prefill"),
    }
