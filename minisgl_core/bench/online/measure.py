"""Sends the requests of one point and measures their answers."""

from __future__ import annotations

import asyncio
import gc
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from .answer import Answer, EventReader
from .figures import Client, figures
from .http import Endpoint, Pool
from .load import Point, Request

__all__ = ["Target", "measure_point", "send_all"]

LAG_PERIOD_S: Final = 0.02


@dataclass(frozen=True, slots=True)
class Target:
    """A server, and how it is called."""

    endpoint: Endpoint
    model: str
    chat: bool = False
    temperature: float = 0.6
    timeout_s: float = 600.0

    def encode(self, request: Request) -> bytes:
        """The HTTP request: streamed, with usage, and as long as it should be."""
        body: dict[str, Any] = {
            "model": self.model,
            "max_tokens": request.output,
            "temperature": self.temperature,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.chat:
            path, body["messages"] = "/v1/chat/completions", [{"role": "user", "content": request.prompt}]
        else:
            path, body["prompt"] = "/v1/completions", request.prompt
        return self.endpoint.post(path, json.dumps(body).encode())


def measure_point(
    target: Target,
    requests: Sequence[Request],
    point: Point,
    objectives: Mapping[str, float] | None = None,
    on_end: Callable[[], object] = lambda: None,
) -> dict[str, Any]:
    """The figures of one load. ``on_end`` is called after each request."""
    answers, client = send_all(target, requests, point.concurrency, on_end)
    rate = None if math.isinf(point.rate) else point.rate
    return {"rate": rate, "max_concurrency": point.concurrency, **figures(answers, objectives or {}, client)}


def send_all(
    target: Target, requests: Sequence[Request], concurrency: int | None, on_end: Callable[[], object] = lambda: None
) -> tuple[list[Answer], Client]:
    """Send each request at its time, or later if ``concurrency`` requests are in flight."""
    encoded = [target.encode(request) for request in requests]
    gc.collect()
    gc.freeze()  # otherwise a collection traverses all modules in the middle of the measurement
    try:
        return asyncio.run(_send_all(target, requests, encoded, concurrency, on_end))
    finally:
        gc.unfreeze()


async def _send_all(
    target: Target,
    requests: Sequence[Request],
    encoded: Sequence[bytes],
    concurrency: int | None,
    on_end: Callable[[], object],
) -> tuple[list[Answer], Client]:
    pool = Pool(target.endpoint)
    places = asyncio.Semaphore(concurrency or len(requests) or 1)
    lags: list[float] = []
    watch = asyncio.create_task(_watch_lag(lags))
    answers, tasks = [], []
    begin, cpu = time.perf_counter(), time.process_time()

    async def run(answer: Answer, data: bytes) -> None:
        try:
            await _one(pool, answer, data, target.timeout_s)
        finally:
            places.release()
            on_end()

    try:
        for request, data in zip(requests, encoded, strict=True):
            if (wait := begin + request.at - time.perf_counter()) > 0:
                await asyncio.sleep(wait)
            await places.acquire()
            due = time.perf_counter() if concurrency else begin + request.at
            answers.append(Answer(request.output, due))
            tasks.append(asyncio.create_task(run(answers[-1], data)))
        await asyncio.gather(*tasks)
    finally:
        watch.cancel()
        pool.close()
    return answers, Client(lags, time.process_time() - cpu, time.perf_counter() - begin)


async def _one(pool: Pool, answer: Answer, data: bytes, timeout_s: float) -> None:
    reader = EventReader(answer)
    answer.sent = time.perf_counter()
    try:
        async with asyncio.timeout(timeout_s):
            status = await pool.request(data, reader.feed)
        reader.finish(status)
    except TimeoutError:
        answer.fail("timeout", f"no complete answer within {timeout_s:g} s")
    except ConnectionError as error:
        answer.fail("connection", str(error))
    except OSError as error:
        answer.fail("cannot connect", str(error))
    answer.end = time.perf_counter()


async def _watch_lag(lags: list[float]) -> None:
    """Note by how much each of equal sleeps is too long: for that long no answer can be noticed."""
    while True:
        begin = time.perf_counter()
        await asyncio.sleep(LAG_PERIOD_S)
        lags.append(max(0.0, time.perf_counter() - begin - LAG_PERIOD_S))
