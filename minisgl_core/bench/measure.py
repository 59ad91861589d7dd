"""Runs a workload on an engine and takes the times, pass by pass."""

from __future__ import annotations

import math
import statistics
import time
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from tqdm import tqdm

from minisgl_core.core import SamplingParams
from minisgl_core.scheduler import ClearCache, NewReq, PromptOut, TokenOut, TokenRun

from .limits import PassFacts, pass_seconds

if TYPE_CHECKING:
    from minisgl_core.core import Batch
    from minisgl_core.engine import ForwardOutput
    from minisgl_core.llm.runner import Runner
    from minisgl_core.plugin_api import Event, SamplingMode

    from .limits import Ceilings
    from .workloads import Workload

__all__ = ["Result", "measure"]


@dataclass(frozen=True, slots=True)
class Result:
    """Medians of the runs of one workload. Milliseconds per request are medians over requests."""

    tok_s: float
    in_tok_s: float
    ttft_ms: float
    tpot_ms: float
    host_us_per_step: float
    """Of a decode step: what the host did other than wait for tokens."""
    device_busy_share: float
    """Time that the device spent inside passes, over the whole."""
    limit_share: float
    """Shortest possible time of the passes that were run, over the time taken."""
    seconds: float
    runs: list[dict[str, float]]


class Watch:
    """Stands between scheduler and engine for one run: notes each pass, times the device and the host's waiting."""

    def __init__(self, runner: Runner) -> None:
        self._engine = runner.engine
        self._forward = runner.engine.forward_batch
        self.passes: list[PassFacts] = []
        self._events: list[tuple[Event, Event]] = []
        self.waited = 0.0

    def __enter__(self) -> Watch:
        self._engine.forward_batch = self._watched  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        del self._engine.forward_batch

    def _watched(self, batch: Batch, mode: SamplingMode) -> ForwardOutput:
        context = int(batch.cached_lens().sum())
        tokens = int(batch.device_lens().sum()) - context
        self.passes.append(PassFacts(batch.is_decode, tokens, batch.size, context))
        begin, end = (self._engine.platform.new_event(timing=True) for _ in range(2))
        begin.record()
        out = self._forward(batch, mode)
        end.record()
        self._events.append((begin, end))
        return out._replace(copied=_TimedWait(out.copied, self))

    def inline_seconds(self) -> float:
        """What the latest pass took of the host's own time: all of it on a CPU, which computes while it launches."""
        if self._engine.device.type != "cpu":
            return 0.0
        begin, end = self._events[-1]
        return begin.elapsed_time(end) / 1000

    def device_seconds(self) -> float:
        """Inside passes; call when all work is done."""
        self._engine.platform.synchronize()
        return sum(begin.elapsed_time(end) for begin, end in self._events) / 1000


class _TimedWait:
    def __init__(self, event: Event, watch: Watch) -> None:
        self._event, self._watch = event, watch

    def synchronize(self) -> None:
        begin = time.perf_counter()
        self._event.synchronize()
        self._watch.waited += time.perf_counter() - begin


def measure(
    runner: Runner,
    workload: Workload,
    ceilings: Ceilings,
    runs: int = 3,
    progress: bool = True,
    warm_up: Workload | None = None,
    until: float = math.inf,
) -> Result:
    """Run the workload ``runs`` times after a warm-up; medians.

    ``warm_up``: shorter work of the same kind, where the workload itself would take long. ``until``: no run after the
    first begins that would end later, by ``time.monotonic``, if it took as long as the one before.
    """
    taken: list[dict[str, float]] = []
    runner.post(ClearCache())
    _run_once(runner, warm_up or workload, ceilings, progress, "warm-up")
    while len(taken) < runs and (not taken or time.monotonic() + taken[-1]["seconds"] <= until):
        if not workload.keep_cache:
            runner.post(ClearCache())
        taken.append(_run_once(runner, workload, ceilings, progress, f"run {len(taken) + 1}"))
    median = {name: statistics.median(one[name] for one in taken) for name in taken[0]}
    return Result(**median, runs=taken)


def _run_once(runner: Runner, workload: Workload, ceilings: Ceilings, progress: bool, name: str) -> dict[str, float]:
    workload = workload.within(runner.engine.vocab_size)
    title = f"{workload.mode} {name}"
    with tqdm(total=len(workload.prompts), desc=title, leave=False, disable=not progress) as bar:
        return _timed(runner, workload, ceilings, bar)


def _timed(runner: Runner, workload: Workload, ceilings: Ceilings, bar: Any) -> dict[str, float]:
    first: dict[int, float] = {}
    last: dict[int, float] = {}
    counts: Counter[int] = Counter()
    host: list[float] = []
    for uid, (prompt, n) in enumerate(zip(workload.prompts, workload.outputs, strict=True)):
        params = SamplingParams(temperature=workload.temperature, max_tokens=n, ignore_eos=True)
        runner.post(NewReq(uid, np.array(prompt, dtype=np.int32), params))
    with Watch(runner) as watch:
        begin = time.perf_counter()
        while runner.has_work:
            step_begin, waited, passes = time.perf_counter(), watch.waited, len(watch.passes)
            outs = runner.step()
            now = time.perf_counter()
            for part in outs.parts:
                if isinstance(part, PromptOut):
                    continue
                uids = part.uids if isinstance(part, TokenRun) else [part.uid] if part.token is not None else []
                counts.update(uids)
                if len(first) < len(workload.prompts):
                    first = dict.fromkeys(uids, now) | first
                if isinstance(part, TokenOut) and part.finish_reason is not None:
                    last[part.uid] = now
                    bar.update(1)
            if len(watch.passes) > passes and watch.passes[-1].is_decode:
                host.append(now - step_begin - (watch.waited - waited) - watch.inline_seconds())
        seconds = time.perf_counter() - begin
        device = watch.device_seconds()
    _check(counts, workload)
    c, engine = runner.engine.model_config, runner.engine
    limit = sum(pass_seconds(c, p, ceilings, engine.dtype.itemsize, engine.tp.size) for p in watch.passes)
    gaps = [(last[uid] - first[uid]) / (n - 1) for uid, n in counts.items() if n > 1]
    return {
        "tok_s": workload.tokens_out / seconds,
        "in_tok_s": workload.tokens_in / seconds,
        "ttft_ms": statistics.median(first[uid] - begin for uid in counts) * 1000,
        "tpot_ms": statistics.median(gaps) * 1000 if gaps else 0.0,
        "host_us_per_step": statistics.median(host) * 1e6 if host else 0.0,
        "device_busy_share": min(1.0, device / seconds),
        "limit_share": limit / seconds,
        "seconds": seconds,
    }


def _check(counts: Counter[int], workload: Workload) -> None:
    """A benchmark that lost tokens measured something else."""
    from minisgl_core.errors import EngineError

    wrong = [uid for uid, n in enumerate(workload.outputs) if n != counts[uid]]
    if wrong:
        raise EngineError(
            f"request {wrong[0]} gave {counts[wrong[0]]} tokens instead of {workload.outputs[wrong[0]]}",
            field="mode",
            value=workload.mode,
            remedy="give the engine a longer context or a larger KV pool",
        )
