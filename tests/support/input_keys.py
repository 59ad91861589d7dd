"""For tests of input gates: unknown keys, plausible values, and what is logged."""

from __future__ import annotations

import logging

from hypothesis import strategies as st

from minisgl_core.inputs import warn_once

__all__ = ["UNKNOWN", "VALUES", "Log"]

UNKNOWN = st.text("abcxyz_", min_size=3, max_size=12).map(lambda name: f"zz_{name}")
VALUES = st.one_of(
    st.sampled_from([None, True, False, 0, 1, 2, 7, 0.0, 0.5, 1.0, 30.0, "silu", "gelu", "x", [], [1], {}, {"a": 1}])
)


class Log(logging.Handler):
    """What a call logs, as one text; the filter for repeated warnings starts empty."""

    def __enter__(self) -> Log:
        warn_once.cache_clear()
        self.text = ""
        logging.getLogger("minisgl_core").addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        logging.getLogger("minisgl_core").removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.text += record.getMessage() + "\n"
