"""LLM and AsyncLLM: a model with its tokenizer and its engine, for scripts, notebooks and coroutines."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from queue import Empty
from typing import TYPE_CHECKING, Any, ClassVar, Final, Never, cast

from minisgl_core.demo_model import resolve_model_path
from minisgl_core.errors import AdmissionError
from minisgl_core.grammar import GrammarVetter
from minisgl_core.plugin_api import Grammar
from minisgl_core.progress import progress_bar
from minisgl_core.tokenizer import load_tokenizer

from .arguments import argument_hint, engine_config, refuse_unknown_arguments
from .async_engine import AsyncEngine
from .calls import LoopCall, ThreadCall
from .grammars import grammar_facts
from .prompts import PreparedPrompt, Prompt, Prompts, prepare_prompts
from .stream import AsyncStream, Stream
from .torchrun import follow

if TYPE_CHECKING:
    import torch

    from minisgl_core.capsule.shadow import ShadowReport
    from minisgl_core.core import SamplingParams
    from minisgl_core.engine import Engine, EngineConfig
    from minisgl_core.registry import Plan
    from minisgl_core.scheduler import Limits, Scheduler, SchedulerStats
    from minisgl_core.tokenizer import Message

    from .output import Completion

__all__ = ["LLM", "AsyncLLM", "BaseLLM", "ProcessLLM"]

Conversation = Iterable["Message"]
Conversations = Conversation | Iterable[Conversation]
"""One list of messages, or several."""
PROGRESS_S: Final = 0.1
"""How often a progress bar moves."""


class BaseLLM:
    """A model, ready to answer; it is loaded by the constructor.

    ``path``: a folder, a .gguf file, ``"demo"``, or a name on a model hub such as ``"Qwen/Qwen3-0.6B"``, which is
    downloaded. ``dtype``: such as ``torch.float32`` or ``"bfloat16"``; None = the checkpoint's.
    ``tp_size``: tensor-parallel ranks; each but the first gets a process of its own. ``backends``: role to backend
    name, ordered list of names, or ``{"prefill": ..., "decode": ...}`` for attention. ``settings``: any other field of
    :class:`~minisgl_core.engine.EngineConfig`, such as ``cuda_graph_max_bs``, ``max_running_req``,
    ``num_page_override``, ``max_seq_len_override`` or ``page_size``.

    A folder without tokenizer files serves prompts of token ids; the text of its answers is empty. It may be used from
    any thread and event loop: calls that run at the same time are served together.
    """

    _own_process: ClassVar = False
    """Whether rank 0's engine runs in a process of its own instead of a thread."""

    def __init__(
        self,
        path: str | Path = "",
        dtype: torch.dtype | str | None = None,
        tp_size: int = 1,
        *,
        backends: Mapping[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        config = engine_config(path, dtype, tp_size, backends, settings)
        if config.launcher == "torchrun":
            follow(tp_size, config.distributed_timeout_s)  # on the other ranks this ends the process
        found = resolve_model_path(path, progress=config.progress)
        self.tokenizer = load_tokenizer(found)
        self._vetter_lock, self._grammar_vetter = threading.Lock(), cast("GrammarVetter | None", None)
        config = replace(config, model_path=str(found))
        self._engine = AsyncEngine(config, tp_size, self.tokenizer, own_process=self._own_process)

    # ---- parts ---------------------------------------------------------------------------------------------------

    @property
    def engine(self) -> Engine:
        """Rank 0's engine, for use by hand between calls: the calling thread works on its stream from now on."""
        engine = self._engine.engine
        if engine.model is not None:
            engine.platform.activate()
        return engine

    @property
    def scheduler(self) -> Scheduler:
        """Rank 0's scheduler."""
        return self._engine.scheduler

    @property
    def plan(self) -> Plan:
        """The resolved choice of backends."""
        return self._engine.facts.plan

    @property
    def engine_config(self) -> EngineConfig:
        """The settings of rank 0's engine."""
        return self._engine.facts.config

    @property
    def limits(self) -> Limits:
        """What requests may demand."""
        return self._engine.facts.limits

    @property
    def stats(self) -> SchedulerStats:
        """What runs and waits now, and counters."""
        return self._engine.stats

    @property
    def max_seq_len(self) -> int:
        """Longest prompt and answer together, in tokens."""
        return self.limits.max_total_len

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        return self.limits.vocab_size

    @property
    def shadow_report(self) -> ShadowReport | None:
        """The comparison with a second backend (setting ``shadow``) so far; None without one."""
        report: ShadowReport | None = getattr(self._engine.engine.observer, "shadow_report", None)
        return report

    def shutdown(self) -> None:
        """End all ranks and free all memory; calls that wait get a :class:`UsageError`. Works from any thread;
        calling it twice is harmless. Garbage collection and the end of the program do the same.
        """
        self._engine.close()
        with self._vetter_lock:
            if self._grammar_vetter is not None:
                self._grammar_vetter.close()

    # ---- prompts -------------------------------------------------------------------------------------------------

    def _prepare(
        self, prompts: Prompts, params: SamplingParams | Sequence[SamplingParams] | None, priority: int
    ) -> list[PreparedPrompt]:
        return prepare_prompts(prompts, params, self.tokenizer, self.limits, priority)

    def _check_grammars(self, prepared: Sequence[PreparedPrompt]) -> list[PreparedPrompt]:
        """Raise :class:`AdmissionError` for a grammar that does not compile. It may block for seconds, once for each.

        Without grammars it does nothing.
        """
        for prompt in prepared:
            if isinstance(prompt.params.grammar, Grammar):
                self._vetter().check(prompt.params.grammar)
        return list(prepared)

    def _vetter(self) -> GrammarVetter:
        with self._vetter_lock:
            if self._grammar_vetter is None:
                config = self.engine_config
                ends = self.tokenizer.eos_token_ids if self.tokenizer else ()
                facts = grammar_facts(config, self.plan, ends)
                self._grammar_vetter = GrammarVetter(facts, config.grammar_timeout_s, config.grammar_memory_gb)
                weakref.finalize(self, self._grammar_vetter.close)
            return self._grammar_vetter

    def _encode_chats(self, conversations: Sequence[Conversation], options: Mapping[str, Any]) -> list[list[int]]:
        """Token ids of each conversation. The error for one of several names its index."""
        if self.tokenizer is None:
            raise AdmissionError(
                "messages cannot be encoded: the model has no tokenizer files",
                field="messages",
                remedy="give token ids to `generate`",
            )
        prompts = []
        for index, messages in enumerate(conversations):
            try:
                prompts.append(self.tokenizer.apply_chat_template(messages, **options))
            except AdmissionError as error:
                place = f"conversation {index}: " if len(conversations) > 1 else ""
                hint = argument_hint(error.field, error.value) if error.field in options else ""
                raise AdmissionError(
                    f"{place}{error.message}", field=error.field, value=error.value, remedy=hint or error.remedy
                ) from error
        return prompts


class LLM(BaseLLM):
    __doc__ = f"""{BaseLLM.__doc__}
    Use it as a context manager, or call :meth:`shutdown`. :class:`AsyncLLM` is the same for coroutines; this class
    works inside a coroutine too, but blocks it.
    """

    def generate(
        self,
        prompts: Prompts,
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int = 0,
        progress: bool = True,
        **unknown: Never,
    ) -> list[Completion]:
        """Answer all ``prompts`` together; the answers are in their order.

        ``params``: for all prompts, or one per prompt. ``max_tokens`` is capped at what context and KV pool leave.
        ``priority``: requests with a higher one are admitted first (setting ``queue="priority"``). Ctrl-C ends the
        requests of this call and leaves the LLM usable.

        Raises :class:`AdmissionError`, before any work, if one of the prompts cannot be served; it names its index.
        An answer on which the model failed has an ``error``.
        """
        if unknown:
            refuse_unknown_arguments("generate", ("prompts", "params", "priority", "progress"), unknown)
        return self._answer(self._check_grammars(self._prepare(prompts, params, priority)), progress)

    def chat(
        self,
        messages: Conversations,
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int = 0,
        progress: bool = True,
        **options: Any,
    ) -> list[Completion]:
        """Answer one conversation, or each of a list of them, like :meth:`generate`.

        ``messages``: ``[{"role": "user", "content": "..."}]``. ``options``: those of the model's chat template, such
        as ``tools`` or ``enable_thinking=False``.
        """
        prompts = self._encode_chats(_list_conversations(messages), options)
        return self._answer(self._check_grammars(self._prepare(prompts, params, priority)), progress)

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, priority: int = 0, **unknown: Never
    ) -> Stream:
        """Stream the answer to one prompt. Closing or dropping the iterator aborts the request.

        Raises like :meth:`generate`, at once. The iterator raises :class:`UsageError` if the LLM was shut down
        meanwhile, and in a process forked from the LLM's.
        """
        if unknown:
            refuse_unknown_arguments("stream", ("prompt", "params", "priority"), unknown)
        return Stream(self._engine, self._check_grammars(self._prepare([prompt], params, priority)))

    def stream_chat(
        self, messages: Conversation, params: SamplingParams | None = None, *, priority: int = 0, **options: Any
    ) -> Stream:
        """Stream the answer to one conversation like :meth:`stream`; ``options`` as for :meth:`chat`."""
        prompts = self._encode_chats([messages], options)
        return Stream(self._engine, self._check_grammars(self._prepare(prompts, params, priority)))

    def clear_cache(self) -> None:
        """Drop every cached prefix that no running request uses, on all ranks."""
        call = ThreadCall()
        self._engine.clear_cache(call)
        call.wait()
        call.raise_failure()

    def _answer(self, prepared: Sequence[PreparedPrompt], progress: bool) -> list[Completion]:
        call, total = ThreadCall(), sum(prompt.params.n for prompt in prepared)
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


class AsyncLLM(BaseLLM):
    __doc__ = f"""{BaseLLM.__doc__}
    Use it as an asynchronous context manager, or call :meth:`shutdown`. The constructor blocks while it loads; to keep
    the event loop running, use ``llm = await asyncio.to_thread(AsyncLLM, path)``. One AsyncLLM serves any number of
    event loops, each of which is woken once per step.
    """

    async def generate(
        self,
        prompts: Prompts,
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int = 0,
        **unknown: Never,
    ) -> list[Completion]:
        """Answer all ``prompts`` together, like :meth:`LLM.generate`. Cancelling the call aborts its requests."""
        if unknown:
            refuse_unknown_arguments("generate", ("prompts", "params", "priority"), unknown)
        return await self._answer(await self._checked(self._prepare(prompts, params, priority)))

    async def chat(
        self,
        messages: Conversations,
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int = 0,
        **options: Any,
    ) -> list[Completion]:
        """Answer one conversation, or each of a list of them, like :meth:`LLM.chat`."""
        prompts = self._encode_chats(_list_conversations(messages), options)
        return await self._answer(await self._checked(self._prepare(prompts, params, priority)))

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, priority: int = 0, **unknown: Never
    ) -> AsyncStream:
        """Stream the answer to one prompt: ``async for chunk in llm.stream(prompt)``. Closing or dropping the iterator,
        or cancelling its reader, aborts the request. Raises like :meth:`LLM.stream`; a grammar that does not compile
        raises at the first chunk.
        """
        if unknown:
            refuse_unknown_arguments("stream", ("prompt", "params", "priority"), unknown)
        return self._open_unchecked(self._prepare([prompt], params, priority))

    def stream_chat(
        self, messages: Conversation, params: SamplingParams | None = None, *, priority: int = 0, **options: Any
    ) -> AsyncStream:
        """Stream the answer to one conversation like :meth:`stream`; ``options`` as for :meth:`chat`."""
        return self._open_unchecked(self._prepare(self._encode_chats([messages], options), params, priority))

    # ---- two steps, for a server -------------------------------------------------------------------------------------

    def prepare(
        self,
        prompts: Prompts,
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int = 0,
    ) -> list[PreparedPrompt]:
        """Token ids and checked parameters of each prompt, for :meth:`open`. Works on any thread, which a grammar
        may block for seconds. Raises like :meth:`generate`.
        """
        return self._check_grammars(self._prepare(prompts, params, priority))

    def prepare_chat(
        self, messages: Conversation, params: SamplingParams | None = None, *, priority: int = 0, **options: Any
    ) -> list[PreparedPrompt]:
        """The prompt of one conversation, like :meth:`prepare`; ``options`` as for :meth:`chat`."""
        return self._check_grammars(self._prepare(self._encode_chats([messages], options), params, priority))

    def constrain(self, prompts: Sequence[PreparedPrompt], grammar: Grammar) -> list[PreparedPrompt]:
        """The same prompts, whose answers follow a grammar. It may block for seconds, and works on any thread. Raises
        :class:`AdmissionError` for a grammar that does not compile.
        """
        own = [prompt._replace(params=replace(prompt.params, grammar=grammar)) for prompt in prompts]
        return self._check_grammars(own)

    def open(self, prompt: PreparedPrompt) -> AsyncStream:
        """Stream the answer to a prepared prompt, on the running event loop."""
        return AsyncStream(self._engine, [prompt])

    async def ping(self) -> None:
        """Return once the engine has finished its current step. Raises the engine's failure, if it has failed."""
        call = LoopCall()
        self._engine.ping(call)
        await call.wait()
        call.raise_failure()

    def hanging(self, after_s: float) -> str | None:
        """None if the engine has answered or ended a step within ``after_s`` seconds. Otherwise a line that names the
        step, with its stack below.
        """
        return self._engine.hanging(after_s)

    async def clear_cache(self) -> None:
        """Drop every cached prefix that no running request uses, on all ranks."""
        call = LoopCall()
        self._engine.clear_cache(call)
        await call.wait()
        call.raise_failure()

    async def _checked(self, prepared: list[PreparedPrompt]) -> list[PreparedPrompt]:
        """Grammars are tried on another thread."""
        if _have_grammars(prepared):
            await asyncio.to_thread(self._check_grammars, prepared)
        return prepared

    def _open_unchecked(self, prepared: list[PreparedPrompt]) -> AsyncStream:
        if _have_grammars(prepared):
            return AsyncStream(self._engine, prepared, lambda: self._checked(prepared))
        return AsyncStream(self._engine, prepared)

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


