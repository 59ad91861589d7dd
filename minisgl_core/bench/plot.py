"""Charts as SVG text, without a plotting library."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Final, NamedTuple

__all__ = ["Panel", "bar_chart", "line_charts"]

LABELS: Final = 260
"""Pixels to the left of the bars"""
WIDTH: Final = 420
"""Pixels of the longest bar"""
ROW: Final = 24
PLOT: Final = (600, 130)
"""Pixels of a panel of lines"""


def bar_chart(title: str, bars: Sequence[tuple[str, float]], mark: float = 1.0) -> str:
    """One horizontal bar per (label, value >= 0), a dashed line at ``mark``."""
    scale = WIDTH / max([mark, *(value for _, value in bars)])
    bottom = 56 + ROW * len(bars)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{LABELS + WIDTH + 70}" height="{bottom + 16}">',
        "<style>text { font: 13px sans-serif }</style>",
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="12" y="24">{escape(title)}</text>',
    ]
    for at, (label, value) in enumerate(bars):
        top = 44 + ROW * at
        lines += [
            f'<text x="{LABELS - 8}" y="{top + 14}" text-anchor="end">{escape(label)}</text>',
            f'<rect x="{LABELS}" y="{top}" width="{value * scale:.1f}" height="{ROW - 6}" fill="#4878a8"/>',
            f'<text x="{LABELS + value * scale + 6:.1f}" y="{top + 14}">{value:.2f}</text>',
        ]
    x = LABELS + mark * scale
    lines.append(f'<path d="M{x:.1f} 38V{bottom}" stroke="black" stroke-dasharray="4 3"/>')
    return "\n".join([*lines, "</svg>"]) + "\n"


class Panel(NamedTuple):
    """One line of a chart: a value >= 0 for each label, None where there is none."""

    title: str
    values: Sequence[float | None]


def line_charts(title: str, labels: Sequence[str], panels: Sequence[Panel]) -> str:
    """Panels below each other with the same labels, at equal distances, on the horizontal axis."""
    width, height = PLOT
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width + 130}" height="{70 + (height + 60) * len(panels)}">',
        "<style>text { font: 13px sans-serif }</style>",
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="12" y="24">{escape(title)}</text>',
    ]
    for number, panel in enumerate(panels):
        lines += _panel(panel, labels, 64 + (height + 60) * number)
    return "\n".join([*lines, "</svg>"]) + "\n"


def _panel(panel: Panel, labels: Sequence[str], top: int) -> list[str]:
    width, height = PLOT
    largest = max((value for value in panel.values if value is not None), default=0.0) or 1.0
    at = [60 + (index + 0.5) * width / len(labels) for index in range(len(labels))]
    points = [
        (x, top + height * (1 - value / largest), value)
        for x, value in zip(at, panel.values, strict=True)
        if value is not None
    ]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y, _ in points)
    return [
        f'<text x="60" y="{top - 18}">{escape(panel.title)}</text>',
        f'<path d="M60 {top}V{top + height}H{60 + width}" fill="none" stroke="black"/>',
        f'<polyline points="{path}" fill="none" stroke="#4878a8" stroke-width="2"/>',
        *(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="#4878a8"/>' for x, y, _ in points),
        *(f'<text x="{x:.1f}" y="{y - 6:.1f}" text-anchor="middle">{value:,.4g}</text>' for x, y, value in points),
        *(
            f'<text x="{x:.1f}" y="{top + height + 16}" text-anchor="middle">{escape(label)}</text>'
            for x, label in zip(at, labels, strict=True)
        ),
    ]
