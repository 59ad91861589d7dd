"""Measured tile sizes, shipped as data: ``tiles/NAME.json`` maps ``"NxK"`` to rows of (largest M, tile or [])."""

from __future__ import annotations

import json
import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from importlib.resources import files

__all__ = ["TileTable"]

Entries = Mapping[str, Sequence[tuple[int, list[int]]]]


class TileTable:
    """The fastest tiles in a benchmark, by weight shape and number of rows."""

    def __init__(self, entries: Entries) -> None:
        self._entries: dict[tuple[int, int], tuple[list[int], list[list[int]]]] = {}
        for shape, rows in entries.items():
            n, k = map(int, shape.split("x"))
            self._entries[n, k] = ([limit for limit, _ in rows], [tile for _, tile in rows])

    @classmethod
    def load(cls, name: str, part: str = "tiles") -> TileTable:
        """One part of a shipped file, by name; empty if there is no such file."""
        file = files(__package__) / "tiles" / f"{name}.json"
        return cls(json.loads(file.read_text()).get(part, {}) if file.is_file() else {})

    def find(self, n: int, k: int, rows: int) -> list[int] | None:
        """The tile for ``rows`` rows on an (n, k) weight; [] = the library is faster; None = not measured."""
        entry = self._entries.get((n, k))
        if entry is None:
            return None
        place = bisect_left(entry[0], rows)
        return entry[1][place] if place < len(entry[0]) else None

    def choose(self, n: int, k: int, rows: int) -> list[int]:
        """The tile for ``rows`` rows on an (n, k) weight; [] = the library's product.

        A weight that was not measured gets a kernel for one row only: the tile of the weight closest in size, if every
        measured weight of half to twice its size has one, and there are at least two of them.
        """
        measured = self.find(n, k, rows)
        if measured is not None:
            return measured
        if rows != 1:
            return []
        size = n * k
        similar = [shape for shape in self._entries if size <= 2 * shape[0] * shape[1] <= 4 * size]
        found = [
            self.find(*shape, 1) for shape in sorted(similar, key=lambda shape: abs(math.log(math.prod(shape) / size)))
        ]
        return found[0] or [] if len(found) > 1 and all(found) else []

    def most_rows(self, n: int, k: int) -> int:
        """The largest M such that an (n, k) weight has a tile for every number of rows up to M; 0 if it was not
        measured.
        """
        most = 0
        for limit, tile in zip(*self._entries.get((n, k), ([], [])), strict=True):
            if not tile:
                break
            most = limit
        return most
