"""An engine in a process of its own: the answers of a thread's, its errors, and its end."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from minisgl_core.core import SamplingParams
from minisgl_core.errors import CheckpointError, EngineError, UsageError
from minisgl_core.llm.llm import ProcessLLM
from support.make_checkpoints import NUM_STEPS, Reference, ensure_checkpoint
from support.settings import SHARED

GREEDY = SamplingParams(max_tokens=NUM_STEPS, ignore_eos=True)
LONG = SamplingParams(max_tokens=50, ignore_eos=True)


def pid_of(llm: ProcessLLM) -> int:
    child = llm._engine._transport._child  # type: ignore[union-attr]
    assert child is not None
    return child.process.pid


@pytest.fixture(scope="module")
def llm() -> Iterator[ProcessLLM]:
    made = ProcessLLM(ensure_checkpoint("q3-text"), **SHARED)
    pid = pid_of(made)
    yield made
    made.shutdown()
    assert not Path(f"/proc/{pid}").exists()


def test_it_answers_as_a_thread_does(llm: ProcessLLM, expected: Reference) -> None:
    async def streamed(which: int) -> list[int]:
        return [token async for chunk in llm.stream(expected.prompts[which], GREEDY) for token in chunk.token_ids]

    async def main() -> list[list[int]]:
        several = await llm.generate(expected.prompts[:3], GREEDY)
        return [answer.token_ids for answer in several] + await asyncio.gather(*map(streamed, range(3)))

    assert asyncio.run(main()) == expected.continuations * 2
    assert pid_of(llm) != os.getpid()


def test_stop_strings_end_an_answer_in_the_engine_too(llm: ProcessLLM) -> None:
    async def main() -> None:
        (whole,) = await llm.generate([[5, 6, 7]], LONG)
        stop = whole.text[4:7]
        (cut,) = await llm.generate([[5, 6, 7]], SamplingParams(max_tokens=50, ignore_eos=True, stop=stop))
        assert cut.finish_reason == "stop" and cut.text == whole.text[: whole.text.index(stop)]
        await llm.clear_cache()
        assert (llm.stats.running, llm.stats.waiting) == (0, 0)

    asyncio.run(main())


def test_log_probabilities_and_choices_come_over(llm: ProcessLLM) -> None:
    params = SamplingParams(max_tokens=3, ignore_eos=True, n=2, logprobs=2, prompt_logprobs=1, temperature=1.0, seed=1)
    (answer,) = asyncio.run(llm.generate([[5, 6, 7]], params))
    assert answer.choices is not None and answer.prompt_logprobs is not None
    assert [len(choice.logprobs or ()) for choice in answer.choices] == [3, 3] and len(answer.prompt_logprobs) == 2


def test_a_dropped_stream_frees_its_pages(llm: ProcessLLM) -> None:
    async def main() -> None:
        stream = llm.stream([5, 6, 7], LONG)
        await anext(stream)
        await stream.aclose()
        await llm.ping()
        await llm.clear_cache()
        await llm.clear_cache()  # now of those pages too that the last pass still held
        assert llm.stats.free_pages == 512 and llm.stats.running == 0

    asyncio.run(main())


def test_facts_come_over_and_the_engine_itself_is_out_of_reach(llm: ProcessLLM) -> None:
    assert llm.plan.digest() and llm.engine_config.max_running_req == 8
    assert llm.max_seq_len == 64 and llm.limits.pool_tokens == 512
    for name in ("engine", "scheduler"):
        with pytest.raises(UsageError, match="in a process of its own"):
            getattr(llm, name)


def test_a_start_that_fails_raises_the_engines_error(tmp_path: Path, model_copy: Path) -> None:
    weights = next(model_copy.glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(CheckpointError, match="weight file") as caught:
        ProcessLLM(model_copy, **SHARED)
    assert caught.value.field or caught.value.value or caught.value.headline


@pytest.fixture
def model_copy(tmp_path: Path) -> Path:
    import shutil

    return Path(shutil.copytree(ensure_checkpoint("q3-text"), tmp_path / "model"))


def test_a_process_that_does_not_run_is_noticed(llm: ProcessLLM) -> None:
    async def main() -> None:
        assert llm.hanging(0.5) is None
        os.kill(pid_of(llm), signal.SIGSTOP)
        try:
            asked = asyncio.ensure_future(llm.ping())
            await asyncio.sleep(1.0)
            assert (llm.hanging(0.5) or "").startswith("the engine has not answered for")
        finally:
            os.kill(pid_of(llm), signal.SIGCONT)
        await asked
        assert llm.hanging(0.5) is None

    asyncio.run(main())


SABOTAGE = """
import time
from minisgl_core.engine import Engine

def broken(*_):
    time.sleep(3)
    raise RuntimeError("broken on purpose")

Engine.launch = broken
"""


def test_a_step_that_fails_fails_every_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sitecustomize.py").write_text(SABOTAGE)  # read by the engine's interpreter
    monkeypatch.syspath_prepend(tmp_path)
    llm = ProcessLLM(ensure_checkpoint("q3-text"), **SHARED)

    async def use() -> str:
        answer = asyncio.ensure_future(llm.generate([[1, 2, 3]], GREEDY))
        asked = asyncio.ensure_future(llm.ping())
        said = None
        while not answer.done():
            await asyncio.sleep(0.1)
            said = llm.hanging(1.0) or said
        with pytest.raises(RuntimeError, match="broken on purpose"):
            await answer
        with pytest.raises((RuntimeError, EngineError), match="broken on purpose"):
            await asked
        assert said is not None
        return said

    said = asyncio.run(use())
    assert said.startswith("step 1 of the engine has not ended for") and "in broken" in said
    for call in (llm.generate([[1, 2, 3]], GREEDY), llm.ping(), llm.clear_cache()):
        with pytest.raises(EngineError, match="the engine has stopped after an error: broken on purpose"):
            asyncio.run(call)  # type: ignore[arg-type]
    llm.shutdown()


def test_the_death_of_the_process_fails_every_call(expected: Reference) -> None:
    llm = ProcessLLM(ensure_checkpoint("q3-text"), **SHARED)
    threading.Timer(0.2, os.kill, (pid_of(llm), signal.SIGKILL)).start()

    async def use() -> Any:
        while True:
            await llm.generate(expected.prompts, LONG)

    with pytest.raises(EngineError, match="died without an exit report, exit code -9"):
        asyncio.run(use())
    with pytest.raises(EngineError, match="died without an exit report, exit code -9"):
        asyncio.run(llm.ping())
    llm.shutdown()
