"""Pickled messages over a socket pair, between the front process and the engine's. Sending never waits."""

from __future__ import annotations

import os
import pickle
import select
import socket
import struct
import threading
import time
from collections import deque
from contextlib import suppress
from typing import Any, Final

__all__ = ["CLOSED", "Channel"]

_LENGTH: Final = struct.Struct("!Q")
_READ_BYTES: Final = 1 << 18
CLOSED: Final[Any] = object()
"""Received once the other side has closed its end or has died."""


class Channel:
    """One end. Any thread may send, a single thread receives.

    What the socket does not take at once is kept, and sent later by whichever thread sends or receives next; so
    neither process ever waits for the other to read.
    """

    def __init__(self, fd: int) -> None:
        self._socket = socket.socket(fileno=fd)
        self._socket.setblocking(False)
        self._unsent: deque[memoryview] = deque()
        self._rest: memoryview | None = None
        """Of the frame that is partly sent."""
        self._sending = threading.Lock()
        self._blocked = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        """Wakes the receiver where the socket is full: it waits until more can be sent."""
        self._received = bytearray()
        self._messages: deque[Any] = deque()
        self._closed = False

    def send(self, message: Any) -> None:
        """Send ``message``; nothing happens where the other side is gone, which the receiver notices."""
        payload = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        self._unsent.append(memoryview(_LENGTH.pack(len(payload)) + payload))
        if not self._flush():
            os.eventfd_write(self._blocked, 1)

    def empty(self) -> bool:
        """Whether :meth:`get` would wait."""
        if not self._messages:
            self._read()
        return not (self._messages or self._closed)

    def get(self) -> Any:
        """The next message; :data:`CLOSED` after the last one."""
        while self.empty():
            self._wait()
        return self._messages.popleft() if self._messages else CLOSED

    def close(self, timeout_s: float = 0.0) -> None:
        """Send for at most ``timeout_s`` what is left, then no more: the other side receives :data:`CLOSED`."""
        deadline = time.monotonic() + timeout_s
        while not self._flush() and (left := deadline - time.monotonic()) > 0:
            select.select((), (self._socket,), (), left)
        try:
            self._socket.shutdown(socket.SHUT_WR)
        except OSError:  # the other side is gone
            self._unsent.clear()

    def free(self) -> None:
        """Close the descriptors. Neither side is used any more."""
        self._socket.close()
        os.close(self._blocked)

    def _flush(self) -> bool:
        """Send what the socket takes; False if it is full.

        A thread that finds another one sending leaves its frame to that one. (It may be the same thread: a finalizer
        that runs while a frame is sent may send as well.)
        """
        taken = True
        while taken and (self._unsent or self._rest) and self._sending.acquire(blocking=False):
            try:
                taken = self._send_some()
            finally:
                self._sending.release()
        return taken

    def _send_some(self) -> bool:
        while (frame := self._rest or (self._unsent.popleft() if self._unsent else None)) is not None:
            try:
                sent = self._socket.send(frame)
            except BlockingIOError:
                self._rest = frame
                return False
            except OSError:
                self._unsent.clear()
                sent = len(frame)
            self._rest = frame[sent:] if sent < len(frame) else None
        return True

    def _read(self) -> None:
        """Take what has arrived."""
        while not self._closed:
            try:
                data = self._socket.recv(_READ_BYTES)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            self._closed = not data
            self._received += data
            if len(data) < _READ_BYTES:
                break
        self._unpack()

    def _unpack(self) -> None:
        received, at = self._received, 0
        while len(received) - at >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(received, at)
            end = at + _LENGTH.size + length
            if len(received) < end:
                break
            self._messages.append(pickle.loads(received[at + _LENGTH.size : end]))
            at = end
        del received[:at]

    def _wait(self) -> None:
        """Wait until there is something to read, or to send again."""
        ready = select.poll()
        ready.register(self._blocked, select.POLLIN)
        ready.register(self._socket, select.POLLIN | (select.POLLOUT if self._rest else 0))
        ready.poll()
        with suppress(BlockingIOError):
            os.eventfd_read(self._blocked)
        self._flush()
