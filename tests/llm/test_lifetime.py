"""How an engine ends: failed steps and starts, Ctrl-C, shutdown, garbage collection, and the end of whole programs."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from minisgl_core.core import SamplingParams
from minisgl_core.errors import EngineError, UsageError
from minisgl_core.llm import LLM, AsyncLLM, Runner
from support.make_checkpoints import NUM_STEPS, Reference, ensure_checkpoint

SETTINGS: dict[str, Any] = {
    "dtype": torch.float32,
    "num_page_override": 512,
    "max_seq_len_override": 64,
    "max_running_req": 8,
    "progress": False,
}
GREEDY = SamplingParams(max_tokens=NUM_STEPS, ignore_eos=True)
LONG = SamplingParams(max_tokens=50, ignore_eos=True)
SlowDown = Callable[..., None]


# ---- failures --------------------------------------------------------------------------------------------------------


def test_an_error_of_a_step_reaches_every_call_that_waits(
    expected: Reference, monkeypatch: pytest.MonkeyPatch, slow_down: SlowDown
) -> None:
    llm = LLM(ensure_checkpoint("q3-text"), **SETTINGS)
    slow_down(llm)
    launch, passes = llm.engine.launch, [0]

    def breaks(batch: Any, mode: Any) -> Any:
        passes[0] += 1
        if passes[0] > 10:
            raise RuntimeError("device lost")
        return launch(batch, mode)

    monkeypatch.setattr(llm.engine, "launch", breaks)
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
    expected: Reference, slow_down: SlowDown, wait_until_idle: Callable[[LLM, float], None]
) -> None:
    with LLM(ensure_checkpoint("q3-text"), **SETTINGS) as llm:
        slow_down(llm)
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
        wait_until_idle(llm, 20)


def test_shutdown_while_coroutines_wait(expected: Reference, slow_down: SlowDown) -> None:
    llm = AsyncLLM(ensure_checkpoint("q3-text"), **SETTINGS)
    slow_down(llm)

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
    "forks with an open stream": """
import signal
llm = LLM(sys.argv[1], **SETTINGS)
stream = llm.stream([1, 2], LONG)
next(stream)
if (pid := os.fork()) == 0:
    signal.alarm(20)
    try:
        for chunk in stream:
            pass
    except UsageError as error:
        os._exit(7 if "belongs to the process that forked" in str(error) else 8)
    os._exit(9)
code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
tokens = 1 + sum(len(chunk.token_ids) for chunk in stream)
print("done" if (code, stream.completion().finish_reason) == (7, "length") else (code, tokens))
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
