"""Scheduling of requests: continuous batching, chunked prefill, overlap, preemption, abort."""

from .limits import Limits
from .records import (
    Abort,
    ClearCache,
    EngineLike,
    Finish,
    FinishReason,
    Message,
    NewReq,
    PromptOut,
    TokenOut,
    TokenOuts,
    TokenRun,
)
from .request_queue import QUEUES, FifoQueue, PriorityQueue, RequestQueue
from .scheduler import Scheduler, SchedulerStats

__all__ = [
    "QUEUES",
    "Abort",
    "ClearCache",
    "EngineLike",
    "FifoQueue",
    "Finish",
    "FinishReason",
    "Limits",
    "Message",
    "NewReq",
    "PriorityQueue",
    "PromptOut",
    "RequestQueue",
    "Scheduler",
    "SchedulerStats",
    "TokenOut",
    "TokenOuts",
    "TokenRun",
]
