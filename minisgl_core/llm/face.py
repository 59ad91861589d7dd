"""What LLM and AsyncLLM share: the model inside, and from arguments to prompts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from minisgl_core.demo_model import resolve_model_path
from minisgl_core.errors import AdmissionError
from minisgl_core.tokenizer import load_tokenizer

from .arguments import argument_hint, engine_config
from .async_engine import AsyncEngine
from .prompts import PreparedPrompt, Prompts, prepare_prompts

if TYPE_CHECKING:
    import torch

    from minisgl_core.capsule.shadow import ShadowReport
    from minisgl_core.core import SamplingParams
    from minisgl_core.engine import Engine
    from minisgl_core.registry import Plan
    from minisgl_core.scheduler import Scheduler
    from minisgl_core.tokenizer import Message

__all__ = ["Conversation", "Conversations", "Face", "list_conversations"]

Conversation = Iterable["Message"]
Conversations = Conversation | Iterable[Conversation]
"""One list of messages, or several."""


class Face:
    """A model, ready to answer; it is loaded by the constructor.

    ``path``: a folder, a .gguf file, ``"demo"``, or a name on a model hub such as ``"Qwen/Qwen3-0.6B"``, which is then
    downloaded. ``dtype``: such as ``torch.float32`` or ``"bfloat16"``; None = the checkpoint's.
    ``tp_size``: tensor-parallel ranks; the others are started as processes of their own. ``backends``: role to backend
    name, ordered list of names, or ``{"prefill": ..., "decode": ...}`` for attention. ``settings``: any other field of
    :class:`~minisgl_core.engine.EngineConfig`, such as ``cuda_graph_max_bs``, ``max_running_req``,
    ``num_page_override``, ``max_seq_len_override`` or ``page_size``.

    A folder without tokenizer files serves prompts of token ids; the text of its answers is empty. May be used from any
    thread and event loop: what runs at the same time is served together.
    """

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
        found = resolve_model_path(path, progress=config.progress)
        self.tokenizer = load_tokenizer(found)
        self._engine = AsyncEngine(replace(config, model_path=str(found)), tp_size, self.tokenizer)

    # ---- what is inside ------------------------------------------------------------------------------------------

    @property
    def engine(self) -> Engine:
        """Rank 0's engine, to be driven by hand between calls: the calling thread works on its stream from now on."""
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
        """Which backend does what."""
        return self._engine.engine.plan

    @property
    def shadow_report(self) -> ShadowReport | None:
        """What a second backend (setting ``shadow``) has shown so far; None without one."""
        report: ShadowReport | None = getattr(self._engine.engine.observer, "shadow_report", None)
        return report

    def shutdown(self) -> None:
        """End all ranks and give all memory back; calls that wait get a :class:`UsageError`. Works from any thread;
        calling it twice is harmless. Garbage collection and the end of the program do it too.
        """
        self._engine.close()

    # ---- from arguments to prompts -------------------------------------------------------------------------------

    def _prepare(
        self, prompts: Prompts, params: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[PreparedPrompt]:
        return prepare_prompts(prompts, params, self.tokenizer, self.scheduler.limits)

    def _chat_prompts(self, conversations: Sequence[Conversation], options: Mapping[str, Any]) -> list[list[int]]:
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


def list_conversations(messages: Conversations) -> list[Conversation]:
    """One list of messages, or several; anything that is no list is left to the tokenizer to refuse."""
    if not isinstance(cast("object", messages), Iterable) or isinstance(messages, str | Mapping):
        return [cast("Conversation", messages)]
    listed = list(messages)
    several = all(isinstance(one, Iterable) and not _is_message(one) for one in cast("list[object]", listed))
    return cast("list[Conversation]", listed if several else [listed])


def _is_message(value: object) -> bool:
    """Messages of client libraries are objects, some of which can be iterated over."""
    return isinstance(value, str | Mapping) or hasattr(value, "model_dump")
