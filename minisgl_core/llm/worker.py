"""``python -m minisgl_core.llm.worker KIND CONNECTION_FD LIFELINE_FD PARENT_PID``: a process of an engine.

KIND "engine": rank 0, for a server's process. "rank": a tensor-parallel rank above 0, which runs the same scheduler as
rank 0 on the same messages. It ends when its connection closes, and at once when its parent is gone.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, NoReturn

from .channel import Channel
from .child import EXIT_REPORT_S, die_with_parent

if TYPE_CHECKING:
    from .torchrun import Placement

__all__ = ["main", "run_rank", "run_to_the_end"]


def run_rank(connection: Connection, placement: Placement | None = None) -> None:
    """Build the engine, then follow rank 0 step by step until it closes the connection.

    ``placement``: of a rank that torchrun has started; rank 0 does not know which device of which machine it has.
    """
    import torch

    from minisgl_core.engine import Engine
    from minisgl_core.modelconfig import read_model_config
    from minisgl_core.plugin_api import HOST_ROLES
    from minisgl_core.registry import Plan, load_class
    from minisgl_core.scheduler import RemoteGrammars, Scheduler

    from .process_messages import Imported, Ready, StartRank, apply_switches

    logging.getLogger("minisgl_core.inputs").setLevel(logging.ERROR)  # rank 0 reads the same files and logs it
    start: StartRank = connection.recv()
    apply_switches(start.switches)
    config, num_threads = start.config, start.num_threads
    if placement is not None:
        config = replace(config, tp_info=config.tp_info._replace(local_rank=placement.local_rank))
        num_threads = max(1, len(os.sched_getaffinity(0)) // placement.local_size)
    torch.set_num_threads(num_threads)
    read_model_config(config.model_path)
    assert config.plan is not None
    for bucket in Plan.from_json(config.plan).buckets:
        if bucket.entry.role not in HOST_ROLES:
            load_class(bucket.choice)
    connection.send(Imported())
    engine = Engine(config)
    try:
        scheduler = Scheduler(engine, engine.ctx.kv.match_len, start.eos_token_ids, RemoteGrammars())
        connection.send(Ready())
        while True:
            try:
                messages = connection.recv()
            except EOFError:
                return
            scheduler.apply(messages)
            scheduler.step()
    finally:
        engine.shutdown()


def run_to_the_end(connection: Any, run: Callable[[Any], None]) -> NoReturn:
    """Run, report any failure to the process at the other end, and exit at once.

    The interpreter's normal exit takes seconds with torch loaded, and after a failure the collectives of the other
    ranks must break off.
    """
    # Sent to all processes of a terminal or a service: the process at the other end decides.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    faulthandler.enable()
    code = 0
    try:
        run(connection)
    except BaseException as error:
        from .process_messages import Failed

        code = 1
        with suppress(OSError):  # the other end may have died: then the report has no reader
            connection.send(Failed.of(error))
    if isinstance(connection, Channel):
        connection.close(EXIT_REPORT_S)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def main() -> None:
    """Run as a child of the process that has started this one."""
    kind, (connection_fd, lifeline, parent) = sys.argv[1], map(int, sys.argv[2:])
    die_with_parent(lifeline, parent)
    if kind == "engine":
        from .engine_process import run_engine

        run_to_the_end(Channel(connection_fd), run_engine)
    run_to_the_end(Connection(connection_fd), run_rank)


if __name__ == "__main__":
    main()
