"""What Prometheus reads at ``/metrics``, and the page at ``/stats``. docs/serve.md lists the names.

After the prefix ``minisgl_`` a metric has the name, the type and the meaning that it has in vLLM, where vLLM has it.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final

from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from minisgl_core import __version__

if TYPE_CHECKING:
    from minisgl_core.llm import AsyncLLM, Chunk
    from minisgl_core.llm.output import PromptFacts
    from minisgl_core.llm.stream import AsyncStream

    from .state import ServerState

__all__ = ["Histogram", "Metrics", "Timing"]

_STEPS: Final = (1.0, 2.5, 5.0)
SECONDS: Final = (
    *(step * 10.0**power for power in (-4, -3, -2, -1, 0) for step in _STEPS),
    10.0,
    30.0,
    60.0,
    120.0,
    300.0,
)
"""Upper bounds of latencies"""
TOKENS: Final = tuple(float(1 << power) for power in range(18))
"""Upper bounds of lengths"""


_PROBES: Final = ("/health", "/ready")
"""Their status 503 is no error."""


class Histogram:
    """Plain numbers, which the event loop alone changes: a stream observes each of its tokens."""

    __slots__ = ("bounds", "counts", "total", "what")

    def __init__(self, what: str, bounds: Sequence[float] = SECONDS) -> None:
        self.what, self.bounds = what, bounds
        self.counts = [0] * (len(bounds) + 1)
        """How many values are at most each bound, and above the bound before; the last ones are above all."""
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count a value."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    def to_json(self) -> dict[str, Any]:
        """As JSON data."""
        return {"bounds": list(self.bounds), "counts": self.counts, "sum": self.total}

    def buckets(self) -> list[tuple[str, float]]:
        """(upper bound, how many values are at most that), as Prometheus wants it."""
        names = [*map(str, self.bounds), "+Inf"]
        return list(zip(names, map(float, accumulate(self.counts)), strict=True))


class _Sequence:
    """The times of one answer."""

    __slots__ = ("count", "first", "last")

    def __init__(self, first: float) -> None:
        self.first = self.last = first
        self.count = 0


class Timing:
    """Observes the answers to one HTTP request as they arrive."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics, self._began = metrics, time.perf_counter()
        self._streams: Sequence[AsyncStream] = ()
        self._answers: dict[tuple[int, int], _Sequence] = {}
        self._prefilled: set[int] = set()
        self._unfinished = 0

    def open(self, streams: Sequence[AsyncStream], answers: int) -> None:
        """``streams``: one for each prompt; together they have ``answers`` choices."""
        self._streams, self._unfinished = streams, answers

    def chunk(self, which: int, chunk: Chunk) -> None:
        """A part of an answer to prompt ``which`` has arrived."""
        now = time.perf_counter()
        if which not in self._prefilled:
            self._prefilled.add(which)
            self._on_prefilled(self._streams[which].prompt, now)
        if chunk.token_ids:
            self._on_tokens((which, chunk.choice), len(chunk.token_ids), now)
        if chunk.finish_reason is not None:
            self._on_end((which, chunk.choice), chunk.finish_reason, now)

    def _on_prefilled(self, prompt: PromptFacts, now: float) -> None:
        metrics = self._metrics
        metrics.prompted += prompt.num_tokens
        metrics.prompt_length.observe(prompt.num_tokens)
        if prompt.scheduled_s is not None:
            metrics.queue.observe(max(0.0, prompt.scheduled_s - self._began))
            metrics.prefill.observe(max(0.0, now - prompt.scheduled_s))

    def _on_tokens(self, key: tuple[int, int], count: int, now: float) -> None:
        """What arrives together shares the time since the tokens before it."""
        metrics, later = self._metrics, count
        if (answer := self._answers.get(key)) is None:
            answer = self._answers[key] = _Sequence(now)
            metrics.ttft.observe(now - self._began)
            later -= 1
        if later:
            metrics.itl.observe((now - answer.last) / count, later)
        answer.count, answer.last = answer.count + count, now
        metrics.generated += count

    def _on_end(self, key: tuple[int, int], reason: str, now: float) -> None:
        metrics = self._metrics
        self._unfinished -= 1
        metrics.finished[reason] += 1
        metrics.e2e.observe(now - self._began)
        if (answer := self._answers.get(key)) is None:
            return
        metrics.answer_length.observe(answer.count)
        metrics.decode.observe(answer.last - answer.first)
        if answer.count > 1:
            metrics.tpot.observe((answer.last - answer.first) / (answer.count - 1))

    def close(self) -> None:
        """No more arrives: what has not finished was aborted."""
        self._metrics.finished["abort"] += self._unfinished


