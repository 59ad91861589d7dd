"""The class for scripts and notebooks: a model in, answers out."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from queue import Empty
from typing import TYPE_CHECKING, Any, Never

from minisgl_core.progress import progress_bar

from .arguments import refuse_unknown_arguments
from .calls import ThreadCall
from .face import Conversation, Conversations, Face, list_conversations
from .stream import Stream

if TYPE_CHECKING:
    from minisgl_core.core import SamplingParams

    from .answers import Completion
    from .prompts import PreparedPrompt, Prompt, Prompts

__all__ = ["LLM"]

PROGRESS_S = 0.1
"""How often a bar moves."""


class LLM(Face):
    __doc__ = f"""{Face.__doc__}
    Use it as a context manager, or call :meth:`shutdown`. :class:`AsyncLLM` is the same for coroutines; this one works
    inside a coroutine too, which then waits for the answer.
    """

    def generate(
        self,
        prompts: Prompts,
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = True,
        **unknown: Never,
    ) -> list[Completion]:
        """Answer all ``prompts`` together; the answers are in their order.

        ``params``: for all prompts, or one per prompt. ``max_tokens`` is capped at what context and KV pool leave.
        Ctrl-C ends the requests of this call and leaves the LLM usable.

        Raises :class:`AdmissionError`, before any work, if one of the prompts cannot be served; it names its index.
        An answer on which the model failed has an ``error``.
        """
        refuse_unknown_arguments("generate", ("prompts", "params", "progress"), unknown)
        return self._answer(self._prepare(prompts, params), progress)

    def chat(
        self,
        messages: Conversations,
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = True,
        **options: Any,
    ) -> list[Completion]:
        """Answer one conversation, or each of a list of them, like :meth:`generate`.

        ``messages``: ``[{"role": "user", "content": "..."}]``. ``options``: of the model's chat template, such as
        ``tools`` or ``enable_thinking=False``.
        """
        return self._answer(self._prepare(self._chat_prompts(list_conversations(messages), options), params), progress)

    def stream(self, prompt: Prompt, params: SamplingParams | None = None, **unknown: Never) -> Stream:
        """Answer one prompt piece by piece; closing or dropping the iterator aborts the request.

        Raises like :meth:`generate`, at once; and :class:`UsageError` from the iterator if the LLM was shut down
        meanwhile.
        """
        refuse_unknown_arguments("stream", ("prompt", "params"), unknown)
        return Stream(self._engine, self._prepare([prompt], params))

    def stream_chat(self, messages: Conversation, params: SamplingParams | None = None, **options: Any) -> Stream:
        """Answer one conversation like :meth:`stream`; ``options`` as for :meth:`chat`."""
        return Stream(self._engine, self._prepare(self._chat_prompts([messages], options), params))

    def clear_cache(self) -> None:
        """Forget every cached prefix that no running request uses, on all ranks."""
        call = ThreadCall()
        self._engine.clear_cache(call)
        call.wait()
        call.raise_failure()

    def _answer(self, prepared: Sequence[PreparedPrompt], progress: bool) -> list[Completion]:
        call, total = ThreadCall(), sum(params.n for _, params in prepared)
        with progress_bar("requests", total, shown=progress, leave=True) as bar:
            try:
                self._engine.submit(prepared, call)
                if not bar.disable:
                    _show_until_woken(call, bar, total)
                elif prepared:
                    call.wait()
            except BaseException:
                rest = ThreadCall()
                if self._engine.abort(call, rest):
                    rest.wait()
                raise
            call.raise_failure()
            bar.update(total - bar.n)
        return self._engine.completions(call)

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()


def _show_until_woken(call: ThreadCall, bar: Any, total: int) -> None:
    woken = not total
    while not woken:
        with suppress(Empty):
            call.wait(PROGRESS_S)
            woken = True
        bar.update(total - call.left - bar.n)
