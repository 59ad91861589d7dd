"""Many callers, one engine: threads, event loops, ends of every kind."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from minisgl_core.core import SamplingParams
from minisgl_core.errors import AdmissionError, EngineError, UsageError
from minisgl_core.llm import LLM, AsyncLLM, Runner
from support.make_checkpoints import NUM_STEPS, Reference, ensure_checkpoint, reference

SETTINGS: dict[str, Any] = {
    "dtype": torch.float32,
    "num_page_override": 512,
    "max_seq_len_override": 64,
    "max_running_req": 8,
    "progress": False,
}
GREEDY = SamplingParams(max_tokens=NUM_STEPS, ignore_eos=True)
LONG = SamplingParams(max_tokens=50, ignore_eos=True)


@pytest.fixture(scope="module")
def expected() -> Reference:
    return reference("q3-text")


@pytest.fixture(scope="module")
def llm() -> Iterator[AsyncLLM]:
    made = AsyncLLM(ensure_checkpoint("q3-text"), **SETTINGS)
    yield made
    made.shutdown()


@pytest.fixture
def slow_steps(llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    slow_down(llm, monkeypatch)


def slow_down(llm: LLM | AsyncLLM, monkeypatch: pytest.MonkeyPatch, seconds: float = 0.01) -> None:
    step = llm.scheduler.step
    monkeypatch.setattr(llm.scheduler, "step", lambda: (time.sleep(seconds), step())[1])


def wait_until(true: Callable[[], bool], within_s: float = 20.0) -> None:
    deadline = time.monotonic() + within_s
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def is_idle(llm: LLM | AsyncLLM) -> bool:
    stats = llm.scheduler.stats
    return (stats.running, stats.waiting, llm.scheduler.has_work) == (0, 0, False)


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
def test_a_stream_that_nobody_reads_is_aborted(llm: AsyncLLM, expected: Reference, how: str, slow_steps: None) -> None:
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
        while not is_idle(llm):
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
        assert is_idle(llm)
        await llm.clear_cache()  # now of those pages too that the last pass still held
        assert llm.scheduler.stats.free_pages == 512

    asyncio.run(main())


def test_requests_of_a_loop_that_was_closed_are_aborted(llm: AsyncLLM, expected: Reference, slow_steps: None) -> None:
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
    wait_until(lambda: is_idle(llm), 5)
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


# ---- failures --------------------------------------------------------------------------------------------------------


def test_an_error_of_a_step_reaches_every_call_that_waits(expected: Reference, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM(ensure_checkpoint("q3-text"), **SETTINGS)
    slow_down(llm, monkeypatch)
    forward, passes = llm.engine.forward_batch, [0]

    def breaks(batch: Any, mode: Any) -> Any:
        passes[0] += 1
        if passes[0] > 10:
            raise RuntimeError("device lost")
        return forward(batch, mode)

    monkeypatch.setattr(llm.engine, "forward_batch", breaks)
    raised: list[BaseException] = []

    def call(streams: bool) -> None:
        try:
            list(llm.stream(expected.prompts[0], LONG)) if streams else llm.generate(
                [expected.prompts[1]], LONG, progress=False
            )
        except RuntimeError as error:
            raised.append(error)

    threads = [threading.Thread(target=call, args=(streams,)) for streams in (True, False, True, False)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [str(error) for error in raised] == ["device lost"] * 4
    with pytest.raises(EngineError, match="stopped after an error: device lost"):
        llm.clear_cache()
    llm.shutdown()


def test_a_failed_start_raises_what_it_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    error = LookupError("no such weights")

    def fails(*_: Any) -> None:
        raise error

    monkeypatch.setattr("minisgl_core.engine.engine.Engine._load_weights", fails)
    before = threading.active_count()
    with pytest.raises(LookupError) as caught:
        LLM(ensure_checkpoint("q3-text"), **SETTINGS)
    assert caught.value is error
    assert threading.active_count() == before


def test_ctrl_c_while_the_model_is_loaded_ends_the_load(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = threading.Event()

    def endless(*_: Any) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        try:
            while True:
                time.sleep(0.01)
        finally:
            ended.set()

    monkeypatch.setattr(Runner, "__init__", endless)
    with pytest.raises(KeyboardInterrupt):
        LLM(ensure_checkpoint("q3-text"), **SETTINGS)
    assert ended.is_set()


def test_ctrl_c_ends_only_the_requests_of_the_interrupted_call(
    expected: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LLM(ensure_checkpoint("q3-text"), **SETTINGS) as llm:
        slow_down(llm, monkeypatch)
        other: list[Any] = []
        thread = threading.Thread(
            target=lambda: other.extend(llm.generate([expected.prompts[0]], GREEDY, progress=False))
        )
        thread.start()
        threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            llm.generate(expected.prompts[1:], LONG, progress=False)
        thread.join(60)
        assert [answer.token_ids for answer in other] == expected.continuations[:1]
        wait_until(lambda: is_idle(llm))


def test_shutdown_while_coroutines_wait(expected: Reference, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = AsyncLLM(ensure_checkpoint("q3-text"), **SETTINGS)
    slow_down(llm, monkeypatch)

    async def main() -> list[Any]:
        waiting = [asyncio.ensure_future(llm.generate([prompt], LONG)) for prompt in expected.prompts]
        stream = llm.stream(expected.prompts[0], LONG)
        await anext(stream)
        await asyncio.to_thread(llm.shutdown)
        with pytest.raises(UsageError, match="has been shut down"):
            [chunk async for chunk in stream]
        return await asyncio.gather(*waiting, return_exceptions=True)

    assert {str(error) for error in asyncio.run(main())} == {"this LLM has been shut down; make a new one"}


def test_garbage_collection_ends_the_thread() -> None:
    before = {thread.ident for thread in threading.enumerate()}
    llm = LLM(ensure_checkpoint("q3-text"), **SETTINGS)
    llm.generate([[1, 2]], GREEDY, progress=False)
    stream = llm.stream([1, 2], GREEDY)
    assert len({thread.ident for thread in threading.enumerate()} - before) == 1
    del llm, stream
    gc.collect()
    assert {thread.ident for thread in threading.enumerate()} <= before


# ---- whole programs --------------------------------------------------------------------------------------------------

HEAD = """
import asyncio, os, sys, threading
from minisgl_core import LLM, AsyncLLM, SamplingParams
from minisgl_core.errors import UsageError