class Metrics:
    """One server's. Counters and histograms are filled by requests, the rest is read from the engine when requested."""

    def __init__(self, state: ServerState) -> None:
        self.registry = CollectorRegistry()
        self.ttft = Histogram("From the admission of a request to its first token.")
        self.itl = Histogram("Between two tokens of an answer.")
        self.tpot = Histogram("Of an answer: the mean time of a token after the first.")
        self.e2e = Histogram("From the admission of a request to the last token.")
        self.queue = Histogram("From the admission of a request to the pass that begins with its prompt.")
        self.prefill = Histogram("From the pass that begins with a prompt to the first token.")
        self.decode = Histogram("From the first token of an answer to its last.")
        self.prompt_length = Histogram("Tokens of a prompt.", TOKENS)
        self.answer_length = Histogram("Tokens of an answer.", TOKENS)
        self.prompted = self.generated = 0
        """Tokens"""
        self.finished: Counter[str] = Counter({"stop": 0, "length": 0, "abort": 0, "error": 0})
        """Answers, by the reason they ended"""
        self.http: Counter[tuple[str, int]] = Counter()
        """HTTP requests, by path and status"""
        self._state = state
        self._began = time.monotonic()
        self.registry.register(_Collector(self, state))

    @contextmanager
    def request(self) -> Iterator[Timing]:
        """Observe one HTTP request for text."""
        timing = Timing(self)
        try:
            yield timing
        finally:
            timing.close()

    def histograms(self) -> dict[str, Histogram]:
        """By the name of the metric, without its prefix."""
        return {
            "time_to_first_token_seconds": self.ttft,
            "inter_token_latency_seconds": self.itl,
            "request_time_per_output_token_seconds": self.tpot,
            "e2e_request_latency_seconds": self.e2e,
            "request_queue_time_seconds": self.queue,
            "request_prefill_time_seconds": self.prefill,
            "request_decode_time_seconds": self.decode,
            "request_prompt_tokens": self.prompt_length,
            "request_generation_tokens": self.answer_length,
        }

    def to_json(self) -> dict[str, Any]:
        """The body of ``GET /stats``."""
        state = self._state
        errors: Counter[int] = Counter()
        for (path, status), count in self.http.items():
            if status >= 400 and path not in _PROBES:
                errors[status] += count
        return {
            "status": state.status,
            "model": state.options.model_name,
            "version": __version__,
            "uptime_s": time.monotonic() - self._began,
            "tokens": {"prompt": self.prompted, "generated": self.generated},
            "finished": dict(self.finished),
            "http_errors": {str(status): count for status, count in sorted(errors.items())},
            "latency": {name: getattr(self, name).to_json() for name in ("ttft", "itl", "tpot", "e2e", "queue")},
            "engine": None if state.llm is None else _engine_json(state.llm),
        }


def _pages(llm: AsyncLLM) -> int:
    """Of the KV pool."""
    return (llm.limits.pool_tokens or 0) // llm.plan.page_size


