"""Random requests of every kind, ten minutes of them in the slow run: each gets its answer, and nothing is left behind.

``SOAK_S`` sets the seconds of the slow one.
"""

from __future__ import annotations

import json
import os
import random
import resource
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from minisgl_core.core import SamplingParams
from minisgl_core.llm import LLM, AsyncLLM
from support.holdings import holdings
from support.http_server import Served, serving
from support.settings import SHARED

pytest.importorskip("minisgl_grammar")
SOAK_S = float(os.environ.get("SOAK_S", "600"))
THREADS = 8
GROWTH_KIB = 64 << 10
"""Of the process, from the first third to the end"""
PROMPTS = [[5 + index, 6, 7 + index % 3] * (1 + index % 5) for index in range(24)]
TOKENS = 12
BAD: list[Any] = [{"prompt": []}, {"prompt": "x", "n": 0}, {"prompt": [10**6]}, {"prompt": "x", "nothing": 1}, "x"]


@pytest.fixture(scope="module")
def served(tiny: Callable[[str], Path]) -> Iterator[Served]:
    llm = AsyncLLM(tiny("q3-text"), **{**SHARED, "num_page_override": 192, "backends": {"grammar": "llguidance"}})
    with serving(llm, max_waiting=64) as server:
        yield server
    llm.shutdown()


@pytest.fixture(scope="module")
def expected(alone: LLM) -> list[str]:
    """The answer to each prompt alone."""
    params = SamplingParams(max_tokens=TOKENS, ignore_eos=True, temperature=0)
    return [answer.text for answer in alone.generate(PROMPTS, params)]


@dataclass
class Client:
    """One thread's requests."""

    served: Served
    expected: list[str]
    seed: int
    counts: Counter[str] = field(default_factory=Counter)
    failure: BaseException | None = None

    def run(self, until: float) -> None:
        draw = random.Random(self.seed)
        kinds = (self.whole, self.stream, self.leave, self.choices, self.constrained, self.refused, self.abort)
        try:
            with httpx.Client(base_url=self.served.url, timeout=120) as http:
                while time.monotonic() < until:
                    kind = draw.choice(kinds)
                    kind(http, draw)
                    self.counts[kind.__name__] += 1
        except BaseException as error:
            self.failure = error

    def body(self, index: int, **fields: Any) -> dict[str, Any]:
        return {"prompt": PROMPTS[index], "max_tokens": TOKENS, "ignore_eos": True, "temperature": 0, **fields}

    def whole(self, http: httpx.Client, draw: random.Random) -> None:
        index = draw.randrange(len(PROMPTS))
        answer = http.post("/v1/completions", json=self.body(index))
        assert answer.json()["choices"][0]["text"] == self.expected[index], answer.text

    def stream(self, http: httpx.Client, draw: random.Random) -> None:
        index, text = draw.randrange(len(PROMPTS)), ""
        with http.stream("POST", "/v1/completions", json=self.body(index, stream=True)) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    text += json.loads(line[6:])["choices"][0]["text"]
        assert text == self.expected[index]

    def leave(self, http: httpx.Client, draw: random.Random) -> None:
        """Go away at any point of a stream, or while nothing has come."""
        body = self.body(draw.randrange(len(PROMPTS)), stream=True, max_tokens=40)
        lines = draw.randrange(6)
        with http.stream("POST", "/v1/completions", json=body) as answer:
            for _, _ in zip(range(lines), answer.iter_lines(), strict=False):
                pass

    def choices(self, http: httpx.Client, draw: random.Random) -> None:
        index = draw.randrange(len(PROMPTS))
        fields = {"n": 3, "temperature": 1.0, "seed": draw.randrange(99), "presence_penalty": 0.5, "logprobs": 2}
        answer = http.post("/v1/completions", json=self.body(index, **fields)).json()
        assert len(answer["choices"]) == 3
        assert answer["usage"]["completion_tokens"] == 3 * TOKENS

    def constrained(self, http: httpx.Client, draw: random.Random) -> None:
        words = [f"w{draw.randrange(40)}", "other"]
        body = {"prompt": PROMPTS[0], "max_tokens": 30, "structured_outputs": {"choice": words}}
        answer = http.post("/v1/completions", json=body).json()
        assert answer["choices"][0]["text"] in words, answer

    def refused(self, http: httpx.Client, draw: random.Random) -> None:
        assert 400 <= http.post("/v1/completions", json=draw.choice(BAD)).status_code < 500

    def abort(self, http: httpx.Client, draw: random.Random) -> None:
        name = f"{self.seed}-{draw.random()}"
        body = self.body(draw.randrange(len(PROMPTS)), stream=True, max_tokens=40)
        with http.stream("POST", "/v1/completions", json=body, headers={"x-request-id": name}) as answer:
            httpx.post(f"{self.served.url}/abort", json={"request_id": name}, timeout=120)
            answer.read()


def soak(served: Served, expected: list[str], seconds: float) -> Counter[str]:
    """Returns how many requests of each kind were sent."""
    until = time.monotonic() + seconds
    clients = [Client(served, expected, seed) for seed in range(THREADS)]
    threads = [threading.Thread(target=client.run, args=(until,)) for client in clients]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for client in clients:
        if client.failure is not None:
            raise client.failure
    assert served.rests(60)  # no request is known any more, and every page is free or cached, once
    router = holdings(served.llm._engine._router)
    assert not any(router.values()), router
    return sum((client.counts for client in clients), Counter())


def test_a_short_soak_leaves_nothing_behind(served: Served, expected: list[str]) -> None:
    assert len(soak(served, expected, 6)) >= 5


@pytest.mark.slow
@pytest.mark.timeout(SOAK_S * 2 + 300)
def test_a_long_soak_leaves_nothing_behind(served: Served, expected: list[str]) -> None:
    soak(served, expected, SOAK_S / 3)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    counts = soak(served, expected, SOAK_S * 2 / 3)
    assert len(counts) == 7
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < GROWTH_KIB
