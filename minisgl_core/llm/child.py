"""Child processes of an engine: how they are started, and how they end with the process that started them."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from typing import Final, Literal, NamedTuple

__all__ = ["EXIT_REPORT_S", "GRACE_S", "Child", "ChildKind", "die_with_parent", "end_child", "exit_code", "start_child"]

EXIT_REPORT_S: Final = 5.0
"""How long a process that has failed may take to report why, and to end."""
GRACE_S: Final = 10.0
"""How long a child may take to end by itself."""
PR_SET_PDEATHSIG: Final = 1

ChildKind = Literal["engine", "rank"]


class Child(NamedTuple):
    """A started process of :mod:`~minisgl_core.llm.worker`."""

    process: subprocess.Popen[bytes]
    fd: int
    """Our end of the socket pair that connects us."""
    lifeline: int
    """The end of a pipe that this process holds open: the child dies when it closes."""


def start_child(kind: ChildKind, **environment: str) -> Child:
    """Start a process with the import path of this one and these additional environment variables.

    It is a plain subprocess, not a fork or spawn of the caller: scripts need no main guard, and notebooks work. It dies
    with the *thread* that starts it, which therefore must live as long as the child.
    """
    ours, theirs = socket.socketpair()
    pipe_read, pipe_write = os.pipe()
    fds = (theirs.fileno(), pipe_read)
    paths = [path or os.getcwd() for path in sys.path]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths)), **environment}
    command = [sys.executable, "-P", "-m", "minisgl_core.llm.worker", kind, *map(str, fds), str(os.getpid())]
    try:
        process = subprocess.Popen(command, pass_fds=fds, env=environment, stdin=subprocess.DEVNULL)
    except OSError:
        ours.close()
        os.close(pipe_write)
        raise
    finally:
        theirs.close()
        os.close(pipe_read)
    return Child(process, ours.detach(), pipe_write)


def exit_code(process: subprocess.Popen[bytes]) -> str:
    """The exit code of a process that is ending, for a message."""
    try:
        return str(process.wait(EXIT_REPORT_S))
    except subprocess.TimeoutExpired:
        return "none yet"


def end_child(process: subprocess.Popen[bytes], lifeline: int, deadline: float) -> None:
    """Wait for the end of a process whose connection is closed; kill it at ``deadline``, by ``time.monotonic``."""
    try:
        process.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    os.close(lifeline)


def die_with_parent(lifeline: int, parent: int) -> None:
    """In a child: end this process when the one that started it ends.

    A thread waits until the lifeline closes, because the main thread may be inside a collective. Children forked from
    the parent inherit the pipe and keep it open; there the kernel's parent death signal helps. It fires when the
    *thread* ends that started this process.
    """
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)

    def wait() -> None:
        os.read(lifeline, 1)
        os._exit(1)

    threading.Thread(target=wait, name="minisgl-lifeline", daemon=True).start()
