"""The process in which ``minisgl verify`` runs its checks; it may crash, hang, print or exit without affecting its
parent.

It reads pickled requests from one pipe and writes pickled answers to another. Standard output and standard error are
files that the parent reads.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import pickle
import sys
from typing import IO, Any

from .device_fixture import DeviceFixture
from .run import Outcome, run_check
from .speed import Speed, measure

__all__ = ["SpeedRequest", "main"]


class SpeedRequest:
    """A request for the speeds instead of a check."""

    def __init__(self, quick: bool) -> None:
        self.quick = quick


def main() -> None:
    """Serve until the pipe is closed. ``sys.argv``: the descriptors of the two pipes."""
    incoming, outgoing = (int(word) for word in sys.argv[1:3])
    for descriptor in (incoming, outgoing):
        os.set_inheritable(descriptor, False)  # a grandchild that keeps a pipe open would hide our end
    faulthandler.enable()  # a crash, or the parent's SIGABRT after a hang, prints the traceback
    with os.fdopen(incoming, "rb") as requests, os.fdopen(outgoing, "wb") as answers:
        _serve(requests, answers)
    os._exit(0)  # a non-daemon thread would keep the process alive


def _serve(requests: IO[bytes], answers: IO[bytes]) -> None:
    under_test, device = pickle.load(requests)
    fixture = DeviceFixture(device)
    _send(answers, "ready")
    while True:
        try:
            request = pickle.load(requests)
        except EOFError:
            return
        answer: Outcome | list[Speed]
        if isinstance(request, SpeedRequest):
            answer = measure(under_test, fixture, request.quick)
        else:
            answer = run_check(under_test, request, fixture, try_outside=True)
        # Before the answer: the parent reads the output files as soon as it has the answer.
        _flush()
        _send(answers, answer)


def _send(answers: IO[bytes], answer: Any) -> None:
    answers.write(pickle.dumps(answer))
    answers.flush()


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    # Compiled code may have written through the C library, which has its own buffers.
    ctypes.CDLL(None).fflush(None)
