"""``priority`` of every call, down to the order in which requests are admitted."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from minisgl_core.core import SamplingParams
from minisgl_core.errors import AdmissionError, ConfigError
from minisgl_core.llm import LLM, AsyncLLM, prepare_prompts
from minisgl_core.scheduler import Limits
from support.make_checkpoints import ensure_checkpoint

SETTINGS: dict[str, Any] = {"dtype": torch.float32, "num_page_override": 256, "max_seq_len_override": 64}
PARAMS = SamplingParams(max_tokens=10, ignore_eos=True)
CHAT = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(ensure_checkpoint("q3-text"), progress=False, **SETTINGS) as llm:
        yield llm


@pytest.mark.parametrize("call", ["generate", "chat"])
def test_a_higher_priority_overtakes_those_that_wait(call: str, slow_down: Callable[..., None]) -> None:
    """One request runs at a time. While the first one does, four others arrive."""

    async def main() -> list[int]:
        ended: list[int] = []

        async def ask(number: int, priority: int) -> None:
            if call == "generate":
                await llm.generate([[number, 2, 3]], PARAMS, priority=priority)
            else:
                await llm.chat(CHAT, PARAMS, priority=priority)
            ended.append(number)

        async def read(number: int, priority: int) -> None:
            stream = llm.stream if call == "generate" else llm.stream_chat
            given: Any = [number, 2, 3] if call == "generate" else CHAT
            async for _ in stream(given, PARAMS, priority=priority):
                pass
            ended.append(number)

        running = llm.stream([0, 2, 3], PARAMS)
        await anext(running)
        await asyncio.gather(ask(1, -1), read(2, 0), ask(3, 7), read(4, 8))
        return ended

    llm = AsyncLLM(ensure_checkpoint("q3-text"), progress=False, queue="priority", max_running_req=1, **SETTINGS)
    slow_down(llm)
    assert asyncio.run(main()) == [4, 3, 2, 1]
    llm.shutdown()


def test_the_default_queue_refuses_a_priority_at_the_call(llm: LLM) -> None:
    refused = pytest.raises(AdmissionError, match=r'`priority` is 3, but this engine .*; set `queue="priority"`')
    with refused:
        llm.generate([[1, 2]], PARAMS, priority=3)
    with refused:
        llm.chat(CHAT, PARAMS, priority=3)
    with refused:
        llm.stream([1, 2], PARAMS, priority=3)
    with refused:
        llm.stream_chat(CHAT, PARAMS, priority=3)
    assert len(llm.generate([[1, 2]], PARAMS, priority=0)[0].token_ids) == 10


@pytest.mark.parametrize("priority", [101, -101, True, None, "1"])
def test_a_priority_must_be_an_integer_in_range(priority: Any) -> None:
    with pytest.raises(AdmissionError, match=r"`priority` is .*; give an integer from -100 to 100"):
        prepare_prompts([[1]], None, None, Limits(64, None, 50, uses_priority=True), priority)


def test_unknown_queues_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="`queue` is 'lifo'"):
        LLM(ensure_checkpoint("q3-text"), queue="lifo")
    with pytest.raises(ConfigError, match="LLM calls this `queue`"):
        LLM(ensure_checkpoint("q3-text"), scheduling_policy="priority")