def _have_grammars(prepared: Sequence[PreparedPrompt]) -> bool:
    return any(prompt.params.grammar is not None for prompt in prepared)


class ProcessLLM(AsyncLLM):
    """An :class:`AsyncLLM` for a server: its engine runs in a process of its own, and does not share an interpreter
    with the server's connections. It has no ``engine`` and no ``scheduler``.
    """

    _own_process = True

    def kill(self) -> None:
        """End the engine's process at once, and its ranks. Harmless where it has ended."""
        self._engine.kill()


def _show_until_woken(call: ThreadCall, bar: Any, total: int) -> None:
    woken = not total
    while not woken:
        with suppress(Empty):
            call.wait(PROGRESS_S)
            woken = True
        bar.update(total - call.left - bar.n)


def _list_conversations(messages: Conversations) -> list[Conversation]:
    """A list of conversations. What is not a list of messages is left to the tokenizer to refuse."""
    if not isinstance(cast("object", messages), Iterable) or isinstance(messages, str | Mapping):
        return [cast("Conversation", messages)]
    listed = list(messages)
    several = all(isinstance(one, Iterable) and not _is_message(one) for one in cast("list[object]", listed))
    return cast("list[Conversation]", listed if several else [listed])


def _is_message(value: object) -> bool:
    """Some messages of client libraries are iterable objects."""
    return isinstance(value, str | Mapping) or hasattr(value, "model_dump")
