"""The page without a browser: what is sent, with which headers, to whom."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest

from minisgl_core import server
from minisgl_core.llm import AsyncLLM
from minisgl_core.server.view import _plan_json
from support.http_server import Served, serving

FILES = sorted(Path(server.__file__).with_name("page").iterdir())
PATHS = ["/" if file.suffix == ".html" else f"/page/{file.name}" for file in FILES]


@pytest.mark.parametrize("path", PATHS)
def test_files_come_with_a_strict_policy(served: Served, path: str) -> None:
    answer = httpx.get(served.url + path)
    assert answer.status_code == 200
    policy = dict(part.split(" ", 1) for part in answer.headers["content-security-policy"].split("; "))
    assert policy["default-src"] == "'none'" and policy["script-src"] == policy["style-src"] == "'self'"
    assert not any("unsafe" in sources or "http" in sources or "*" in sources for sources in policy.values())
    assert answer.headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_files_need_nothing_from_elsewhere(file: Path) -> None:
    text = file.read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")
    assert not re.search(r"""(?:src|href|url|from|import)\W{1,3}(?:https?:)?//""", text)
    assert "innerHTML" not in text and "insertAdjacentHTML" not in text, "text must stay text"
    assert not re.search(r"<script(?![^>]*src=)|\son\w+=|style=", text), "the policy forbids these"


def test_types(served: Served) -> None:
    types = {path: httpx.get(served.url + path).headers["content-type"] for path in PATHS}
    assert types["/"].startswith("text/html") and types["/page/page.css"].startswith("text/css")
    assert all(kind.startswith("text/javascript") for path, kind in types.items() if path.endswith(".js"))


def test_docs_need_no_other_host(served: Served) -> None:
    answer = httpx.get(f"{served.url}/docs")
    assert answer.is_redirect and answer.headers["location"] == "./#api"
    assert httpx.get(f"{served.url}/redoc").status_code == 404


def test_with_a_key_the_files_are_open_and_the_data_is_not(async_llm: AsyncLLM) -> None:
    with serving(async_llm, api_key="secret") as locked:
        assert {httpx.get(locked.url + path).status_code for path in PATHS} == {200}
        for path in ("/stats", "/plan", "/openapi.json", "/server_info"):
            assert httpx.get(locked.url + path).status_code == 401
            assert httpx.get(locked.url + path, headers={"authorization": "Bearer secret"}).status_code == 200


def test_the_page_can_be_switched_off(async_llm: AsyncLLM) -> None:
    with serving(async_llm, page=False) as plain:
        assert {httpx.get(plain.url + path).status_code for path in [*PATHS, "/docs"]} == {404}
        assert httpx.get(f"{plain.url}/stats").status_code == 200


def test_stats_while_the_model_is_loaded() -> None:
    with serving(None) as loading:
        stats = httpx.get(f"{loading.url}/stats").json()
        assert stats["status"] == "loading" and stats["model"] == "tiny" and stats["engine"] is None
        assert httpx.get(f"{loading.url}/plan").status_code == 503
        loading.state.draining = True
        assert httpx.get(f"{loading.url}/stats").json()["status"] == "draining"


def test_stats_of_a_known_load(async_llm: AsyncLLM) -> None:
    """Two prompts of 20 tokens, the second one found in the cache but for its last token; 4 tokens each."""
    prompt = list(range(300, 320))  # no other test begins with this token
    with serving(async_llm) as fresh:
        before = httpx.get(f"{fresh.url}/stats").json()
        for _ in range(2):
            fresh.client.completions.create(
                model="tiny", prompt=prompt, max_tokens=4, temperature=0, extra_body={"ignore_eos": True}
            )
        assert fresh.rests()
        httpx.get(f"{fresh.url}/nothing")
        fresh.state.draining = True
        assert httpx.get(f"{fresh.url}/ready").status_code == 503  # an answer, not an error
        after = httpx.get(f"{fresh.url}/stats").json()
    assert after["tokens"] == {"prompt": 40, "generated": 8} and after["finished"]["length"] == 2
    assert after["http_errors"] == {"404": 1}
    assert sum(after["latency"]["ttft"]["counts"]) == sum(after["latency"]["e2e"]["counts"]) == 2
    assert sum(after["latency"]["itl"]["counts"]) == 6 and sum(after["latency"]["tpot"]["counts"]) == 2
    kv, cache = after["engine"]["kv"], after["engine"]["prefix_cache"]
    assert kv["total_tokens"] == 512 and kv["used_tokens"] == 0
    # 20 tokens of the prompt and 3 of the answer: the last one has no KV.
    assert kv["cached_tokens"] == cache["tokens"] == before["engine"]["kv"]["cached_tokens"] + 23
    assert cache["query_tokens"] == before["engine"]["prefix_cache"]["query_tokens"] + 40
    assert cache["hit_tokens"] == before["engine"]["prefix_cache"]["hit_tokens"] + 19


def test_the_plan_has_the_reasons_of_explain(served: Served) -> None:
    answer = httpx.get(f"{served.url}/plan").json()
    assert answer["digest"] == served.llm.plan.digest()
    entries = {entry["entry"]: entry["candidates"] for entry in answer["entries"]}
    for bucket in served.llm.plan.buckets:
        candidates = entries.get(bucket.entry.label) or entries[bucket.entry.role]
        assert bucket.choice.label in {one["backend"] for one in candidates if one["status"] == "chosen"}
    (torch,) = [one for one in entries["attention.decode"] if one["backend"] == "torch@minisgl-cpu-sim"]
    assert torch["status"] == "fits" and "tier" in torch["preferred"]
    assert answer["remarks"] == []


def test_a_plan_that_follows_measurements_says_so(served: Served) -> None:
    first, *others = served.llm.plan.buckets
    other = replace(first, choice=replace(first.choice, name="torch"))
    measured = SimpleNamespace(
        plan=replace(served.llm.plan, buckets=(other, *others)), engine_config=served.llm.engine_config
    )
    (remark,) = _plan_json(cast("Any", measured))["remarks"]
    assert "minisgl calibrate" in remark
