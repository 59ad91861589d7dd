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
from multiprocessing.connection import Connection
from typing import Any

from .channel import Channel
from .child import EXIT_REPORT_S, die_with_parent

__all__ = ["main"]


def run_rank(connection: Connection) -> None:
    """Build the engine, then follow rank 0 step by step until it closes the connection."""
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
    torch.set_num_threads(start.num_threads)
    read_model_config(start.config.model_path)
    assert start.config.plan is not None
    for bucket in Plan.from_json(start.config.plan).buckets:
        if bucket.entry.role not in HOST_ROLES:
            load_class(bucket.choice)
    connection.send(Imported())
    engine = Engine(start.config)
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


def main() -> None:
    """Run, report any failure to the parent, and exit at once.

    The interpreter's normal exit takes seconds with torch loaded, and after a failure the collectives of the other
    ranks must break off.
    """
    kind, (connection_fd, lifeline, parent) = sys.argv[1], map(int, sys.argv[2:])
    for number in (
        signal.SIGINT,
        signal.SIGTERM,
    ):  # sent to all processes of a terminal or a service: the front decides
        signal.signal(number, signal.SIG_IGN)
    faulthandler.enable()
    die_with_parent(lifeline, parent)
    connection: Any
    run: Callable[[Any], None]
    if kind == "engine":
        from .engine_process import run_engine

        connection, run = Channel(connection_fd), run_engine
    else:
        connection, run = Connection(connection_fd), run_rank
    code = 0
    try:
        run(connection)
    except BaseException as error:
        from .process_messages import Failed

        code = 1
        connection.send(Failed.of(error))
    if isinstance(connection, Channel):
        connection.close(EXIT_REPORT_S)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
