"""The simulator finds what could be wrong with the KV kernels: each fault is planted in a copy of their sources."""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minisgl_cpu_sim.cuda_sim import SimulatedFault, SimulatedProgram
from minisgl_cuda.kv_build import CSRC
from minisgl_cuda.kv_cpp.launch import INDEX, STORE

BYTES16 = "minisgl::Bytes16"


@dataclass(frozen=True)
class Plant:
    """``right`` in ``file`` becomes ``wrong``; what is compiled lives in namespace ``name``."""

    name: str
    file: str
    right: str
    wrong: str
    unit: str

    @property
    def kernel(self) -> str:
        return f"{self.name}::{Path(self.file).stem}<{self.unit}>"


PLANTS = {
    plant.name: plant
    for plant in (
        Plant("one_row_too_many", "kv_store.cuh", "token >= args.tokens", "token > args.tokens", BYTES16),
        Plant("no_tail_mask", "kv_store.cuh", "i < args.row_units", "i < (args.row_units + 31) / 32 * 32", BYTES16),
        Plant("narrow_offset", "kv_store.cuh", "slot * args.v_slot_bytes", "int(slot * args.v_slot_bytes)", BYTES16),
        Plant("no_lower_bound", "kv_index.cuh", "row >= 0 && row", "row", BYTES16),
        Plant("one_id_too_many", "kv_index.cuh", "row < args.rows;", "row <= args.rows;", BYTES16),
    )
}


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> SimulatedProgram:
    folder = tmp_path_factory.mktemp("planted")
    sources = []
    for plant in PLANTS.values():
        text = (CSRC / plant.file).read_text()
        assert text.count(plant.right) == 1, f"{plant.name}: {plant.right!r} is no longer in {plant.file}"
        text = text.replace(plant.right, plant.wrong).replace("#pragma once\n", "")
        text = text.replace("namespace minisgl {", f"namespace {plant.name} {{ using namespace minisgl;")
        sources.append(folder / f"{plant.name}.cuh")
        sources[-1].write_text(text)
    sources += [CSRC / "kv_store.cuh", CSRC / "kv_index.cuh"]
    whole = [f"minisgl::{kernel}<{unit}>" for kernel in ("kv_store", "kv_index") for unit in (BYTES16, "uint32_t")]
    return SimulatedProgram(sources, [*(plant.kernel for plant in PLANTS.values()), *whole], include_dirs=[CSRC])


