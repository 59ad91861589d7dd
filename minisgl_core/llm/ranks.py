"""The tensor-parallel ranks above 0, as rank 0 starts, feeds and ends them."""

from __future__ import annotations

import os
import pickle
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar

import torch

from minisgl_core.builtin.comm import report_loss
from minisgl_core.distributed import DistributedInfo
from minisgl_core.engine import EngineConfig
from minisgl_core.errors import EngineError, MinisglError
from minisgl_core.scheduler import Message

from .child import EXIT_REPORT_S, GRACE_S, Child, end_child, exit_code, start_child
from .process_messages import Failed, Imported, Ready, StartRank, read_switches
from .torchrun import accept_ranks, read_placement

__all__ = ["Ranks", "free_port", "threads_per_rank"]

T = TypeVar("T")
_WATCH_S = 0.2
NO_MESSAGES = pickle.dumps(())


def free_port() -> int:
    """A TCP port of this host that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def threads_per_rank(size: int) -> int:
    """CPU threads of each rank: an equal part of the cores, or of torch's threads, if these are fewer."""
    return max(1, min(len(os.sched_getaffinity(0)), torch.get_num_threads()) // size)


@dataclass(slots=True)
class _Peer:
    rank: int
    connection: Connection
    child: Child | None
    """None: torchrun has started it, and ends it."""

    def has_ended(self) -> bool:
        """Whether it can no longer connect to the others."""
        return self.connection.poll() if self.child is None else self.child.process.poll() is not None


class Ranks:
    """Ranks 1 to size-1: child processes, started at once, or those that torchrun has started. A single rank has none.

    Child processes die with the thread that starts them, which therefore must live until :meth:`close`.
    """

    def __init__(self, config: EngineConfig, eos_token_ids: frozenset[int]) -> None:
        self._peers: list[_Peer] = []
        size = config.tp_info.size
        try:
            if config.launcher == "torchrun" and size > 1:
                found = accept_ranks(read_placement(size), config.distributed_timeout_s)
                self._peers += [_Peer(rank, connection, None) for rank, connection in enumerate(found, 1)]
            else:
                for rank in range(1, size):
                    self._peers.append(_start(rank, size))
            switches = read_switches()
            for peer in self._peers:
                own = replace(config, tp_info=DistributedInfo(peer.rank, size), progress=False)
                self._send(peer, pickle.dumps(StartRank(own, eos_token_ids, switches, threads_per_rank(size))))
        except BaseException:
            self.close(grace_s=0)
            raise

    def wait_imported(self) -> None:
        """Wait until every rank is about to connect; raise :class:`EngineError` with the report of one that cannot."""
        self._wait_for(Imported)

    def wait_ready(self) -> None:
        """Wait until every rank's engine is ready; raise :class:`EngineError` with the report of one that failed."""
        self._wait_for(Ready)

    def send(self, messages: Sequence[Message]) -> None:
        """Send the messages of the step that rank 0 is about to run."""
        if self._peers:
            payload = pickle.dumps(tuple(messages)) if messages else NO_MESSAGES
            for peer in self._peers:
                self._send(peer, payload)

    def while_joining(self, call: Callable[[], T], init_method: str) -> T:
        """Like :meth:`guard`, for a ``call`` that waits for all ranks at ``init_method``; aborts it if one dies."""
        done = threading.Event()

        def watch() -> None:
            while self._peers and not done.wait(_WATCH_S):
                for peer in self._peers:
                    if peer.has_ended():
                        report_loss(init_method, peer.rank)
                        return

        watcher = threading.Thread(target=watch, name="minisgl-watch-ranks", daemon=True)
        watcher.start()
        try:
            return self.guard(call)
        finally:
            done.set()
            watcher.join()

    def guard(self, call: Callable[[], T]) -> T:
        """Return ``call()``. If another rank's failure breaks it, raise :class:`EngineError` with its report."""
        try:
            return call()
        except Exception as error:
            ours = isinstance(error, MinisglError) and not isinstance(error, EngineError)
            if not ours and (failure := self._exit_report()) is not None:
                raise failure from error
            raise

    def check(self) -> None:
        """Raise :class:`EngineError` if a rank has failed or died. Costs a system call per rank."""
        for peer in self._peers:
            if peer.connection.poll():
                raise _failure(peer, _receive(peer.connection))

    def close(self, grace_s: float = GRACE_S) -> None:
        """End all ranks; kill those that still run after ``grace_s`` seconds. Calling it twice is harmless."""
        peers, self._peers = self._peers, []
        for peer in peers:
            peer.connection.close()
        deadline = time.monotonic() + grace_s
        for peer in peers:
            if peer.child is not None:
                end_child(peer.child.process, peer.child.lifeline, deadline)

    def _send(self, peer: _Peer, payload: bytes) -> None:
        try:
            peer.connection.send_bytes(payload)
        except OSError as error:
            raise _failure(peer, _receive(peer.connection)) from error

    def _wait_for(self, kind: type[Imported] | type[Ready]) -> None:
        pending: dict[Any, _Peer] = {peer.connection: peer for peer in self._peers}
        while pending:
            for connection in wait(list(pending)):
                peer = pending.pop(connection)
                if not isinstance(report := _receive(peer.connection), kind):
                    raise _failure(peer, report)

    def _exit_report(self) -> EngineError | None:
        """The failure that some rank reports within :data:`EXIT_REPORT_S`."""
        deadline = time.monotonic() + EXIT_REPORT_S
        listening: dict[Any, _Peer] = {peer.connection: peer for peer in self._peers}
        while listening and (readable := wait(list(listening), max(0.0, deadline - time.monotonic()))):
            for connection in readable:
                peer = listening[connection]
                report = _receive(peer.connection)
                if not isinstance(report, Imported | Ready):
                    return _failure(peer, report)
        return None


def _start(rank: int, size: int) -> _Peer:
    child = start_child("rank", OMP_NUM_THREADS=str(threads_per_rank(size)))
    return _Peer(rank, Connection(child.fd), child)


def _receive(connection: Connection) -> Any:
    """The rank's next message; None if there will be none."""
    try:
        return connection.recv()
    except (EOFError, OSError):
        return None


def _failure(peer: _Peer, report: object) -> EngineError:
    """The error to raise after a rank's exit report, or after its death without one."""
    if isinstance(report, Failed):
        error = EngineError(f"rank {peer.rank} failed: {report.text}", field="rank", value=peer.rank)
        error.add_note(f"Traceback of rank {peer.rank}:\n{report.details}")
        return error
    code = "" if peer.child is None else f", exit code {exit_code(peer.child.process)}"
    return EngineError(f"rank {peer.rank} died without an exit report{code}", field="rank", value=peer.rank)
