"""All ranks of one engine behind one interface: post messages, make steps."""

from __future__ import annotations

import traceback
from contextlib import ExitStack
from dataclasses import replace

import torch

from minisgl_core.distributed import DistributedInfo
from minisgl_core.engine import Engine, EngineConfig
from minisgl_core.engine.plan_resolution import make_plan
from minisgl_core.errors import EngineError, MinisglError
from minisgl_core.grammar import Grammars
from minisgl_core.modelconfig import read_model_config
from minisgl_core.registry import Choice, Plan
from minisgl_core.registry.records import CORE
from minisgl_core.scheduler import Message, NewReq, Scheduler, TokenOut, TokenOuts

from .child import GRACE_S
from .grammars import GrammarQueue, grammar_facts
from .process_messages import EngineFacts
from .ranks import Ranks, free_port, threads_per_rank
from .torchrun import read_placement

__all__ = ["Runner"]

_HELD_S = 0.01
"""How long a step without other work waits for a grammar, before it looks for new messages."""


class Runner:
    """Rank 0's engine and scheduler in this process, the other ranks in processes of their own.

    ``eos_token_ids``: the tokenizer's, which end an answer like those of the model's config.

    Not safe to use from two threads at once. After an error in a step the engine's state is undefined, so every later
    step raises as well.
    """

    def __init__(self, config: EngineConfig, tp_size: int = 1, eos_token_ids: frozenset[int] = frozenset()) -> None:
        self._messages: list[Message] = []
        self._failure: BaseException | None = None
        self._threads = torch.get_num_threads() if tp_size > 1 else 0
        """Number to restore at the end; 0 = unchanged."""
        if tp_size > 1:
            config = _with_ranks(config, tp_size)
        self._ranks = Ranks(config, eos_token_ids)
        try:
            self._ranks.wait_imported()
            if tp_size > 1:
                torch.set_num_threads(threads_per_rank(tp_size))
            self.engine = self._ranks.while_joining(lambda: Engine(config), config.init_method)
            self.grammars = Grammars(grammar_facts(config, self.engine.plan, eos_token_ids))
            self._held = GrammarQueue(self.grammars)
            self.scheduler = Scheduler(self.engine, self.engine.ctx.kv.match_len, eos_token_ids, self.grammars)
            self._ranks.wait_ready()
        except BaseException:
            self._ranks.close(grace_s=0)
            self._restore_threads()
            if hasattr(self, "engine"):
                self.engine.shutdown()
            raise

    @property
    def facts(self) -> EngineFacts:
        """What does not change while it runs."""
        return EngineFacts(self.engine.plan, self.engine.config, self.scheduler.limits)

    @property
    def usable(self) -> bool:
        """No step has failed."""
        return self._failure is None

    @property
    def has_work(self) -> bool:
        """False when a step would do nothing."""
        return bool(self._messages or self._held.waiting) or self.scheduler.has_work

    def post(self, message: Message) -> None:
        """Apply ``message`` on all ranks before the next step."""
        constrained = isinstance(message, NewReq) and message.params.grammar is not None
        if not ((constrained or self._held.waiting) and self._held.holds(message)):
            self._messages.append(message)

    def step(self) -> TokenOuts:
        """Make one step on every rank. Raises :class:`EngineError` with the exit report of a rank that failed, or with
        the name of a plugin's backend that did.
        """
        if self._failure is not None:
            raise EngineError(
                f"the engine has stopped after an error: {self._failure}", remedy="shut it down and make a new one"
            ) from self._failure
        messages, self._messages = self._messages, []
        failed: list[TokenOut] = []
        if self._held.waiting:
            if not (messages or self.scheduler.has_work):
                self._held.wait(_HELD_S)
            ready, failed = self._held.ready()
            messages += ready
        try:
            self._ranks.send(messages)
            self.scheduler.apply(messages)
            outs = self._ranks.guard(self.scheduler.step)
            self._messages += self.scheduler.take_notices()
            return TokenOuts([*failed, *outs.parts]) if failed else outs
        except BaseException as error:
            self._failure = _attribute(error, self.engine.plan)
            if self._failure is error:
                raise
            raise self._failure from error

    def check(self) -> None:
        """Look for ranks that have failed, even while nothing runs; after a failure every step raises it."""
        try:
            self._ranks.check()
        except EngineError as error:
            self._failure = self._failure or error

    def close(self) -> None:
        """End all ranks and free the engine's memory. Calling it twice is harmless."""
        with ExitStack() as closing:  # each of these runs, even if one before it raises
            closing.callback(self._restore_threads)
            closing.callback(self.engine.shutdown)
            closing.callback(self.scheduler.close)
            closing.callback(self.grammars.close)
            # After a failure the others may be waiting for this rank in the middle of a step.
            self._ranks.close(GRACE_S if self.usable else 0)

    def _restore_threads(self) -> None:
        if self._threads:
            torch.set_num_threads(self._threads)


def _with_ranks(config: EngineConfig, tp_size: int) -> EngineConfig:
    """Rank 0's config of an engine of several ranks, with the plan that all of them load."""
    port = free_port() if config.distributed_port is None else config.distributed_port
    config = replace(config, tp_info=DistributedInfo(0, tp_size), distributed_port=port)
    if config.launcher == "torchrun":
        own = read_placement(tp_size)
        tp = DistributedInfo(0, tp_size, own.local_rank)
        config = replace(config, tp_info=tp, distributed_host=own.host)
    return replace(config, plan=make_plan(config, read_model_config(config.model_path)).to_json())


def _attribute(error: BaseException, plan: Plan) -> BaseException:
    """Attribute an error of a step: if a plugin's backend raised it, return an :class:`EngineError` that names the
    backend, otherwise the error itself.
    """
    if isinstance(error, MinisglError) or not isinstance(error, Exception):
        return error
    choice = _failed_backend(error, plan)
    if choice is None:
        return error
    return EngineError(
        f"{choice.role} backend {choice.label} {choice.version} failed in a step: {type(error).__name__}: {error}",
        field=f"backends.{choice.role}",
        value=choice.name,
        remedy=f"choose another with --backend {choice.role}=NAME, and report it to its author",
    )


def _failed_backend(error: BaseException, plan: Plan) -> Choice | None:
    """The backend in whose package the innermost frame outside the core and torch is."""
    choices = [bucket.choice for bucket in plan.buckets if bucket.choice.distribution != CORE]
    modules = [str(frame.f_globals.get("__name__", "")) for frame, _ in traceback.walk_tb(error.__traceback__)]
    for module in reversed(modules):
        same_module = [choice for choice in choices if choice.factory.partition(":")[0] == module]
        same_package = [choice for choice in choices if _package(choice.factory) == _package(module)]
        for choice in (*same_module, *same_package):
            return choice
    return None


def _package(path: str) -> str:
    return path.partition(":")[0].partition(".")[0]
