"""Which tiles are used: tables are read strictly, the guess is sound for any geometry."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minisgl_moe import tiles
from minisgl_moe.tiles import SHIPPED, Geometry, Tile, Tiling, default_tiling, dump_table, load_table, tiling_at

QWEN3 = Geometry(90, "bfloat16", experts=128, top_k=8, inner=768, hidden=2048)
SMALL = Tiling(True, Tile(16, 64, 64), Tile(16, 128, 64))
LARGE = Tiling(True, Tile(128, 256, 64, warps=8, tma=1), Tile(128, 128, 64, warps=8))
ONE = Tiling(False, Tile(1, 8, 512), Tile(1, 4, 1024))


def write(folder: Path, text: str) -> None:
    (folder / QWEN3.file_name).write_text(text)


def test_a_table_reads_back_and_the_nearest_ratio_counts(tmp_path: Path) -> None:
    write(tmp_path, dump_table({512: LARGE, 1: ONE, 8: SMALL}, device="some"))
    table = load_table(QWEN3, (tmp_path,))
    assert table is not None
    assert [tiling_at(QWEN3, tokens, table) for tokens in (1, 2, 3, 8, 63, 65, 10**6)] == [
        ONE, ONE, SMALL, SMALL, SMALL, LARGE, LARGE
    ]  # fmt: skip


def test_the_first_folder_wins_and_another_geometry_has_no_table(tmp_path: Path) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    for folder, tiling in ((first, SMALL), (second, LARGE)):
        folder.mkdir()
        write(folder, dump_table({1: tiling}))
    table = load_table(QWEN3, (first, second))
    assert table is not None and table.at(1) == SMALL
    assert load_table(Geometry(80, "bfloat16", 128, 8, 768, 2048), (first, second)) is None


def entry(**changes: Any) -> str:
    data = json.loads(dump_table({1: SMALL}))
    data["entries"][0].update(changes)
    return json.dumps(data)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not a tile table"),
        ("[]", "is not a tile table"),
        ('{"format": 2, "entries": []}', "format 2, this version reads 1"),
        ('{"format": 1, "entries": []}', "no entries"),
        (entry(kind="other"), "kind 'other'"),
        (entry(up={**SMALL.up._asdict(), "block_m": 48}), "block_m is 48, wanted a power of two"),
        (entry(up={**SMALL.up._asdict(), "block_m": 32}), "block_m 32 and 16"),
        (entry(up={**SMALL.up._asdict(), "block_m": 256}), "from 16 to 128"),
        (entry(up={**SMALL.up._asdict(), "warps": "4"}), "warps is '4'"),
        (entry(up={**SMALL.up._asdict(), "wraps": 4}), "wraps"),
        (entry(kind="pairs"), "block_m is 16, wanted an integer from 1 to 1"),
    ],
)
def test_a_table_that_cannot_be_used_is_named(tmp_path: Path, text: str, message: str) -> None:
    write(tmp_path, text)
    with pytest.raises(ValueError, match="is not a tile table") as raised:
        load_table(QWEN3, (tmp_path,))
    assert QWEN3.file_name in str(raised.value) and message in str(raised.value)


def test_every_shipped_table_is_readable() -> None:
    for path in SHIPPED.glob("*.json"):
        arch, dtype, *numbers = path.stem.split("-")
        experts, top_k, inner, hidden = (int(number[1:]) for number in numbers)
        geometry = Geometry(int(arch.removeprefix("sm")), dtype, experts, top_k, inner, hidden)
        assert geometry.file_name == path.name
        assert load_table(geometry, (SHIPPED,)) is not None


@given(
    arch=st.sampled_from([0, 80, 86, 89, 90, 100, 120]),
    dtype=st.sampled_from(["bfloat16", "float32"]),
    experts=st.integers(1, 300),
    top_k=st.integers(1, 8),
    tokens=st.integers(1, 20000),
)
def test_the_guess_passes_the_tables_own_checks(arch: int, dtype: str, experts: int, top_k: int, tokens: int) -> None:
    geometry = Geometry(arch, dtype, experts, min(top_k, experts), 768, 2048)
    tiling = default_tiling(geometry, tokens)
    data = json.loads(dump_table({tokens: tiling}))
    assert tiles._parse(data).at(tokens) == tiling
    size = 4 if dtype == "float32" else 2
    for tile in tiling[1:]:  # shared memory of the smallest devices, 99 KiB; of the large ones, 227
        needed = (tile.block_m + tile.block_n) * tile.block_k * size * tile.stages
        assert not tiling.grouped or not arch or needed <= (227 if arch in (90, 100) else 99) * 1024


def test_the_guess_for_one_token_sorts_nothing_and_for_many_fills_blocks() -> None:
    assert not default_tiling(QWEN3, 1).grouped
    assert default_tiling(QWEN3, 64).up.block_m == 16
    assert default_tiling(QWEN3, 256).up.block_m == 32
    assert default_tiling(QWEN3, 8192).up.block_m == 128