SETTINGS = dict(dtype="float32", num_page_override=64, max_seq_len_override=64, max_running_req=4, progress=False)
LONG = SamplingParams(max_tokens=60, ignore_eos=True)
"""
PROGRAMS = {
    "ends with an open stream": """
llm = LLM(sys.argv[1], **SETTINGS)
stream = llm.stream([1, 2], LONG)
next(stream)
print("done")
""",
    "raises": """
llm = LLM(sys.argv[1], **SETTINGS)
llm.generate([[1, 2]], LONG, progress=False)
print("done")
raise SystemExit(3)
""",
    "ends while a thread generates": """
llm = LLM(sys.argv[1], **SETTINGS)
def work():
    while True:
        llm.generate([[1, 2]], LONG, progress=False)
threading.Thread(target=work, daemon=True).start()
print("done")
""",
    "two ranks, asyncio, no main guard": """
async def main():
    llm = AsyncLLM(sys.argv[1], tp_size=2, **SETTINGS)
    (answer,) = await llm.generate([[1, 2]], LONG)
    print("done" if len(answer.token_ids) == 60 else answer)
asyncio.run(main())
""",
    "forks": """
llm = LLM(sys.argv[1], **SETTINGS)
pid = os.fork()
if pid == 0:
    try:
        llm.generate([[1, 2]], LONG, progress=False)
    except UsageError as error:
        sys.exit(7 if "belongs to the process that forked" in str(error) else 8)
code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
(answer,) = llm.generate([[1, 2]], LONG, progress=False)
print("done" if (code, len(answer.token_ids)) == (7, 60) else (code, answer))
""",
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_programs_end_as_they_should(program: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(HEAD + PROGRAMS[program])
    command = [sys.executable, str(script), str(ensure_checkpoint("q3-text"))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert (done.returncode, done.stdout) == (3 if program == "raises" else 0, "done\n"), done.stderr
    assert "Fatal" not in done.stderr and "Exception ignored" not in done.stderr
