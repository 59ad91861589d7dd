"""Ctrl-C between steps instead of inside one."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["deferred_interrupts"]


@contextmanager
def deferred_interrupts() -> Iterator[Callable[[], None]]:
    """Inside, a first Ctrl-C is kept until the yielded function is called, or until the end, and is raised there.

    A step that is broken off half-way leaves the engine in no usable state. A second Ctrl-C is not held back. Does
    nothing outside the main thread, or where the program handles the signal in its own way.
    """
    caught: list[int] = []

    def check() -> None:
        if caught:
            raise KeyboardInterrupt

    def keep(number: int, frame: FrameType | None) -> None:
        if caught:
            signal.default_int_handler(number, frame)
        caught.append(number)

    in_main_thread = threading.current_thread() is threading.main_thread()
    if not in_main_thread or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield check
        return
    signal.signal(signal.SIGINT, keep)
    try:
        yield check
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    check()
