"""The class for scripts and notebooks: a model in, answers out."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from tqdm import tqdm

from minisgl_core.core import SamplingParams
from minisgl_core.demo_model import resolve_model_path
from minisgl_core.engine import EngineConfig
from minisgl_core.engine.planning import DTYPES
from minisgl_core.errors import ConfigError, UsageError, nearest
from minisgl_core.scheduler import Abort, ClearCache, Finish, NewReq, TokenOut, TokenRun
from minisgl_core.tokenizer import load_tokenizer

from .interrupts import deferred_interrupts
from .output import Chunk, Output
from .prompts import PreparedPrompt, Prompt, prepare_prompts
from .runner import Runner

if TYPE_CHECKING:
    from minisgl_core.capsule.shadow import ShadowReport
    from minisgl_core.engine import Engine
    from minisgl_core.registry import Plan
    from minisgl_core.scheduler import Scheduler

__all__ = ["LLM"]

_OWN_FIELDS = frozenset({"model_path", "tp_info", "dtype"})
"""Of EngineConfig, those that LLM sets by itself."""
_NOTHING = Chunk("", [], None, None, None)


class LLM:
    """A model, ready to answer. Use it as a context manager, or call :meth:`shutdown`; the garbage collector and the
    end of the program do it too.

    ``path``: a folder, a .gguf file, ``"demo"``, or a name on a model hub such as ``"Qwen/Qwen3-0.6B"``, which is then
    downloaded. ``dtype``: such as ``torch.float32`` or ``"bfloat16"``; None = the checkpoint's.
    ``tp_size``: tensor-parallel ranks; the others are started as processes of their own. ``backends``: role to backend
    name, ordered list of names, or ``{"prefill": ..., "decode": ...}`` for attention. ``settings``: any other field of
    :class:`~minisgl_core.engine.EngineConfig`, such as ``cuda_graph_max_bs``, ``max_running_req``,
    ``num_page_override``, ``max_seq_len_override`` or ``page_size``.

    A folder without tokenizer files serves prompts of token ids; the text of its answers is empty. Not safe to use from
    several threads at once.
    """

    def __init__(
        self,
        path: str | Path,
        dtype: torch.dtype | str | None = None,
        tp_size: int = 1,
        *,
        backends: Mapping[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        _refuse_unknown(settings)
        if backends is not None and not isinstance(cast("object", backends), Mapping):
            raise ConfigError(
                f"`backends` is {backends!r}", field="backends", value=backends, remedy='give {"attention": "NAME"}'
            )
        if not isinstance(cast("object", path), str | Path):
            raise ConfigError(f"`path` is {path!r}", field="path", value=path, remedy="give a model folder or file")
        if not isinstance(cast("object", tp_size), int) or isinstance(tp_size, bool) or tp_size < 1:
            raise ConfigError(
                f"`tp_size` is {tp_size!r}", field="tp_size", value=tp_size, remedy="give an integer of at least 1"
            )
        config = EngineConfig(model_path=str(path), dtype=_dtype(dtype), backends=dict(backends or {}), **settings)
        found = resolve_model_path(path, progress=config.progress)
        config = replace(config, model_path=str(found))
        self.tokenizer = load_tokenizer(found)
        self._runner = Runner(config, tp_size, frozenset(self.tokenizer.eos_token_ids if self.tokenizer else ()))
        self._close = weakref.finalize(self, self._runner.close)
        self._uids = count()
        self._live: dict[int, Output] = {}

    # ---- what is inside ------------------------------------------------------------------------------------------

    @property
    def engine(self) -> Engine:
        """Rank 0's engine."""
        return self._runner.engine

    @property
    def scheduler(self) -> Scheduler:
        """Rank 0's scheduler."""
        return self._runner.scheduler

    @property
    def plan(self) -> Plan:
        """Which backend does what."""
        return self.engine.plan

    @property
    def shadow_report(self) -> ShadowReport | None:
        """What a second backend (setting ``shadow``) has shown so far; None without one."""
        watching = self.engine.watching
        return None if watching is None or watching.shadow is None else watching.shadow.report

    def clear_cache(self) -> None:
        """Forget every cached prefix that no running request uses, on all ranks."""
        self._refuse_after_shutdown()
        self._runner.post(ClearCache())
        self._step()

    # ---- answers -------------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = True,
    ) -> list[dict[str, Any]]:
        """Answer all ``prompts`` together; the answers are in their order.

        ``params``: for all prompts, or one per prompt. An answer has ``text``, ``token_ids`` (a stop token included),
        ``finish_reason`` ("stop", "length" or "error"), ``prompt_tokens``; ``logprobs`` if asked for; ``error`` if
        the model failed on this prompt. ``max_tokens`` is capped at what context and KV pool leave.

        Raises :class:`AdmissionError`, before any work, if one of the prompts cannot be served; it names its index.
        """
        outputs = self._submit(self._prepare(prompts, params))
        left = {output.uid for output in outputs}
        with (
            tqdm(total=len(outputs), desc="requests", disable=not progress) as bar,
            deferred_interrupts() as interrupted,
        ):
            try:
                while left:
                    left.difference_update(self._step())
                    bar.update(len(outputs) - len(left) - bar.n)
                    interrupted()
            finally:
                self._abandon(outputs)
        return [output.answer() for output in outputs]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[Chunk]:
        """Answer one prompt piece by piece; closing the iterator aborts the request.

        Several streams may be read in turns: each step serves them all. Raises like :meth:`generate`, at once; and
        :class:`UsageError` from the iterator if the LLM was shut down meanwhile.
        """
        (output,) = self._submit(self._prepare([prompt], params))
        chunks = self._stream(output)
        next(chunks)  # up to its `try`: closing a generator that never began would not abort the request
        return chunks

    def _stream(self, output: Output) -> Iterator[Chunk]:
        """An empty chunk at once, which nobody is to see, then those of ``output``."""
        try:
            yield _NOTHING
            while True:
                self._refuse_after_shutdown()
                chunk = output.take()
                if chunk is None:
                    with deferred_interrupts():
                        self._step()
                    continue
                yield chunk
                if chunk.finish_reason is not None:
                    return
        finally:
            self._abandon([output])

    # ---- requests ------------------------------------------------------------------------------------------------

    def _prepare(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[PreparedPrompt]:
        return prepare_prompts(prompts, params, self.tokenizer, self.scheduler.limits)

    def _submit(self, prepared: Iterable[PreparedPrompt]) -> list[Output]:
        self._refuse_after_shutdown()
        outputs = []
        for input_ids, params in prepared:
            output = Output(next(self._uids), len(input_ids), params, self.tokenizer)
            self._runner.post(NewReq(output.uid, input_ids, params))
            self._live[output.uid] = output
            outputs.append(output)
        return outputs

    def _step(self) -> list[int]:
        """One step for all live requests; returns those that ended."""
        ended = []
        for part in self._runner.step().parts:
            if isinstance(part, TokenRun):
                for uid, token in zip(part.uids, part.tokens, strict=True):
                    output = self._live.get(uid)
                    if output is not None and output.add_token(token):
                        self._runner.post(Finish(uid))
            elif isinstance(part, TokenOut) and self._add(part):
                ended.append(part.uid)
        return ended

    def _add(self, out: TokenOut) -> bool:
        """Has this request ended?"""
        output = self._live.get(out.uid)
        if output is None:
            return False
        if output.add(out):
            self._runner.post(Finish(out.uid))
        if out.finish_reason is not None:
            del self._live[out.uid]
        return out.finish_reason is not None

    def _abandon(self, outputs: Iterable[Output]) -> None:
        """Nobody reads ``outputs`` any more: abort those that still run; an engine with no other work comes to rest."""
        if not (self._runner.usable and self._close.alive):
            return
        for output in outputs:
            if self._live.pop(output.uid, None) is not None:
                self._runner.post(Abort(output.uid))
        if not self._live:
            while self._runner.has_work:
                self._runner.step()

    # ---- the end -------------------------------------------------------------------------------------------------

    def _refuse_after_shutdown(self) -> None:
        if not self._close.alive:
            raise UsageError("this LLM has been shut down", remedy="make a new one")

    def shutdown(self) -> None:
        """End all ranks and give all memory back. Calling it twice is harmless."""
        self._close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()


def _refuse_unknown(settings: Mapping[str, Any]) -> None:
    known = {field.name for field in fields(EngineConfig)} - _OWN_FIELDS
    for name in settings:
        if name not in known:
            remedy = nearest(name, {*known, "dtype", "tp_size"}) or f"known are {', '.join(sorted(known))}"
            raise ConfigError(f"LLM has no setting `{name}`", field=name, value=settings[name], remedy=remedy)


def _dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    if not isinstance(dtype, str):
        return dtype
    if dtype == "auto":
        return None
    if dtype not in DTYPES:
        raise ConfigError(
            f"`dtype` is {dtype!r}", field="dtype", value=dtype, remedy=f"use auto, {', '.join(sorted(DTYPES))}"
        )
    return DTYPES[dtype]
