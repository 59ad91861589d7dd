"""What ``/metrics`` counts, against numbers worked out by hand, and the table and dashboard that use its names."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from minisgl_core.llm import AsyncLLM, Chunk
from minisgl_core.llm.output import PromptFacts
from minisgl_core.server import metrics as module
from minisgl_core.server.metrics import Histogram, Metrics
from minisgl_core.server.state import ServerOptions, ServerState
from support.http_server import Served, serving

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE = (DOCS / "serve.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| `minisgl_(\w+)` \| (`vllm:(\w+)`|none) \| (\w+)", PAGE, re.MULTILINE)
MORE = {"ignore_eos": True}


def read(served: Served) -> dict[str, float]:
    """Samples without the prefix and ``model_name``, such as ``request_success_total{length}``."""
    found = {}
    for family in text_string_to_metric_families(httpx.get(f"{served.url}/metrics").text):
        for sample in family.samples:
            labels = {name: value for name, value in sample.labels.items() if name != "model_name"}
            if "le" not in labels and not sample.name.endswith("_info"):
                more = f"{{{','.join(labels.values())}}}" if labels else ""
                found[sample.name.removeprefix("minisgl_") + more] = sample.value
    return found


@pytest.fixture
def fresh(async_llm: AsyncLLM) -> Iterator[Served]:
    with serving(async_llm) as server:
        yield server


def test_the_table_names_what_there_is(served: Served) -> None:
    types = re.findall(r"^# TYPE minisgl_(\w+) (\w+)$", httpx.get(f"{served.url}/metrics").text, re.MULTILINE)
    # the text format has no type for an info
    listed = [(name, "gauge" if name.endswith("_info") else kind) for name, _, _, kind in ROWS]
    assert sorted(listed) == sorted(types)


def test_where_vllm_has_a_metric_the_name_is_the_same() -> None:
    assert all(name == theirs for name, _, theirs, _ in ROWS if theirs)
    assert len([theirs for _, _, theirs, _ in ROWS if theirs]) >= 15


def test_a_known_load_is_counted(fresh: Served) -> None:
    """4 tokens twice for one prompt of 3, then 3 tokens for a prompt of 2; then two requests that are refused."""
    before = read(fresh)
    create = fresh.client.completions.create
    create(model="tiny", prompt=[5, 6, 7], max_tokens=4, n=2, extra_body=MORE)
    list(create(model="tiny", prompt=[5, 6], max_tokens=3, stream=True, extra_body=MORE))
    httpx.post(f"{fresh.url}/v1/completions", json={})
    httpx.get(f"{fresh.url}/no/such/thing")
    assert fresh.rests()
    after = read(fresh)
    moved = {name: after[name] - before.get(name, 0) for name in after}
    expected = {
        "prompt_tokens_total": 3 + 2,
        "generation_tokens_total": 4 + 4 + 3,
        "request_success_total{length}": 3,
        "request_success_total{stop}": 0,
        "request_success_total{abort}": 0,
        "request_success_total{error}": 0,
        "time_to_first_token_seconds_count": 3,
        "inter_token_latency_seconds_count": 3 + 3 + 2,
        "request_time_per_output_token_seconds_count": 3,
        "e2e_request_latency_seconds_count": 3,
        "request_queue_time_seconds_count": 2,
        "request_prefill_time_seconds_count": 2,
        "request_decode_time_seconds_count": 3,
        "request_prompt_tokens_count": 2,
        "request_prompt_tokens_sum": 5,
        "request_generation_tokens_count": 3,
        "request_generation_tokens_sum": 11,
        "http_requests_total{/v1/completions,200}": 2,
        "http_requests_total{/v1/completions,400}": 1,
        "http_requests_total{other,404}": 1,
        # each choice of the first prompt, and the second prompt
        "prefix_cache_queries_total": 3 + 3 + 2,
        "num_preemptions_total": 0,
        "grammar_seconds_total": 0,
    }
    assert {name: moved[name] for name in expected} == expected
    assert after["num_requests_running"] == after["num_requests_waiting"] == after["kv_cache_usage_perc"] == 0
    for one in ("time_to_first_token", "request_decode_time", "e2e_request_latency"):
        assert moved[f"{one}_seconds_sum"] > 0


def test_an_aborted_answer_is_counted(fresh: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    body = b'{"prompt": [5, 6, 7], "max_tokens": 50, "stream": true, "ignore_eos": true}'
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    step = fresh.llm.scheduler.step

    def slowly() -> Any:
        time.sleep(0.1)
        return step()

    monkeypatch.setattr(fresh.llm.scheduler, "step", slowly)
    fresh.raw(head % len(body) + body, read=200).close()
    assert fresh.rests()
    found = read(fresh)
    assert found["request_success_total{abort}"] == 1 and found["request_success_total{length}"] == 0
    assert found["generation_tokens_total"] > 0 and found["e2e_request_latency_seconds_count"] == 0


def test_requests_hold_pages_and_cached_prefixes_do_not(fresh: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    create = fresh.client.completions.create
    used: list[float] = []
    step = fresh.llm.scheduler.step

    def observed() -> Any:
        outs = step()
        stats = fresh.llm.stats
        used.append((512 - stats.free_pages - stats.evictable_pages) / 512)
        return outs

    monkeypatch.setattr(fresh.llm.scheduler, "step", observed)
    create(model="tiny", prompt=list(range(30)), max_tokens=8, extra_body=MORE)
    assert fresh.rests()
    assert max(used) >= 37 / 512 and read(fresh)["kv_cache_usage_perc"] == 0
    assert fresh.llm.stats.cached_pages >= 37


def test_info_names_plan_and_pool(served: Served) -> None:
    text = httpx.get(f"{served.url}/metrics").text
    infos = {
        sample.name: sample.labels
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name.endswith("_info")
    }
    plan = infos["minisgl_plan_info"]
    assert plan["digest"] == served.llm.plan.digest() and plan["model_name"] == "tiny"
    assert plan["attention_decode"] == served.llm.plan.summary()["attention.decode"]
    pool = infos["minisgl_cache_config_info"]
    assert (pool["block_size"], pool["num_gpu_blocks"]) == (str(served.llm.plan.page_size), "512")


def test_nothing_of_the_engine_while_it_is_loaded() -> None:
    with serving(None) as loading:
        values = read(loading)
    assert values["prompt_tokens_total"] == 0 and "num_requests_running" not in values


def test_the_dashboard_uses_metrics_and_labels_that_exist(served: Served) -> None:
    served.client.completions.create(model="tiny", prompt="x", max_tokens=2)
    labels: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(httpx.get(f"{served.url}/metrics").text):
        for sample in family.samples:
            labels.setdefault(sample.name, set()).update(sample.labels)
    board = json.loads((DOCS / "dashboards" / "minisgl.json").read_text(encoding="utf-8"))
    queries = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    queries += [one["definition"] for one in board["templating"]["list"] if "definition" in one]
    assert len(queries) > 30 and all(query.count("(") == query.count(")") for query in queries)
    used = set()
    for query in queries:
        names = set(re.findall(r"\bminisgl_\w+", query))
        assert names and names <= labels.keys(), query
        wanted = {name for names in re.findall(r"by \(([\w, ]+)\)", query) for name in names.split(", ")}
        wanted |= set(re.findall(r"(\w+)=~", query)) - {"instance"}
        assert all(wanted - {"instance"} <= labels[name] for name in names), query
        used |= names
    whole = {re.sub("_(bucket|sum|count|total|info)$", "", name) for name in used}
    listed = {re.sub("_(total|info)$", "", f"minisgl_{name}") for name, *_ in ROWS}
    assert listed - whole == {"minisgl_prefix_cache_pages", "minisgl_cache_config"}


class Stream:
    """The answers to one prompt, in place of the engine's."""

    def __init__(self, num_tokens: int, scheduled_s: float) -> None:
        self.prompt = PromptFacts(num_tokens, scheduled_s=scheduled_s)


