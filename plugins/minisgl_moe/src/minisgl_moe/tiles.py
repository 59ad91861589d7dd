"""How the kernels split their work, by number of tokens: from a measured table if there is one, else by rule.

Experts run in one of two ways. ``pairs``: one program row per (token, expert) pair, matrix times vector, without
sorting, for a handful of tokens. ``grouped``: pairs sorted by expert, matrix products of ``block_m`` rows of one expert
each.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

__all__ = ["SHIPPED", "Geometry", "Table", "Tile", "Tiling", "default_tiling", "dump_table", "load_table", "tiling_at"]

SHIPPED: Final = Path(__file__).parent / "tiles"
"""The folder of measured tables that comes with the package."""
_FORMAT: Final = 1


class Tile(NamedTuple):
    """The share of work of one program, all integers, so that it can be passed as an operation's ``int[]``."""

    block_m: int
    """Pairs (rows) of one expert; 1 for the ``pairs`` kernels."""
    block_n: int
    """Rows of the weight matrix."""
    block_k: int
    """Columns of the weight matrix per step."""
    group_m: int = 8
    """Row blocks that share a range of weights in the L2 cache."""
    warps: int = 4
    stages: int = 3
    """Loads in flight per program."""
    swap: int = 0
    """1: the weights are the left operand, so that few rows do not waste the wide side of the instruction."""
    tma: int = 0
    """1: weights come through tensor descriptors (Hopper and later)."""


class Tiling(NamedTuple):
    """The tiles of both products. ``up``: hidden to expert width, gated; ``down``: back."""

    grouped: bool
    up: Tile
    down: Tile


@dataclass(frozen=True, slots=True)
class Geometry:
    """What a table was measured for. ``arch`` is the compute capability times ten, 0 in the interpreter."""

    arch: int
    dtype: str
    experts: int
    top_k: int
    inner: int
    """Rank-local expert width."""
    hidden: int

    @property
    def file_name(self) -> str:
        """Such as ``sm90-bfloat16-e128-k8-i768-h2048.json``."""
        return f"sm{self.arch}-{self.dtype}-e{self.experts}-k{self.top_k}-i{self.inner}-h{self.hidden}.json"

    def touched(self, tokens: int) -> float:
        """Expected number of experts that ``tokens`` tokens use if each draws its experts at random."""
        return self.experts * (1 - (1 - self.top_k / self.experts) ** tokens)


@dataclass(frozen=True, slots=True)
class Table:
    """Tilings by number of tokens, ascending."""

    tokens: tuple[int, ...]
    tilings: tuple[Tiling, ...]

    def at(self, tokens: int) -> Tiling:
        """The entry closest to ``tokens`` as a ratio."""
        after = bisect_left(self.tokens, tokens)
        near = range(max(0, after - 1), min(len(self.tokens), after + 1))
        return self.tilings[min(near, key=lambda i: abs(math.log(self.tokens[i] / tokens)))]


def tiling_at(geometry: Geometry, tokens: int, table: Table | None) -> Tiling:
    """The tiling for ``tokens`` tokens (at least 1)."""
    return default_tiling(geometry, tokens) if table is None else table.at(tokens)


def load_table(geometry: Geometry, folders: tuple[Path, ...]) -> Table | None:
    """The table of this geometry from the first folder that has one. Raises ValueError that names the file if it is
    unusable.
    """
    for folder in folders:
        path = folder / geometry.file_name
        if path.is_file():
            try:
                return _parse(json.loads(path.read_text(encoding="utf-8")))
            except (KeyError, TypeError, ValueError) as error:
                raise ValueError(f"{path} is not a tile table: {error}") from error
    return None


def dump_table(tilings: Mapping[int, Tiling], **facts: Any) -> str:
    """The text of a table file; ``facts`` state the origin of its numbers."""
    entries = [
        {
            "tokens": tokens,
            "kind": "grouped" if tiling.grouped else "pairs",
            "up": tiling.up._asdict(),
            "down": tiling.down._asdict(),
        }
        for tokens, tiling in sorted(tilings.items())
    ]
    return json.dumps({"format": _FORMAT, **facts, "entries": entries}, indent=1) + "\n"


def _parse(data: Any) -> Table:
    if data["format"] != _FORMAT:
        raise ValueError(f"format {data['format']!r}, this version reads {_FORMAT}")
    entries = sorted(data["entries"], key=lambda entry: int(entry["tokens"]))
    if not entries:
        raise ValueError("it has no entries")
    tilings = tuple(_tiling(entry) for entry in entries)
    return Table(tuple(int(entry["tokens"]) for entry in entries), tilings)


def _tiling(entry: Mapping[str, Any]) -> Tiling:
    if entry["kind"] not in ("pairs", "grouped"):
        raise ValueError(f"kind {entry['kind']!r}, known are 'grouped' and 'pairs'")
    tiling = Tiling(entry["kind"] == "grouped", Tile(**entry["up"]), Tile(**entry["down"]))
    for tile in tiling[1:]:
        _check(tile, tiling.grouped)
    if tiling.up.block_m != tiling.down.block_m:
        raise ValueError(f"both products share blocks, got block_m {tiling.up.block_m} and {tiling.down.block_m}")
    return tiling


def _check(tile: Tile, grouped: bool) -> None:
    least = Tile(16, 16, 16, 1, 1, 1, 0, 0) if grouped else Tile(1, 2, 16, 1, 1, 1, 0, 0)
    most = Tile(128 if grouped else 1, 512, 2048, 64, 16, 8, 1, 1)
    for name, value, low, high in zip(Tile._fields, tile, least, most, strict=True):
        if type(value) is not int or not low <= value <= high:
            raise ValueError(f"{name} is {value!r}, wanted an integer from {low} to {high}")
    for name in ("block_m", "block_n", "block_k", "warps"):
        if (value := getattr(tile, name)).bit_count() != 1:
            raise ValueError(f"{name} is {value}, wanted a power of two")


def default_tiling(geometry: Geometry, tokens: int) -> Tiling:
    """A tiling without measurements.

    Few tokens are bound by reading each used expert once: pairs, as long as they read hardly more than that, then the
    narrowest blocks and deep prefetching. Many tokens are bound by arithmetic: blocks as large as registers allow.
    """
    touched = geometry.touched(tokens)
    pairs = tokens * geometry.top_k
    few = pairs <= 1.15 * touched
    if not geometry.arch:  # the interpreter takes milliseconds per program, whatever its size
        tile = Tile(1 if few else 16, 256, 128)
        return Tiling(not few, tile, tile)
    if few:
        return Tiling(False, Tile(1, 8, 512), Tile(1, 4, 512))
    rows = pairs / touched
    if geometry.dtype == "float32":
        tile = Tile(16 if rows <= 16 else 32, 64, 32, stages=2)
    elif rows <= 12:
        tile = Tile(16, 128, 64, group_m=1, stages=4)
    elif rows <= 24:
        tile = Tile(32, 128, 64, group_m=4, stages=4)
    elif rows <= 96:
        tile = Tile(64, 128, 64, stages=4)
    elif geometry.arch in (90, 100, 103):
        tile = Tile(128, 256, 64, warps=8)
    else:
        tile = Tile(128, 128, 32, warps=8)
    return Tiling(True, tile, tile)