def _engine_json(llm: AsyncLLM) -> dict[str, Any]:
    stats, pages, size = llm.stats, _pages(llm), llm.plan.page_size
    return {
        "running": stats.running,
        "waiting": stats.waiting,
        "max_running": llm.engine_config.max_running_req,
        "max_seq_len": llm.max_seq_len,
        "preemptions": stats.preemptions,
        "kv": {
            "page_size": size,
            "total_tokens": pages * size,
            "used_tokens": (pages - stats.free_pages - stats.evictable_pages) * size,
            "cached_tokens": stats.evictable_pages * size,
        },
        "prefix_cache": {
            "tokens": stats.cached_pages * size,
            "query_tokens": stats.query_tokens,
            "hit_tokens": stats.hit_tokens,
        },
    }


class _Collector(Collector):
    """All families, made when Prometheus asks."""

    def __init__(self, metrics: Metrics, state: ServerState) -> None:
        self._metrics, self._state = metrics, state
        self._names, self._values = ["model_name"], [state.options.model_name]

    def collect(self) -> Iterable[Metric]:
        """Nothing of the engine while the model is loaded."""
        metrics = self._metrics
        for name, histogram in metrics.histograms().items():
            family = HistogramMetricFamily(f"minisgl_{name}", histogram.what, labels=self._names)
            family.add_metric(self._values, histogram.buckets(), histogram.total)
            yield family
        yield self._counter("prompt_tokens", "Tokens of prompts.", {(): metrics.prompted})
        yield self._counter("generation_tokens", "Tokens generated.", {(): metrics.generated})
        finished = {(reason,): count for reason, count in metrics.finished.items()}
        yield self._counter("request_success", "Answers, by what ended them.", finished, "finished_reason")
        served = {(path, str(status)): count for (path, status), count in metrics.http.items()}
        yield self._counter("http_requests", "HTTP requests, by path and status.", served, "path", "status")
        if self._state.llm is not None:
            yield from self._engine(self._state.llm)

    def _engine(self, llm: AsyncLLM) -> Iterable[Metric]:
        stats, pages = llm.stats, _pages(llm)
        used = (pages - stats.free_pages - stats.evictable_pages) / pages
        yield self._gauge("num_requests_running", "Requests in the batch.", stats.running)
        yield self._gauge("num_requests_waiting", "Requests in the queue.", stats.waiting)
        yield self._gauge("kv_cache_usage_perc", "Share of the KV pool that requests hold, from 0 to 1.", used)
        yield self._gauge("prefix_cache_pages", "Pages that the prefix cache holds.", stats.cached_pages)
        queries, hits = {(): stats.query_tokens}, {(): stats.hit_tokens}
        yield self._counter("prefix_cache_queries", "Tokens of prompts looked up in the prefix cache.", queries)
        yield self._counter("prefix_cache_hits", "Tokens of prompts found in the prefix cache.", hits)
        yield self._counter("num_preemptions", "Requests preempted for want of pages.", {(): stats.preemptions})
        yield self._counter("grammar_seconds", "Seconds spent on grammars.", {(): stats.grammar_s})
        yield self._info("cache_config", "The KV pool.", block_size=llm.plan.page_size, num_gpu_blocks=pages)
        served = {role.replace(".", "_"): label for role, label in llm.plan.summary().items()}
        facts = {"digest": llm.plan.digest(), "dtype": llm.plan.dtype, "device": llm.plan.device}
        versions = {"version": __version__, "architecture": llm.plan.architecture}
        yield self._info("plan", "Which backend serves each role.", **facts, **versions, **served)

    def _gauge(self, name: str, what: str, value: float) -> Metric:
        metric = GaugeMetricFamily(f"minisgl_{name}", what, labels=self._names)
        metric.add_metric(self._values, value)
        return metric

    def _counter(self, name: str, what: str, counts: Mapping[Any, float], *labels: str) -> Metric:
        metric = CounterMetricFamily(f"minisgl_{name}", what, labels=[*self._names, *labels])
        for values, count in counts.items():
            metric.add_metric([*self._values, *values], count)
        return metric

    def _info(self, name: str, what: str, **values: Any) -> Metric:
        metric = InfoMetricFamily(f"minisgl_{name}", what, labels=self._names)
        metric.add_metric(self._values, {key: str(value) for key, value in values.items()})
        return metric
