"""LLM for coroutines."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Never

from .arguments import refuse_unknown_arguments
from .calls import LoopCall
from .face import Conversation, Conversations, Face, list_conversations
from .stream import AsyncStream

if TYPE_CHECKING:
    from minisgl_core.core import SamplingParams

    from .answers import Completion
    from .prompts import PreparedPrompt, Prompt, Prompts

__all__ = ["AsyncLLM"]


class AsyncLLM(Face):
    __doc__ = f"""{Face.__doc__}
    Use it as an asynchronous context manager, or call :meth:`shutdown`. The constructor blocks while it loads; where
    the event loop has other work: ``llm = await asyncio.to_thread(AsyncLLM, path)``. One AsyncLLM serves any number of
    event loops, each of which is woken once per step.
    """

    async def generate(
        self, prompts: Prompts, params: SamplingParams | Sequence[SamplingParams] | None = None, **unknown: Never
    ) -> list[Completion]:
        """Answer all ``prompts`` together, as :meth:`LLM.generate` does. A cancelled call aborts its requests."""
        refuse_unknown_arguments("generate", ("prompts", "params"), unknown)
        return await self._answer(self._prepare(prompts, params))

    async def chat(
        self,
        messages: Conversations,
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        **options: Any,
    ) -> list[Completion]:
        """Answer one conversation, or each of a list of them, as :meth:`LLM.chat` does."""
        return await self._answer(self._prepare(self._chat_prompts(list_conversations(messages), options), params))

    def stream(self, prompt: Prompt, params: SamplingParams | None = None, **unknown: Never) -> AsyncStream:
        """Answer one prompt piece by piece: ``async for chunk in llm.stream(prompt)``. Closing or dropping the
        iterator, or cancelling its reader, aborts the request. Raises as :meth:`LLM.stream` does.
        """
        refuse_unknown_arguments("stream", ("prompt", "params"), unknown)
        return AsyncStream(self._engine, self._prepare([prompt], params))

    def stream_chat(self, messages: Conversation, params: SamplingParams | None = None, **options: Any) -> AsyncStream:
        """Answer one conversation like :meth:`stream`; ``options`` as for :meth:`chat`."""
        return AsyncStream(self._engine, self._prepare(self._chat_prompts([messages], options), params))

    async def clear_cache(self) -> None:
        """Forget every cached prefix that no running request uses, on all ranks."""
        call = LoopCall()
        self._engine.clear_cache(call)
        await call.wait()
        call.raise_failure()

    async def _answer(self, prepared: Sequence[PreparedPrompt]) -> list[Completion]:
        call = LoopCall()
        try:
            self._engine.submit(prepared, call)
            if prepared:
                await call.wait()
        except BaseException:
            self._engine.abort(call)
            raise
        call.raise_failure()
        return self._engine.completions(call)

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.shutdown)
