"""How results are shown: as data for programs, as a table beside the peers' figures for people."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from dataclasses import asdict
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Final

import torch

from minisgl_core import __version__
from minisgl_core.errors import UsageError, nearest

if TYPE_CHECKING:
    from minisgl_core.engine.memory import MemoryUse
    from minisgl_core.registry import Plan

    from .measure import Result
    from .workloads import Workload

__all__ = ["as_json", "one_line", "peer_figures", "peer_rows", "versions"]

_PEER_COLUMNS = {"offline": "tok_s", "latency": "tpot_ms", "prefill": "in_tok_s"}
"""The figure that each mode is compared by."""
_CUT: Final = " ..."


def versions() -> dict[str, str]:
    """What a figure depends on, beside the plan."""
    found = {"minisgl": __version__, "torch": str(torch.__version__), "python": platform.python_version()}
    return found | ({"cuda": torch.version.cuda} if torch.version.cuda else {})


def as_json(workload: Workload, geometry: str, result: Result, plan: Plan, memory: MemoryUse) -> dict[str, Any]:
    """One result as plain data."""
    content = asdict(result)
    runs = content.pop("runs")
    return {
        "mode": workload.mode,
        "geometry": geometry,
        **content,
        "workload": workload.facts(),
        "memory": memory.to_json(),
        "plan": plan.to_json(),
        "versions": versions(),
        "runs": runs,
    }


def peer_figures() -> Mapping[str, Any]:
    """Figures of other engines on the same work, with their sources; ``peers.json`` beside this file."""
    content: dict[str, Any] = json.loads((files(__package__) / "peers.json").read_text())
    return content


def peer_rows(mode: str, geometry: str, only: str | None = None) -> list[tuple[str, float]]:
    """(engine, figure) of those that were measured on this work. Raises :class:`UsageError` for an unknown name."""
    engines: dict[str, Any] = peer_figures()["engines"]
    if only is not None and only not in engines:
        hint = nearest(only, engines) or f"there are figures of {', '.join(engines)}"
        raise UsageError(f"no figures of {only!r}", field="--against", value=only, remedy=hint)
    column = _PEER_COLUMNS.get(mode)
    rows = []
    for name, figures in engines.items():
        figure = figures.get(geometry, {}).get(column)
        if figure is not None and only in (None, name):
            rows.append((name, float(figure)))
    return rows


def one_line(text: str, limit: int) -> str:
    """The text with single spaces, of at most ``limit`` characters: a longer one ends behind a word, and says so."""
    line = " ".join(text.split())
    if len(line) <= limit:
        return line
    room = limit - len(_CUT)
    words, space, _ = line[: room + 1].rpartition(" ")
    return (words.rstrip(",;:") if space else line[:room]) + _CUT
