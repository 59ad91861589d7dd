"""The throw-away process of :mod:`minisgl_core.sandbox.process`: may initialise a device, may crash, may hang.

It answers one JSON line per JSON line: ``{"call": "pkg.mod:fn", "with": {...}}`` with what the function returns, a
refusal (:class:`CannotRun`), or an error.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import astuple
from typing import Any

from minisgl_core.plugin_api import CannotRun

from .imports import import_object

__all__ = ["answer", "main"]


def main() -> None:
    """Serve until standard input ends. What functions print goes to standard error, not into the answers."""
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)
        for line in sys.stdin:
            answers.write(json.dumps(answer(json.loads(line)), default=repr) + "\n")
            answers.flush()


def answer(request: Mapping[str, Any]) -> dict[str, Any]:
    """One answer; never raises except for what ends a process."""
    try:
        return {"ok": True, "value": import_object(request["call"])(request["with"])}
    except CannotRun as refused:
        return {"ok": False, "reason": astuple(refused.reason)}
    except (Exception, SystemExit, KeyboardInterrupt) as error:
        return {"ok": False, "error": f"{type(error).__name__}: {error}"}


if __name__ == "__main__":
    main()
