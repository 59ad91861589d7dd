"""The throw-away process of :mod:`minisgl_core.registry.probe`: may initialise CUDA, may crash, may hang.

It answers one JSON line per JSON line: ``{"facts": true}`` with the device's facts, ``{"probe": "pkg.mod:fn", "with":
{...}}`` with ``{"ok": true}``, a refusal or an error. ``"ask"`` in place of ``"probe"`` is for functions of the core:
what they return comes back as ``"value"``.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from typing import Any

from minisgl_core.plugin_api import CannotRun

from .imports import import_object

__all__ = ["answer", "main"]


def main() -> None:
    """Serve until standard input ends. What probes print goes to standard error, not into the answers."""
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)
        for line in sys.stdin:
            answers.write(json.dumps(answer(json.loads(line))) + "\n")
            answers.flush()


def answer(request: Mapping[str, Any]) -> dict[str, Any]:
    """One answer; never raises but for what ends a process."""
    try:
        if "facts" in request:
            return {"ok": True, "device": _cuda_facts()}
        if "ask" in request:
            return {"ok": True, "value": import_object(request["ask"])(request["with"])}
        import_object(request["probe"])(request["with"])
    except CannotRun as refused:
        reason = refused.reason
        return {"ok": False, "reason": [reason.code, reason.field, reason.wanted, reason.supported, reason.fix]}
    except Exception as error:
        return {"ok": False, "error": f"{type(error).__name__}: {error}"}
    return {"ok": True}


def _cuda_facts() -> dict[str, Any] | None:
    """The facts of CUDA device 0, None without one. Imports torch and initialises CUDA: only in this process."""
    import torch

    if not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(0)
    return {
        "kind": "cuda",
        "sm": properties.major * 10 + properties.minor,
        "name": properties.name,
        "total_bytes": properties.total_memory,
        "count": torch.cuda.device_count(),
    }


if __name__ == "__main__":
    main()
