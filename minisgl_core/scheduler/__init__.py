"""Scheduling of requests: continuous batching, chunked prefill, overlap, preemption, abort."""

from .grammars import AnswerGrammars, RemoteGrammars
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
    SchedulerStats,
    TokenOut,
    TokenOuts,
    TokenRun,
)
from .request_queue import QUEUES, FifoQueue, PriorityQueue, RequestQueue
from .scheduler import Scheduler

__all__ = [
    "QUEUES",
    "Abort",
    "AnswerGrammars",
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
    "RemoteGrammars",
    "RequestQueue",
    "Scheduler",
    "SchedulerStats",
    "TokenOut",
    "TokenOuts",
    "TokenRun",
]
