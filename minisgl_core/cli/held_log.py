"""Keeps the log out of streamed text on the same terminal."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

__all__ = ["log_held"]

_LOGGERS = ("minisgl", "minisgl_core")


class _Holding(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


@contextlib.contextmanager
def log_held() -> Iterator[None]:
    """Hold back minisgl's log until this block ends, so that it is not printed in the middle of a streamed line."""
    holding = _Holding()
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    before = [(logger.handlers[:], logger.propagate) for logger in loggers]
    for logger in loggers:
        logger.handlers[:], logger.propagate = [holding], False
    try:
        yield
    finally:
        for logger, (handlers, propagate) in zip(loggers, before, strict=True):
            logger.handlers[:], logger.propagate = handlers, propagate
        for record in holding.records:
            logging.getLogger(record.name).handle(record)