def test_times_by_a_clock_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Admitted at 10. Choice 0: tokens at 12, 13 and, two at once, 17. Choice 1: a token at 14, and its end at 18."""
    now = [10.0]
    monkeypatch.setattr(module.time, "perf_counter", lambda: now[0])
    metrics = Metrics(ServerState(ServerOptions("tiny")))
    with metrics.request() as timing:
        timing.open([Stream(5, 11.0)], 2)  # type: ignore[list-item]
        for at, choice, tokens, reason in (
            (12.0, 0, 1, None),
            (13.0, 0, 1, None),
            (14.0, 1, 1, None),
            (17.0, 0, 2, "length"),
            (18.0, 1, 0, "stop"),
        ):
            now[0] = at
            timing.chunk(0, Chunk("", [7] * tokens, reason, choice=choice))  # type: ignore[arg-type]

    def observed(histogram: Histogram) -> tuple[int, float]:
        return sum(histogram.counts), histogram.total

    assert observed(metrics.ttft) == (2, 2 + 4)
    assert observed(metrics.itl) == (3, 1 + 2 + 2)
    assert observed(metrics.tpot) == (1, 5 / 3)
    assert observed(metrics.e2e) == (2, 7 + 8)
    assert observed(metrics.queue) == (1, 1) and observed(metrics.prefill) == (1, 1)
    assert observed(metrics.decode) == (2, 5 + 0)
    assert observed(metrics.answer_length) == (2, 4 + 1) and observed(metrics.prompt_length) == (1, 5)
    assert metrics.finished == {"length": 1, "stop": 1, "abort": 0, "error": 0}


def test_a_value_belongs_to_the_first_bound_that_is_not_below_it() -> None:
    histogram = Histogram("", (1.0, 2.0))
    for value, times in ((0.5, 1), (1.0, 2), (1.5, 1), (3.0, 1)):
        histogram.observe(value, times)
    assert histogram.buckets() == [("1.0", 3), ("2.0", 4), ("+Inf", 5)]
    assert histogram.total == 0.5 + 2 * 1.0 + 1.5 + 3.0
