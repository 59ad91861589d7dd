"""Ranks that torchrun has started, each running the same program, on one machine or on several.

Rank 0 carries on with the program; the others follow it. They find each other through torchrun's store, then each keeps
one TCP connection to rank 0, for the messages that local ranks receive through a socket pair.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import time
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any, Final, NamedTuple

from minisgl_core.errors import EngineError, UsageError

__all__ = ["Placement", "accept_ranks", "follow", "read_placement"]

_VARIABLES: Final = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_KEY: Final = "minisgl/rank0"
_TOKEN_BYTES: Final = 32
_RANK_BYTES: Final = 4
_HELLO_S: Final = 10.0
"""How long a connection may take to say who it is."""


class Placement(NamedTuple):
    """Which of torchrun's processes this one is."""

    rank: int
    size: int
    local_rank: int
    """Among the processes of this machine: the number of its device."""
    local_size: int
    host: str
    """Address of rank 0's machine."""


def read_placement(tp_size: int) -> Placement:
    """From the environment. Raises :class:`UsageError` unless torchrun has started ``tp_size`` processes."""
    missing = [name for name in _VARIABLES if name not in os.environ]
    if missing:
        raise UsageError(
            f'`launcher` is "torchrun", but {missing[0]} is not set',
            field="launcher",
            value="torchrun",
            remedy=f"start the program with torchrun --nproc-per-node {tp_size} --no-python minisgl ...",
        )
    rank, size, local_rank, local_size = (int(os.environ[name]) for name in _VARIABLES[:4])
    if size != tp_size:
        raise UsageError(
            f"torchrun has started {size} processes for {tp_size} tensor-parallel ranks",
            field="tp_size",
            value=tp_size,
            remedy=f"set `tp_size` to {size}, or let --nnodes times --nproc-per-node be {tp_size}",
        )
    return Placement(rank, size, local_rank, local_size, os.environ["MASTER_ADDR"])


def follow(tp_size: int, timeout_s: float) -> None:
    """Return on rank 0. On the others connect to it and serve it; this does not return, the process ends with it."""
    own = read_placement(tp_size)
    if own.rank == 0:
        return
    from .worker import run_rank, run_to_the_end

    connection = _connect(own, timeout_s)
    run_to_the_end(connection, lambda connection: run_rank(connection, own))


def accept_ranks(own: Placement, timeout_s: float) -> list[Connection]:
    """On rank 0: the connection of each other rank, in their order. Raises :class:`EngineError` if one is missing after
    ``timeout_s`` seconds.
    """
    token, deadline = secrets.token_bytes(_TOKEN_BYTES), time.monotonic() + timeout_s
    family = socket.AF_INET6 if ":" in own.host else socket.AF_INET
    with socket.create_server(("", 0), family=family, backlog=own.size) as server:
        address = {"port": server.getsockname()[1], "token": token.hex()}
        _store(own, timeout_s).set(_KEY, json.dumps(address))
        found: dict[int, Connection] = {}
        while len(found) < own.size - 1:
            server.settimeout(max(0.01, deadline - time.monotonic()))
            try:
                accepted, _ = server.accept()
            except TimeoutError:
                missing = [str(rank) for rank in range(1, own.size) if rank not in found]
                raise EngineError(
                    f"after {timeout_s:g} s these ranks have not connected: {', '.join(missing)}",
                    field="distributed_timeout_s",
                    value=timeout_s,
                    remedy="check that the same command runs on every machine, and look at the errors there",
                ) from None
            if (rank := _identify(accepted, token)) is not None:
                found[rank] = _as_connection(accepted)
    return [found[rank] for rank in range(1, own.size)]


def _connect(own: Placement, timeout_s: float) -> Connection:
    """To rank 0. Raises :class:`EngineError` if it cannot be reached."""
    try:
        address = json.loads(_store(own, timeout_s).get(_KEY))
        connection = socket.create_connection((own.host, address["port"]), timeout=timeout_s)
        connection.sendall(bytes.fromhex(address["token"]) + own.rank.to_bytes(_RANK_BYTES, "big"))
    except (OSError, RuntimeError) as error:
        raise EngineError(
            f"rank {own.rank} could not reach rank 0 at {own.host}: {error}",
            field="MASTER_ADDR",
            value=own.host,
            remedy="check that rank 0 has started, and that the machines can reach each other's ports",
        ) from error
    return _as_connection(connection)


def _store(own: Placement, timeout_s: float) -> Any:
    """torchrun's key-value store."""
    from torch.distributed.rendezvous import rendezvous

    (store, _, _) = next(rendezvous("env://", own.rank, own.size, timeout=timedelta(seconds=timeout_s)))
    return store


def _identify(accepted: socket.socket, token: bytes) -> int | None:
    """The rank that has connected; None for anything else, whose connection is closed."""
    accepted.settimeout(_HELLO_S)
    try:
        hello = accepted.recv(_TOKEN_BYTES + _RANK_BYTES, socket.MSG_WAITALL)
    except OSError:
        hello = b""
    if secrets.compare_digest(hello[:_TOKEN_BYTES], token) and len(hello) == _TOKEN_BYTES + _RANK_BYTES:
        return int.from_bytes(hello[_TOKEN_BYTES:], "big")
    accepted.close()
    return None


def _as_connection(connected: socket.socket) -> Connection:
    """Small messages leave at once; the death of the other machine is noticed."""
    connected.settimeout(None)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    return Connection(connected.detach())
