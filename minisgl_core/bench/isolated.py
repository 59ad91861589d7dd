"""Runs a list of items in a child process, and survives items that kill it."""

from __future__ import annotations

import math
import multiprocessing
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from typing import Any, Final

from tqdm import tqdm

from minisgl_core.env import ENV

__all__ = ["Finished", "Lost", "Target", "supervised"]

LAST_STEPS_S: Final = 10.0
"""Seconds that a finished process gets to exit by itself."""
Target = Callable[[Connection, Any, tuple[Any, ...], Mapping[str, Any]], None]
"""``target(connection, job, items, switches)`` runs in the child process. For each item, in order, it sends any
messages and then :class:`Finished`. ``switches``: the values of ``ENV`` in the parent, by name.
"""


@dataclass(frozen=True, slots=True)
class Finished:
    """An item has finished. ``suspect``: the process is not reliable any more; the next item gets a new one."""

    suspect: bool = False


@dataclass(frozen=True, slots=True)
class Lost:
    """Why an item did not finish. ``silent``: it was stopped because it sent no message in time."""

    why: str
    silent: bool = False


def supervised(
    target: Target, job: object, items: Sequence[Any], limit_s: float, deadline: float = math.inf
) -> Iterator[tuple[Any, Any]]:
    """Yield (item, message) as they arrive.

    :class:`Lost` is the last message of an item that died, or sent nothing for ``limit_s`` seconds or until
    ``deadline`` (by ``time.monotonic``). The items after it run in another process. ``job`` and items are pickled.
    """
    pending = list(items)
    while pending:
        if time.monotonic() >= deadline:
            yield pending.pop(0), Lost("no time was left")
            continue
        with _process(target, job, tuple(pending)) as (process, connection):
            while pending:
                message = _receive(process, connection, min(limit_s, max(0.0, deadline - time.monotonic())))
                if not isinstance(message, Finished):
                    yield pending[0], message
                if isinstance(message, Finished | Lost):
                    pending.pop(0)
                    if isinstance(message, Lost) or message.suspect:
                        process.kill()
                        break


@contextmanager
def _process(target: Target, job: object, items: tuple[Any, ...]) -> Iterator[tuple[Any, Connection]]:
    context = multiprocessing.get_context("spawn")  # a fork would inherit threads and, on a GPU, a driver in use
    ours, theirs = context.Pipe()
    switches = {switch.name: switch.value for switch in ENV.all()}
    process = context.Process(target=_work, args=(target, theirs, job, items, switches), daemon=True)
    with _interrupts_blocked():
        process.start()
    theirs.close()  # only then does reading fail when the child dies
    try:
        yield process, ours
        process.join(LAST_STEPS_S)  # it has sent everything, or was killed
    finally:
        ours.close()
        process.kill()
        process.join()


def _work(
    target: Target, connection: Connection, job: Any, items: tuple[Any, ...], switches: Mapping[str, Any]
) -> None:
    tqdm.set_lock(threading.RLock())  # it holds a semaphore that Python would report as leaked after a kill
    target(connection, job, items, switches)


@contextmanager
def _interrupts_blocked() -> Iterator[None]:
    """Block Ctrl-C for child processes that start meanwhile: only this process handles it.

    Children inherit the signal mask, so it holds while they import, too. A Ctrl-C in between is delivered afterwards.
    """
    resource_tracker.ensure_running()  # starting it later, with the first process, would unblock the signal
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _receive(process: Any, connection: Connection, limit_s: float) -> Any:
    if not connection.poll(None if math.isinf(limit_s) else limit_s):
        return Lost(f"it sent nothing for {limit_s:.0f} s", silent=True)
    try:
        return connection.recv()
    except EOFError:
        process.join()
        return Lost(f"its process ended with exit code {process.exitcode}")
