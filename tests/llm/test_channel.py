"""Messages over a socket pair: in order, whole, and never waiting for the other side to read."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from minisgl_core.llm.channel import CLOSED, Channel


@pytest.fixture
def pair() -> Iterator[tuple[Channel, Channel]]:
    ours, theirs = (Channel(end.detach()) for end in socket.socketpair())
    yield ours, theirs
    ours.free()
    theirs.free()


@contextmanager
def receiving(ours: Channel, theirs: Channel) -> Iterator[None]:
    """A thread receives from ``ours`` until the other end is closed, as it is at the end."""
    thread = threading.Thread(target=ours.get)
    thread.start()
    try:
        yield
    finally:
        theirs.close()
        thread.join(60)


def test_messages_arrive_whole_and_in_order(pair: tuple[Channel, Channel]) -> None:
    ours, theirs = pair
    sent = [b"x" * size for size in (0, 1, 10, 1000, 100_000)] + [("a", 1), None]
    for message in sent:
        ours.send(message)
    theirs.send("back")
    assert [theirs.get() for _ in sent] == sent
    assert theirs.empty() and ours.get() == "back"


def test_a_sender_does_not_wait_for_a_reader_and_loses_nothing(pair: tuple[Channel, Channel]) -> None:
    ours, theirs = pair
    sent = [np.full(100_000, number, dtype=np.int32) for number in range(50)]  # far more than a socket holds
    for message in sent:
        ours.send(message)
    received: list[np.ndarray] = []
    reader = threading.Thread(target=lambda: received.extend(theirs.get() for _ in sent))
    reader.start()
    with receiving(ours, theirs):  # whichever thread receives sends the rest
        reader.join(60)
    assert [int(message[-1]) for message in received] == list(range(50))


def test_threads_that_send_at_once_do_not_mix_their_messages(pair: tuple[Channel, Channel]) -> None:
    ours, theirs = pair

    def send(thread: int) -> None:
        for number in range(200):
            ours.send((thread, number, b"x" * 500))

    threads = [threading.Thread(target=send, args=(thread,)) for thread in range(4)]
    for thread in threads:
        thread.start()
    with receiving(ours, theirs):
        received = [theirs.get() for _ in range(800)]
    for thread in threads:
        thread.join(60)
    for which in range(4):
        assert [number for thread, number, _ in received if thread == which] == list(range(200))


def test_what_was_sent_is_received_before_the_end(pair: tuple[Channel, Channel]) -> None:
    ours, theirs = pair
    ours.send(1)
    ours.close()
    assert [theirs.get(), theirs.get(), theirs.get()] == [1, CLOSED, CLOSED]
    assert not theirs.empty(), "a reader need not wait for an end that has come"
    theirs.send("no one reads this")  # no error


def test_closing_sends_the_rest_first(pair: tuple[Channel, Channel]) -> None:
    ours, theirs = pair
    message = b"x" * 1_000_000
    received: list[object] = []
    reader = threading.Thread(target=lambda: received.extend(iter(theirs.get, CLOSED)))
    reader.start()
    ours.send(message)
    ours.close(timeout_s=60)
    reader.join(60)
    assert received == [message]
