"""Many callers of one engine: threads, event loops, and streams that end early."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from minisgl_core.core import SamplingParams
from minisgl_core.errors import AdmissionError, UsageError
from minisgl_core.llm import AsyncLLM
from support.make_checkpoints import NUM_STEPS, Reference, ensure_checkpoint
from support.settings import SHARED

SETTINGS = SHARED
GREEDY = SamplingParams(max_tokens=NUM_STEPS, ignore_eos=True)
LONG = SamplingParams(max_tokens=50, ignore_eos=True)


@pytest.fixture(scope="module")
def llm() -> Iterator[AsyncLLM]:
    made = AsyncLLM(ensure_checkpoint("q3-text"), **SETTINGS)
    yield made
    made.shutdown()


@pytest.fixture
def slow_steps(llm: AsyncLLM, slow_down: Callable[..., None]) -> None:
    slow_down(llm)


# ---- coroutines ------------------------------------------------------------------------------------------------------


def test_generate_chat_and_stream_of_one_loop_are_served_together(llm: AsyncLLM, expected: Reference) -> None:
    async def streamed(which: int) -> list[int]:
        return [token async for chunk in llm.stream(expected.prompts[which], GREEDY) for token in chunk.token_ids]

    async def generated(which: int) -> list[int]:
        return (await llm.generate([expected.prompts[which]], GREEDY))[0].token_ids

    async def main() -> list[list[int]]:
        await llm.chat([{"role": "user", "content": "hello"}], GREEDY)
        return await asyncio.gather(*map(streamed, range(3)), *map(generated, range(3)))

    assert asyncio.run(main()) == expected.continuations * 2
    assert asyncio.run(llm.generate([])) == []


def test_several_event_loops_at_once(llm: AsyncLLM, expected: Reference) -> None:
    answers: dict[int, list[int]] = {}

    def run(which: int) -> None:
        answers[which] = asyncio.run(llm.generate([expected.prompts[which]], GREEDY))[0].token_ids

    threads = [threading.Thread(target=run, args=(which,)) for which in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [answers[which] for which in range(3)] == expected.continuations


def test_a_loop_is_woken_at_most_once_per_step(llm: AsyncLLM, expected: Reference, slow_steps: None) -> None:
    steps, wakes = [0], [0]
    step = llm.scheduler.step

    def counted() -> Any:
        steps[0] += 1
        return step()

    async def read(stream: Any) -> int:
        return sum([len(chunk.token_ids) async for chunk in stream])

    async def main() -> list[int]:
        loop = asyncio.get_running_loop()
        wake = loop.call_soon_threadsafe

        def woken(*given: Any) -> Any:
            wakes[0] += 1
            return wake(*given)

        loop.call_soon_threadsafe = woken  # type: ignore[method-assign, assignment]
        return await asyncio.gather(*(read(llm.stream(expected.prompts[0], GREEDY)) for _ in range(8)))

    llm.scheduler.step = counted  # type: ignore[method-assign]
    assert asyncio.run(main()) == [NUM_STEPS] * 8
    assert 0 < wakes[0] <= steps[0] < 8 * NUM_STEPS


@pytest.mark.parametrize("how", ["cancel", "aclose", "drop", "break"])
def test_a_stream_without_a_reader_is_aborted(llm: AsyncLLM, expected: Reference, how: str, slow_steps: None) -> None:
    async def main() -> None:
        stream = llm.stream(expected.prompts[2], LONG)
        await anext(stream)
        if how == "cancel":
            task = asyncio.ensure_future(anext(stream))
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        elif how == "aclose":
            await stream.aclose()
            with pytest.raises(StopAsyncIteration):
                await anext(stream)
        elif how == "break":
            async for _ in llm.stream(expected.prompts[1], LONG):
                break
        del stream
        begin = time.monotonic()
        while llm.scheduler.has_work:
            assert time.monotonic() < begin + 0.3, "it would run for half a second"
            await asyncio.sleep(0.01)

    asyncio.run(main())


def test_closing_a_stream_ends_the_loop_of_the_task_that_reads_it(llm: AsyncLLM, slow_steps: None) -> None:
    async def main() -> None:
        stream = llm.stream([5, 6, 7], LONG)
        await anext(stream)

        async def read() -> list[Any]:
            return [chunk async for chunk in stream]

        reader = asyncio.ensure_future(read())
        await asyncio.sleep(0.05)
        await stream.aclose()
        chunks = await asyncio.wait_for(reader, 10)
        assert all(chunk.finish_reason is None for chunk in chunks)
        await llm.clear_cache()

    asyncio.run(main())


def test_a_cancelled_generate_is_aborted(llm: AsyncLLM, expected: Reference, slow_steps: None) -> None:
    async def main() -> None:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(llm.generate(expected.prompts, LONG), 0.05)
        await llm.clear_cache()
        assert not llm.scheduler.has_work
        await llm.clear_cache()  # now of those pages too that the last pass still held
        assert llm.scheduler.stats.free_pages == 512

    asyncio.run(main())


def test_requests_of_a_loop_that_was_closed_are_aborted(
    llm: AsyncLLM, expected: Reference, slow_steps: None, wait_until_idle: Callable[[AsyncLLM, float], None]
) -> None:
    loop = asyncio.new_event_loop()
    streams: list[Any] = []

    async def main() -> None:
        streams.append(llm.stream(expected.prompts[0], LONG))
        task = asyncio.ensure_future(anext(streams[0]))
        await asyncio.sleep(0.005)
        task.add_done_callback(lambda _: None)

    loop.run_until_complete(main())
    pending = asyncio.all_tasks(loop)
    loop.close()
    wait_until_idle(llm, 5)
    for task in pending:
        task._log_destroy_pending = False  # type: ignore[attr-defined]
    assert asyncio.run(llm.generate([expected.prompts[0]], GREEDY))[0].token_ids == expected.continuations[0]


def test_bad_arguments_raise_at_the_call(llm: AsyncLLM) -> None:
    with pytest.raises(AdmissionError, match="the prompt is empty"):
        llm.stream([])
    with pytest.raises(AdmissionError, match="prompt 0: the prompt is empty"):
        asyncio.run(llm.generate([""]))


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_a_stream_outside_of_a_loop_raises_what_asyncio_raises(llm: AsyncLLM) -> None:
    with pytest.raises(RuntimeError, match="no running event loop"):
        llm.stream([5, 6, 7])
    gc.collect()


def test_an_asynchronous_context_manager_shuts_down(expected: Reference) -> None:
    async def main() -> AsyncLLM:
        async with AsyncLLM(ensure_checkpoint("q3-text"), **SETTINGS) as llm:
            assert (await llm.generate([expected.prompts[0]], GREEDY))[0].token_ids == expected.continuations[0]
        return llm

    llm = asyncio.run(main())
    with pytest.raises(UsageError, match="has been shut down"):
        asyncio.run(llm.generate([[1]]))
