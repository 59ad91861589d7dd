"""Bar charts as SVG text, without a plotting library."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Final

__all__ = ["bar_chart"]

LABELS: Final = 260
"""Pixels to the left of the bars"""
WIDTH: Final = 420
"""Pixels of the longest bar"""
ROW: Final = 24


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
