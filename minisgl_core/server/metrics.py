"""What Prometheus reads at ``/metrics``. docs/serve.md compares the names with vLLM's."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from minisgl_core.llm import Completion

    from .state import ServerState

__all__ = ["Metrics", "Timing"]

SECONDS: Final = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    30.0,
    60.0,
    120.0,
    300.0,
)


class Timing:
    """When the tokens of one request came."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics, self.began = metrics, time.perf_counter()
        self._last = self.began
        self._first: float | None = None
        self._tokens = 0

    def tokens(self, count: int) -> None:
        """``count`` more have come now."""
        if count == 0:
            return
        now = time.perf_counter()
        if self._first is None:
            self._first = now
            self._metrics.ttft.observe(now - self.began)
        else:
            self._metrics.itl.observe((now - self._last) / count)
        self._tokens += count
        self._last = now

    def end(self) -> None:
        """The request has been answered."""
        self._metrics.e2e.observe(time.perf_counter() - self.began)
        if self._first is not None and self._tokens > 1:
            self._metrics.tpot.observe((self._last - self._first) / (self._tokens - 1))


class Metrics:
    """One server's. Counters and histograms are filled by requests, the rest is read from the scheduler when asked."""

    def __init__(self, state: ServerState) -> None:
        self.registry = CollectorRegistry()
        labels = {"model_name": state.options.model_name}

        def histogram(name: str, what: str) -> Histogram:
            made = Histogram(f"minisgl_{name}_seconds", what, list(labels), buckets=SECONDS, registry=self.registry)
            return made.labels(**labels)

        def counter(name: str, what: str, *more: str) -> Counter:
            return Counter(f"minisgl_{name}", what, [*labels, *more], registry=self.registry)

        self.ttft = histogram("time_to_first_token", "From a request's admission to its first token.")
        self.itl = histogram("inter_token_latency", "Between two tokens of a request.")
        self.tpot = histogram("time_per_output_token", "Per request: the mean time of a token after the first.")
        self.e2e = histogram("e2e_request_latency", "From a request's admission to its last token.")
        self._prompt = counter("prompt_tokens", "Tokens of prompts.").labels(**labels)
        self._generated = counter("generation_tokens", "Tokens generated.").labels(**labels)
        self._finished = counter("request_success", "Answers, by what ended them.", "finished_reason")
        self._labels = labels
        self.registry.register(_SchedulerCollector(state, labels))

    @contextmanager
    def request(self) -> Iterator[Timing]:
        """Times one request, if it is answered."""
        timing = Timing(self)
        yield timing
        timing.end()

    def count(self, answers: Sequence[Completion]) -> None:
        """What has been answered."""
        for answer in answers:
            self._prompt.inc(answer.prompt_tokens)
            for choice in answer.choices or (answer,):
                self._generated.inc(len(choice.token_ids))
                self._finished.labels(**self._labels, finished_reason=choice.finish_reason or "abort").inc()


class _SchedulerCollector(Collector):
    """Reads the scheduler's counters, which are plain numbers, from another thread than its own."""

    def __init__(self, state: ServerState, labels: dict[str, str]) -> None:
        self._state, self._names, self._values = state, list(labels), list(labels.values())

    def collect(self) -> Iterable[Metric]:
        """What the scheduler says now; nothing while the model is loaded."""
        llm = self._state.llm
        if llm is None:
            return
        stats, pages = llm.scheduler.stats, llm.scheduler.limits.pool_tokens or 0
        used = 1 - stats.free_pages * llm.plan.page_size / pages if pages else 0.0
        yield self._gauge("num_requests_running", "Requests in the batch.", stats.running)
        yield self._gauge("num_requests_waiting", "Requests in the queue.", stats.waiting)
        yield self._gauge("kv_cache_usage", "Share of the KV pool in use, cached prefixes included.", used)
        yield self._gauge("prefix_cache_pages", "Pages that the prefix cache holds.", stats.cached_pages)
        yield self._counter("prefix_cache_hit_tokens", "Tokens of prompts found in the prefix cache.", stats.hit_tokens)
        yield self._counter("num_preemptions", "Requests preempted for want of pages.", stats.preemptions)
        yield self._plan()

    def _plan(self) -> Metric:
        assert self._state.llm is not None
        plan = self._state.llm.plan
        info = InfoMetricFamily("minisgl_plan", "Which backend serves each role.", labels=self._names)
        served = {role.replace(".", "_"): label for role, label in plan.summary().items()}
        info.add_metric(self._values, {"digest": plan.digest(), **served})
        return info

    def _gauge(self, name: str, what: str, value: float) -> Metric:
        metric = GaugeMetricFamily(f"minisgl_{name}", what, labels=self._names)
        metric.add_metric(self._values, value)
        return metric

    def _counter(self, name: str, what: str, value: float) -> Metric:
        metric = CounterMetricFamily(f"minisgl_{name}", what, labels=self._names)
        metric.add_metric(self._values, value)
        return metric