def store_args(tokens: int = 9, row_bytes: int = 480, unit: int = 16, slots: int = 12) -> dict[str, Any]:
    random = np.random.default_rng(0)
    cache = np.zeros((2, slots, row_bytes), np.uint8)
    rows = random.integers(0, 256, (tokens, 3, row_bytes), dtype=np.uint8)  # k and v lie in wider rows
    out_loc = random.permutation(slots)[:tokens].astype(np.int32)
    steps = (row_bytes, row_bytes, 3 * row_bytes, 3 * row_bytes)
    values = (cache[0], cache[1], rows[:, 0], rows[:, 2], out_loc, *steps, row_bytes // unit, tokens)
    return dict(zip(STORE.fields, values, strict=True))


def index_args(ids: list[int], row_bytes: int = 480, unit: int = 16) -> dict[str, Any]:
    table = np.random.default_rng(0).integers(0, 256, (10, row_bytes), dtype=np.uint8)
    out = np.ones((len(ids), row_bytes), np.uint8)
    values = (out, table, np.array(ids, np.int32), 100, 10, row_bytes, row_bytes // unit, len(ids))
    return dict(zip(INDEX.fields, values, strict=True))


def fault_of(program: SimulatedProgram, kernel: str, args: dict[str, Any], grid: int = 3) -> SimulatedFault:
    with pytest.raises(SimulatedFault) as raised:
        program.launch(kernel, grid, (32, 4), args)
    return raised.value


def test_the_kernels_as_they_are_have_none_of_these_faults(program: SimulatedProgram) -> None:
    args = store_args()
    program.launch(f"minisgl::kv_store<{BYTES16}>", 3, (32, 4), args)
    assert np.array_equal(args["k_cache"][args["out_loc"]], args["k"])
    assert np.array_equal(args["v_cache"][args["out_loc"]], args["v"])
    args = index_args([100, 109, 110, 99, 2**31 - 1])
    program.launch(f"minisgl::kv_index<{BYTES16}>", 2, (32, 4), args)
    assert np.array_equal(args["out"][:2], args["table"][[0, 9]]) and not args["out"][2:].any()


def test_an_off_by_one_row(program: SimulatedProgram) -> None:
    fault = fault_of(program, PLANTS["one_row_too_many"].kernel, store_args())
    assert (fault.kind, fault.buffer, fault.offset, fault.extent) == ("out-of-bounds", "out_loc", 36, 36)
    assert fault.where.block == (2, 0, 0) and fault.where.thread == (0, 1, 0)
    assert "0 bytes past the end of `out_loc`" in str(fault) and "one_row_too_many.cuh:" in fault.source


def test_a_missing_tail_mask(program: SimulatedProgram) -> None:
    fault = fault_of(program, PLANTS["no_tail_mask"].kernel, store_args())  # 30 units, 32 lanes
    assert (fault.kind, fault.buffer, fault.offset) == ("out-of-bounds", "k", 480)
    assert "in a gap between its rows" in str(fault)


def test_a_missing_tail_mask_behind_the_last_row(program: SimulatedProgram) -> None:
    fault = fault_of(program, PLANTS["no_tail_mask"].kernel, store_args(tokens=1), grid=1)
    assert (fault.kind, fault.buffer, fault.offset, fault.extent) == ("out-of-bounds", "k", 480, 480)


def test_vectors_on_rows_that_are_no_multiple_of_them(program: SimulatedProgram) -> None:
    args = store_args(row_bytes=24)
    fault = fault_of(program, f"minisgl::kv_store<{BYTES16}>", args)
    assert (fault.kind, fault.size) == ("misaligned", 16) and fault.offset % 16 == 8
    program.launch("minisgl::kv_store<uint32_t>", 3, (32, 4), store_args(row_bytes=24, unit=4))


def test_a_32_bit_offset_into_a_large_pool(program: SimulatedProgram) -> None:
    slots, row_bytes = 2_200_000, 2048
    args = store_args(tokens=1, row_bytes=row_bytes)
    maps = [mmap.mmap(-1, slots * row_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000) for _ in range(2)]
    args["k_cache"], args["v_cache"] = (np.frombuffer(m, np.uint8).reshape(slots, row_bytes) for m in maps)
    args["out_loc"] = np.array([slots - 1], np.int32)
    program.launch(f"minisgl::kv_store<{BYTES16}>", 1, (32, 1), args)
    assert np.array_equal(args["v_cache"][-1], args["v"][0]) and not args["v_cache"][0].any()
    args["out_loc"] = np.array([1_500_000], np.int32)  # 3 GB from the begin: negative as int
    fault = fault_of(program, PLANTS["narrow_offset"].kernel, args, grid=1)
    assert (fault.kind, fault.access, fault.size) == ("out-of-bounds", "write", 16)


def test_two_blocks_that_write_one_slot(program: SimulatedProgram) -> None:
    args = store_args()
    args["out_loc"][8] = args["out_loc"][0]
    fault = fault_of(program, f"minisgl::kv_store<{BYTES16}>", args)
    assert (fault.kind, fault.access, fault.buffer) == ("race", "write", "k_cache")
    assert fault.offset == args["out_loc"][0] * 480
    assert fault.where.block == (2, 0, 0) and fault.other is not None and fault.other.block == (0, 0, 0)


def test_padding_rows_may_share_the_dummy_slot(program: SimulatedProgram) -> None:
    args = store_args()
    args["out_loc"][6:] = 11
    args["out_loc"][:6] = range(6)
    dummy = range(11 * 480, 12 * 480)
    program.launch(f"minisgl::kv_store<{BYTES16}>", 3, (32, 4), args, unordered={"k_cache": dummy, "v_cache": dummy})
    assert np.array_equal(args["k_cache"][:6], args["k"][:6])


def test_an_id_before_the_part(program: SimulatedProgram) -> None:
    fault = fault_of(program, PLANTS["no_lower_bound"].kernel, index_args([100, 98]), grid=1)
    assert (fault.kind, fault.buffer, fault.offset) == ("out-of-bounds", "table", -960)
    assert "960 bytes before `table`" in str(fault)


def test_an_id_just_behind_the_part(program: SimulatedProgram) -> None:
    fault = fault_of(program, PLANTS["one_id_too_many"].kernel, index_args([109, 110]), grid=1)
    assert (fault.kind, fault.buffer, fault.offset, fault.extent) == ("out-of-bounds", "table", 4800, 4800)
