"""Figures of other engines on the same work, from ``peers.json``: the newest set first, older ones as history."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, Final

from minisgl_core.errors import UsageError, nearest

__all__ = ["OWN", "PEER_COLUMNS", "PeerFigure", "best_peer", "peer_figures", "peer_rows"]

OWN: Final = "minisgl"
"""The name of this engine in sets that measured it together with the others."""
PEER_COLUMNS: Final[Mapping[str, str]] = {"offline": "tok_s", "latency": "tpot_ms", "prefill": "in_tok_s"}
"""The figure by which each mode is compared."""
_RATES: Final = ("tok_s", "in_tok_s")


@dataclass(frozen=True, slots=True)
class PeerFigure:
    """One figure and its origin; "not recorded" where it is unknown."""

    engine: str
    """Name and version."""
    geometry: str
    name: str
    """As in :class:`~minisgl_core.bench.measure.Figures`."""
    low: float
    high: float
    """The highest of several runs; equal to the lowest if only one figure is recorded."""
    date: str
    device: str
    method: str
    settings: str
    versions: str
    command: str
    runs: str

    @property
    def best(self) -> float:
        return self.high if self.name in _RATES else self.low

    @property
    def text(self) -> str:
        """Such as ``21,720 to 21,910``."""
        low, high = f"{self.low:,g}", f"{self.high:,g}"
        return low if low == high else f"{low} to {high}"


def peer_figures() -> list[PeerFigure]:
    """All figures, newest first."""
    content = json.loads((files(__package__) / "peers.json").read_text())
    return [
        PeerFigure(
            entry["engine"], geometry, name, *_bounds(value),
            one["date"], one["device"], one["method"],
            entry["settings"], entry["versions"], entry["command"], entry["runs"],
        )
        for one in content["sets"]
        for entry in one["engines"]
        for geometry, figures in entry["figures"].items()
        for name, value in figures.items()
    ]  # fmt: skip


def _bounds(value: Any) -> tuple[float, float]:
    low, high = value if isinstance(value, list) else (value, value)
    return float(low), float(high)


def peer_rows(mode: str, geometry: str, only: str | None = None) -> list[PeerFigure]:
    """The newest figure of each other engine for this work. Raises :class:`UsageError` for an unknown name."""
    figures = _others()
    engines = list(dict.fromkeys(figure.engine for figure in figures))
    if only is not None and only not in engines:
        hint = nearest(only, engines) or f"there are figures of {', '.join(engines)}"
        raise UsageError(f"no figures of {only!r}", field="--against", value=only, remedy=hint)
    newest: dict[str, PeerFigure] = {}
    for figure in figures:
        if (figure.geometry, figure.name) == (geometry, PEER_COLUMNS.get(mode)) and only in (None, figure.engine):
            newest.setdefault(figure.engine, figure)
    return list(newest.values())


def best_peer(name: str, geometry: str) -> PeerFigure | None:
    """The best figure with this name of any other engine in any set."""
    found = [figure for figure in _others() if (figure.geometry, figure.name) == (geometry, name)]
    return (max if name in _RATES else min)(found, key=lambda figure: figure.best) if found else None


def _others() -> list[PeerFigure]:
    return [figure for figure in peer_figures() if not figure.engine.startswith(f"{OWN} ")]
