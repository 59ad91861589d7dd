"""Constrained answers, as the scheduler sees them.

The states of answers live on rank 0, which finds out alone that one is complete or cannot go on. It ends such a Req
with a message to all ranks, itself included, so that every rank ends it before the same step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np

from minisgl_core.errors import AdmissionError
from minisgl_core.plugin_api import GrammarError

from .records import Finish, Message, PendingReq

if TYPE_CHECKING:
    from minisgl_core.core import Req, SamplingParams
    from minisgl_core.grammar import AnswerGrammar

__all__ = ["AnswerGrammars", "ConstrainedRows", "RemoteGrammars"]


class AnswerGrammars(Protocol):
    """Makes the state of each answer that has a grammar. Raises :class:`GrammarError`."""

    @property
    def seconds(self) -> float: ...

    def answer(self, params: SamplingParams) -> AnswerGrammar | None: ...


class RemoteGrammars:
    """For ranks other than the first: they only know which rows have a grammar."""

    seconds = 0.0

    def answer(self, params: SamplingParams) -> None:
        return None


class ConstrainedRows:
    """The rows of Reqs that have the state of an answer, and the messages that these lead to.

    ``grammars`` None: requests with a grammar are refused.
    """

    def __init__(self, grammars: AnswerGrammars | None, num_rows: int) -> None:
        self.notices: list[Message] = []
        """For all ranks, before the next step."""
        self.count = 0
        """Rows that have one"""
        self._grammars = grammars
        self._rows = np.zeros(num_rows, dtype=bool)

    @property
    def seconds(self) -> float:
        """Spent on grammars so far."""
        return 0.0 if self._grammars is None else self._grammars.seconds

    def check(self, params: SamplingParams) -> None:
        """Raise :class:`AdmissionError` if no grammar can be served."""
        if params.grammar is not None and self._grammars is None:
            raise AdmissionError(
                "this scheduler has no grammar backend", field="grammar", value=params.grammar, remedy="use LLM"
            )

    def begin(self, pending: PendingReq) -> None:
        """Give a new request the state of its answer. One that fails here is ended before the next step."""
        if pending.params.grammar is not None and self._grammars is not None:
            try:
                pending.grammar = self._grammars.answer(pending.params)
            except GrammarError as error:
                self.notices.append(Finish(pending.uid, str(error)))

    def add(self, req: Req, pending: PendingReq) -> None:
        """``req`` was admitted, for the first time or again: it goes on with the state of ``pending``."""
        req.grammar = pending.grammar
        self._mark(req, True)

    def remove(self, req: Req) -> None:
        """``req`` is being released."""
        self._mark(req, False)

    def _mark(self, req: Req, has_state: bool) -> None:
        if req.grammar is not None:
            self._rows[req.table_idx] = has_state
            self.count += 1 if has_state else -1

    def among(self, rows: np.ndarray) -> np.ndarray:
        """rows (B,) int64 -> (B,) bool"""
        found: np.ndarray = self._rows[rows]
        return found

    def accept(self, req: Req, token: int, is_last: bool) -> bool:
        """The next token of ``req``; returns whether its answer is complete. Unless the token ``is_last`` anyway, a
        complete answer, or a token that its grammar refuses, ends it before the next step.
        """
        error = None
        try:
            req.grammar.accept(token)
        except GrammarError as refused:
            error = str(refused)
        complete = bool(req.grammar.finished)
        if (complete or error is not None) and not is_last:
            self.notices.append(Finish(req.uid, error))
        return complete
