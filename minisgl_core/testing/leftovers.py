"""Leftovers of a check in its process: threads, child processes, file descriptors, memory."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from .compare import Mismatch

__all__ = ["descriptors", "heap_bytes", "nothing_running"]

PATIENCE_S: Final = 1.0
"""Threads and processes that end within this time are accepted."""
HELPERS: Final = ("multiprocessing.resource_tracker", "multiprocessing.forkserver", "compile_worker")
"""Processes that Python and torch keep for the whole process, by a part of their command line."""


@contextmanager
def nothing_running() -> Iterator[None]:
    """Raise :class:`Mismatch` if the block leaves a non-daemon thread or a child process; children are terminated.

    An exception of the block itself takes precedence.
    """
    # The block's own exception is kept until the leftovers are terminated, which must happen in any case.
    threads, children = set(threading.enumerate()), set(_children())
    failed: BaseException | None = None
    try:
        yield
    except BaseException as error:
        failed = error
    left = [*_threads_left(threads), *_children_left(children)]
    if failed is not None:
        raise failed
    if left:
        raise Mismatch(f"it left behind {', '.join(left)}")


def _threads_left(before: set[threading.Thread]) -> Iterator[str]:
    for thread in threading.enumerate():
        if thread in before or thread.daemon or thread is threading.current_thread():
            continue
        thread.join(PATIENCE_S)
        if thread.is_alive():
            yield f"the thread {thread.name!r}, which is no daemon: the process could not end"


def _children_left(before: set[int]) -> Iterator[str]:
    end = time.monotonic() + PATIENCE_S
    while set(_children()) - before and time.monotonic() < end:
        time.sleep(0.02)
    for process, command in _children().items():
        if process not in before:
            with contextlib.suppress(OSError):
                os.kill(process, signal.SIGKILL)
            yield f"the child process {command[:80]!r}"


def _children() -> dict[int, str]:
    """Running child processes: process id -> command line."""
    found = {}
    for listing in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):  # the thread has ended
            for word in listing.read_text().split():
                command = Path("/proc", word, "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                if command and not any(helper in command for helper in HELPERS):  # an exited process has none
                    found[int(word)] = command.strip()
    return found


def descriptors() -> dict[str, str]:
    """Open file descriptors: number -> what they refer to."""
    found = {}
    for link in Path("/proc/self/fd").glob("*"):
        with contextlib.suppress(OSError):  # the folder's own descriptor is closed by now
            found[link.name] = os.readlink(link)
    return found


class _MallInfo(ctypes.Structure):
    _names = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
    _fields_ = [(name, ctypes.c_size_t) for name in _names]


def heap_bytes() -> int:
    """Bytes that the C library has allocated and not freed, or the resident set if that is unknown.

    This includes host tensors, large Python objects and the allocations of compiled code.
    """
    gc.collect()
    mallinfo2: Any = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if mallinfo2 is None:
        with contextlib.suppress(OSError):
            return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        return 0
    mallinfo2.restype = _MallInfo
    info = mallinfo2()
    return int(info.uordblks + info.hblkhd)  # small allocations, and large ones that have their own mapping
