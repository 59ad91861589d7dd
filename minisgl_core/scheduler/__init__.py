"""Which requests run when: continuous batching, chunked prefill, overlap, preemption, abort."""

from .limits import Limits
from .messages import Abort, ClearCache, Finish, FinishReason, Message, NewReq, PromptOut, TokenOut, TokenOuts, TokenRun
from .records import EngineLike
from .scheduler import Scheduler, SchedulerStats

__all__ = [
    "Abort",
    "ClearCache",
    "EngineLike",
    "Finish",
    "FinishReason",
    "Limits",
    "Message",
    "NewReq",
    "PromptOut",
    "Scheduler",
    "SchedulerStats",
    "TokenOut",
    "TokenOuts",
    "TokenRun",
]
