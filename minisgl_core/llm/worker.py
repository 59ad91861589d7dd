"""``python -m minisgl_core.llm.worker CONNECTION_FD LIFELINE_FD PARENT_PID``: one tensor-parallel rank above 0.

It runs the same scheduler as rank 0 on the same messages. It ends when its connection closes, and at once when rank 0's
process is gone.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
import threading
from multiprocessing.connection import Connection

__all__ = ["main"]

PR_SET_PDEATHSIG = 1


def die_with_parent(lifeline: int, parent: int) -> None:
    """End this process when rank 0's ends.

    The lifeline is a pipe that rank 0's process holds open. A thread waits until it closes, because the main thread may
    be inside a collective. Children forked from rank 0 inherit the pipe and keep it open; there the kernel's parent
    death signal helps. It fires when the *thread* ends that started this process: the one that runs rank 0.
    """
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)

    def wait() -> None:
        os.read(lifeline, 1)
        os._exit(1)

    threading.Thread(target=wait, name="minisgl-lifeline", daemon=True).start()


def serve(connection: Connection) -> None:
    """Build the engine, then follow rank 0 step by step until it closes the connection."""
    import torch

    from minisgl_core.engine import Engine
    from minisgl_core.env import ENV
    from minisgl_core.modelconfig import read_model_config
    from minisgl_core.plugin_api import HOST_ROLES
    from minisgl_core.registry import Plan, load_class
    from minisgl_core.scheduler import Scheduler

    from .rank_messages import Imported, Ready, Start

    start: Start = connection.recv()
    for switch in ENV.all():
        switch.value = start.switches[switch.name]
    torch.set_num_threads(start.num_threads)
    read_model_config(start.config.model_path)
    assert start.config.plan is not None
    for bucket in Plan.from_json(start.config.plan).buckets:
        if bucket.entry.role not in HOST_ROLES:
            load_class(bucket.choice)
    connection.send(Imported())
    engine = Engine(start.config)
    try:
        scheduler = Scheduler(engine, engine.ctx.kv.match_len, start.eos_token_ids)
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
    """Serve, report any failure to rank 0, and exit at once.

    The interpreter's normal exit takes seconds with torch loaded, and after a failure the collectives of the other
    ranks must break off.
    """
    connection_fd, lifeline, parent = (int(text) for text in sys.argv[1:])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal reaches all ranks: rank 0 decides
    die_with_parent(lifeline, parent)
    logging.getLogger("minisgl_core.inputs").setLevel(logging.ERROR)  # rank 0 reads the same files and logs it
    connection, code = Connection(connection_fd), 0
    try:
        serve(connection)
    except BaseException as error:
        from .rank_messages import Failed

        code = 1
        connection.send(Failed.of(error))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
