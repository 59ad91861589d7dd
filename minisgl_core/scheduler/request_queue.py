"""The order in which waiting requests are admitted: a policy is one class here and one entry in :data:`QUEUES`.

Every tensor-parallel rank has a queue of its own, and all of them must agree. So a policy decides by what is in
:class:`PendingReq` alone: no clock, no random numbers, no order of a set.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from collections.abc import Mapping
from itertools import count
from typing import ClassVar, Final, NamedTuple, Protocol

from .records import PendingReq

__all__ = ["AGING_STEPS", "QUEUES", "FifoQueue", "PriorityQueue", "RequestQueue"]

AGING_STEPS: Final = 64
"""Scheduler steps of waiting that count as much as one level of priority."""
_STALE_ENTRIES: Final = 64
"""Entries of removed requests that a heap may hold beyond the number of live ones."""


class RequestQueue(Protocol):
    """Requests that wait to be admitted, by their ``uid``. No two of them share one."""

    uses_priority: ClassVar[bool]
    """Whether ``PendingReq.priority`` matters. If not, a priority other than 0 is refused."""

    def __len__(self) -> int: ...

    def add(self, pending: PendingReq) -> None:
        """Add a new request."""

    def put_back(self, pending: PendingReq) -> None:
        """Put a preempted request before all others, those put back earlier included."""

    def remove(self, pending: PendingReq) -> None:
        """Remove a waiting request. Must not search: many requests may be aborted at once."""

    def peek(self) -> PendingReq | None:
        """Return the request to admit next, or None. It stays the same until the queue changes."""

    def pop(self) -> PendingReq:
        """Remove and return the request that :meth:`peek` returns. The queue must not be empty."""


class FifoQueue:
    """First come, first served."""

    uses_priority: ClassVar = False

    def __init__(self) -> None:
        self._waiting: OrderedDict[int, PendingReq] = OrderedDict()

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, pending: PendingReq) -> None:
        self._waiting[pending.uid] = pending

    def put_back(self, pending: PendingReq) -> None:
        self._waiting[pending.uid] = pending
        self._waiting.move_to_end(pending.uid, last=False)

    def remove(self, pending: PendingReq) -> None:
        del self._waiting[pending.uid]

    def peek(self) -> PendingReq | None:
        return next(iter(self._waiting.values()), None)

    def pop(self) -> PendingReq:
        return self._waiting.popitem(last=False)[1]


class _Entry(NamedTuple):
    """Entries are ordered by their first two fields, which no two share."""

    rank: float
    number: int
    pending: PendingReq


class PriorityQueue:
    """The highest priority first, and first come, first served among equals.

    A request gains one level for every :data:`AGING_STEPS` steps that it waits, so none starves. All requests age
    alike: the order of any two of them is fixed when the second one arrives, and a heap with constant keys keeps it.
    """

    uses_priority: ClassVar = True

    def __init__(self) -> None:
        self._waiting: dict[int, PendingReq] = {}
        self._heap: list[_Entry] = []
        """One entry for each waiting request, and stale ones of requests that were removed."""
        self._arrivals = count()
        self._returns = count(-1, -1)

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, pending: PendingReq) -> None:
        rank = pending.arrival_step - AGING_STEPS * pending.priority
        self._push(_Entry(rank, next(self._arrivals), pending))

    def put_back(self, pending: PendingReq) -> None:
        self._push(_Entry(-math.inf, next(self._returns), pending))

    def remove(self, pending: PendingReq) -> None:
        del self._waiting[pending.uid]
        if len(self._heap) > 2 * len(self._waiting) + _STALE_ENTRIES:
            self._heap = list(filter(self._is_live, self._heap))
            heapq.heapify(self._heap)

    def peek(self) -> PendingReq | None:
        while self._heap and not self._is_live(self._heap[0]):
            heapq.heappop(self._heap)
        return self._heap[0].pending if self._heap else None

    def pop(self) -> PendingReq:
        self.peek()  # drops stale entries at the top
        pending = heapq.heappop(self._heap).pending
        del self._waiting[pending.uid]
        return pending

    def _push(self, entry: _Entry) -> None:
        self._waiting[entry.pending.uid] = entry.pending
        heapq.heappush(self._heap, entry)

    def _is_live(self, entry: _Entry) -> bool:
        return self._waiting.get(entry.pending.uid) is entry.pending


QUEUES: Final[Mapping[str, type[RequestQueue]]] = {"fifo": FifoQueue, "priority": PriorityQueue}
"""Policies by their name in the setting ``queue``."""
