"""Generated parts of hand-written pages: what is between ``<!-- begin NAME -->`` and ``<!-- end NAME -->``."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence

__all__ = ["rewritten", "table"]


def rewritten(page: str, parts: Mapping[str, str]) -> str:
    """The page with these parts as they should be. Raises :class:`ValueError` if it lacks the marks of one."""
    for name, text in parts.items():
        begin, end = f"<!-- begin {name} -->\n", f"<!-- end {name} -->"
        if page.count(begin) != 1 or page.count(end) != 1:
            raise ValueError(f"the page needs one part between {begin.strip()} and {end}")
        before, _, rest = page.partition(begin)
        page = f"{before}{begin}\n{_wrapped(text)}\n\n{end}{rest.partition(end)[2]}"
    return page


def _wrapped(text: str) -> str:
    """``text`` with its prose in lines of at most 120 characters; rows of tables stay whole."""
    blocks = (
        block if block.startswith(("|", "-", "<", "!", "#")) else textwrap.fill(block, 120, break_on_hyphens=False)
        for block in text.split("\n\n")
    )
    return "\n\n".join(blocks)


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """In Markdown."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)
