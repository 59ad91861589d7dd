"""How much longer a decode step takes through LLM and AsyncLLM than when the scheduler is driven directly.

    python benchmarks/async_face.py [--rounds N] [--tokens N] [--json FILE]

Batch 1 on an engine that computes nothing, so that a step is the host's work alone. In each round every way answers the
same prompt once, in turns. A round's figures are medians over the intervals between two launches of a decode pass: the
wall time, and of it the CPU time of the thread that steps. ``stream`` reads the tokens in another thread or in an event
loop, so that two threads share the interpreter; ``generate`` only waits. What a way adds is the median over rounds of
its difference to ``direct``, which has a thread of its own as well. A busy machine shows in wall times first.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from commandline import Parser, about, keep, output, positive, run
from tqdm import tqdm

from minisgl_core import LLM, AsyncLLM, SamplingParams
from minisgl_core.bench.model_folder import write_geometry
from minisgl_core.modelconfig.geometries import geometry
from minisgl_core.scheduler import Message, NewReq, Scheduler, TokenOuts
from minisgl_core.testing import NullEngine

PROMPT = list(range(3, 19))
LONGEST = 1 << 14


class NullRunner:
    """The interface of a Runner for the engine's thread, with nothing below the scheduler."""

    usable = True

    def __init__(self, *_: object) -> None:
        self.engine: Any = NullEngine(num_pages=LONGEST, max_seq_len=LONGEST, max_running_req=1)
        self.engine.model = None  # it has no stream to be made current
        self.scheduler = Scheduler(self.engine)
        self._messages: list[Message] = []

    @property
    def has_work(self) -> bool:
        return bool(self._messages) or self.scheduler.has_work

    def post(self, message: Message) -> None:
        self._messages.append(message)

    def step(self) -> TokenOuts:
        messages, self._messages = self._messages, []
        self.scheduler.apply(messages)
        return self.scheduler.step()

    def check(self) -> None:
        """There are no other ranks that may have failed."""

    def close(self) -> None:
        self.scheduler.close()


def both_faces(path: Path) -> tuple[LLM, AsyncLLM]:
    """Two interfaces to one engine, so that only the interface differs."""
    with patch("minisgl_core.llm.async_engine.Runner", NullRunner):
        llm = LLM(path, device="cpu", progress=False)
    other = object.__new__(AsyncLLM)
    vars(other).update(vars(llm))
    return llm, other


def ways(llm: LLM, async_llm: AsyncLLM, params: SamplingParams) -> dict[str, Callable[[], object]]:
    """The ways to answer the prompt once."""
    uids = iter(range(10**9, 2 * 10**9))
    own_thread = ThreadPoolExecutor(1)

    def drive() -> None:
        llm.scheduler.apply([NewReq(next(uids), np.array(PROMPT, dtype=np.int32), params)])
        while llm.scheduler.has_work:
            llm.scheduler.step()

    async def read() -> list[Any]:
        return [chunk async for chunk in async_llm.stream(PROMPT, params)]

    return {
        "direct": lambda: own_thread.submit(drive).result(),
        "LLM.generate": lambda: llm.generate([PROMPT], params, progress=False),
        "LLM.stream": lambda: list(llm.stream(PROMPT, params)),
        "AsyncLLM.generate": lambda: asyncio.run(async_llm.generate([PROMPT], params)),
        "AsyncLLM.stream": lambda: asyncio.run(read()),
    }


def measure(rounds: int, tokens: int) -> dict[str, list[tuple[float, float]]]:
    """For each way the median interval of each round, wall time and CPU time in microseconds."""
    found: dict[str, list[tuple[float, float]]] = {}
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    with tempfile.TemporaryDirectory() as folder:
        llm, async_llm = both_faces(write_geometry(geometry("tiny"), Path(folder)))
        launches: list[tuple[float, float]] = []
        launch: Any = llm.engine.launch

        def timed(batch: Any, mode: Any) -> Any:
            if batch.is_decode:
                launches.append((time.perf_counter(), time.thread_time()))
            return launch(batch, mode)

        llm.engine.launch = timed  # type: ignore[method-assign]
        turns = ways(llm, async_llm, params)
        for number in tqdm(range(rounds + 1), desc="rounds"):  # the first round is a warm-up
            for name, answer in turns.items():
                llm.clear_cache()  # and wait until the engine is idle
                launches.clear()
                answer()
                if number:
                    wall, cpu = np.median(np.diff(launches, axis=0), axis=0) * 1e6
                    found.setdefault(name, []).append((float(wall), float(cpu)))
        llm.shutdown()
    return found


def main() -> None:
    """All ways in turns."""
    parser = Parser(__doc__)
    parser.add_argument("--rounds", type=positive, default=30)
    parser.add_argument("--tokens", type=positive, default=1000)
    parser.add_argument("--json", type=output, help="keep every round here")
    options = parser.parse_args()
    found = measure(options.rounds, max(options.tokens, 3))
    figures: dict[str, dict[str, Any]] = {}
    for name, rounds in found.items():
        figures[name] = {}
        for at, kind in enumerate(("wall_us", "cpu_us")):
            values = [one[at] for one in rounds]
            added = statistics.median(one[at] - base[at] for one, base in zip(rounds, found["direct"], strict=True))
            median = statistics.median(values)
            figures[name][kind] = {
                "median": round(median, 1),
                "added": round(added, 1),
                "rounds": np.round(values, 1).tolist(),
            }
        wall, cpu = figures[name]["wall_us"], figures[name]["cpu_us"]
        print(
            f"{name:18} {wall['median']:7.1f} us between steps ({wall['added']:+.1f}), "
            f"CPU {cpu['median']:6.1f} us ({cpu['added']:+.1f})"
        )
    if options.json:
        keep({"tokens": options.tokens, **about(options, "cpu"), "figures": figures}, options.json)


if __name__ == "__main__":
    raise SystemExit(run(main))
