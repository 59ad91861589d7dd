"""Clusters in the CUDA simulator: right kernels run, and each of these planted faults is found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minisgl_cpu_sim.cuda_sim import CompileError, SimulatedFault, SimulatedProgram, simulate

SOURCE = Path(__file__).with_name("clusters.cu")

KERNELS = (
    "places",
    "sum<true>",
    "sum<false>",
    "ring",
    "rounds<true>",
    "rounds<false>",
    "by_others<true>",
    "by_others<false>",
    "between_steps<false, false>",
    "between_steps<true, false>",
    "between_steps<false, true>",
    "release_by_others",
    "through_global<true>",
    "through_global<false>",
    "ended<0, true>",
    "ended<0, false>",
    "ended<1, true>",
    "ended<1, false>",
    "beside<true, 0>",
    "beside<true, 1>",
    "beside<false, 0>",
    "beside<false, 1>",
    "two_writers",
    "unwritten",
    "leaves",
    "half_stays",
    "arrives_twice",
    "never_arrives",
    "store_at<float>",
    "store_at<Bytes16>",
    "store_at_global",
)


@pytest.fixture(scope="module")
def program() -> SimulatedProgram:
    return SimulatedProgram([SOURCE], KERNELS)


def line_of(text: str) -> str:
    lines = [number for number, line in enumerate(SOURCE.read_text().splitlines(), 1) if text in line]
    assert len(lines) == 1, text
    return f"clusters.cu:{lines[0]}"


def fault_of(
    program: SimulatedProgram, kernel: str, *args: Any, grid: int = 2, block: int = 64, cluster: int = 2
) -> SimulatedFault:
    with pytest.raises(SimulatedFault) as raised:
        program.launch(kernel, grid, block, {f"argument {i}": arg for i, arg in enumerate(args)}, cluster=cluster)
    return raised.value


def floats(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.float32)


@pytest.mark.parametrize("cluster", [1, 2, 3, 6])
def test_clusters_are_neighbours_along_x(program: SimulatedProgram, cluster: int) -> None:
    ranks, sizes = np.zeros((2, 6), np.int32), np.zeros((2, 6), np.int32)
    program.launch("places", (6, 2), 1, {"ranks": ranks, "sizes": sizes}, cluster=cluster)
    assert np.array_equal(ranks, [np.arange(6) % cluster] * 2)
    assert np.array_equal(sizes, np.full((2, 6), cluster))


@pytest.mark.parametrize(("cluster", "block"), [(1, 64), (2, 40), (4, 64), (16, 16)])
def test_one_block_gathers_what_the_others_hold(program: SimulatedProgram, cluster: int, block: int) -> None:
    x, out = np.arange(3 * cluster * block, dtype=np.float32), floats(3)
    program.launch("sum<true>", 3 * cluster, block, {"out": out, "in": x}, cluster=cluster)
    assert np.array_equal(out, x.reshape(3, -1).sum(1))


def test_vectors_and_dynamic_shared_memory(program: SimulatedProgram) -> None:
    out = floats(6, 32)
    program.launch("ring", 6, 32, {"out": out}, shared_bytes=512, cluster=3)
    from_block = np.array([2, 0, 1, 5, 3, 4])
    assert np.array_equal(out, 100 * from_block[:, None] + np.arange(32) + 0.5)


def test_a_place_is_used_again_after_a_barrier(program: SimulatedProgram) -> None:
    out = floats(3, 4, 32)
    program.launch("rounds<true>", 4, 32, {"out": out}, cluster=4)
    expected = 10 * np.arange(3)[:, None] + [3, 0, 1, 2]
    assert np.array_equal(out, np.broadcast_to(expected[:, :, None], out.shape))
    fault = fault_of(program, "rounds<false>", floats(3, 4, 32), grid=4, block=32, cluster=4)
    assert (fault.kind, fault.access, fault.buffer) in {("race", "write", "place"), ("race", "read", "place")}


@pytest.mark.parametrize(("warp", "block"), [("true", 32), ("false", 64)])
def test_narrower_barriers_pass_on_what_a_clusters_barrier_told(
    program: SimulatedProgram, warp: str, block: int
) -> None:
    out = floats(2, block)
    program.launch(f"by_others<{warp}>", 2, block, {"out": out}, cluster=2)
    assert np.array_equal(out, [np.arange(block)] * 2)


def test_an_arrival_tells_of_what_lies_before_a_blocks_barrier(program: SimulatedProgram) -> None:
    seen = np.zeros(1, np.int32)
    program.launch("release_by_others", 2, 64, {"data": np.zeros(1, np.int32), "out": seen}, cluster=2)
    assert seen[0] == 5


def test_a_store_after_the_arrival_and_a_read_before_the_wait(program: SimulatedProgram) -> None:
    out = floats(2, 64)
    program.launch("between_steps<false, false>", 2, 64, {"out": out}, cluster=2)
    assert np.array_equal(out, np.full((2, 64), 2))
    for kernel in ("between_steps<true, false>", "between_steps<false, true>"):
        fault = fault_of(program, kernel, out)
        assert (fault.kind, fault.buffer) == ("race", "place")


def test_a_clusters_barrier_orders_global_memory_and_a_blocks_does_not(program: SimulatedProgram) -> None:
    out = floats(4, 32)
    program.launch("through_global<true>", 4, 32, {"data": floats(4, 32), "out": out}, cluster=2)
    assert np.array_equal(out, np.repeat([[1], [0], [3], [2]], 32, 1))
    fault = fault_of(program, "through_global<false>", floats(2, 32), out, block=32)
    assert (fault.kind, fault.buffer) == ("race", "argument 0")
    apart = fault_of(program, "through_global<true>", floats(2, 32), out, block=32, cluster=1)
    assert apart.kind == "race", "the barrier of another cluster orders nothing"


def test_a_store_before_all_blocks_have_started(program: SimulatedProgram) -> None:
    fault = fault_of(program, "sum<false>", floats(1), floats(128))
    assert fault.kind == "remote-store" and fault.where.block == (1, 0, 0)
    assert str(fault).startswith("remote store to `parts` of block (0, 0, 0), which may have not started yet")
    assert fault.source == line_of("store_remote(&parts")


@pytest.mark.parametrize("writer", [0, 1])
@pytest.mark.parametrize("later", ["true", "false"])
def test_a_store_to_a_block_that_may_have_ended(program: SimulatedProgram, writer: int, later: str) -> None:
    fault = fault_of(program, f"ended<{writer}, {later}>")
    assert fault.kind == "remote-store" and fault.where.block == (writer, 0, 0)
    assert f"to `place` of block ({1 - writer}, 0, 0), which may have ended" in str(fault)
    assert fault.source == line_of("store_remote(place, next(), 4.0f)")


@pytest.mark.parametrize("writer", [0, 1])
@pytest.mark.parametrize("reads", ["true", "false"])
def test_a_store_beside_the_blocks_own_use(program: SimulatedProgram, reads: str, writer: int) -> None:
    fault = fault_of(program, f"beside<{reads}, {writer}>", floats(1))
    assert (fault.kind, fault.buffer, fault.offset) == ("race", "place", 0)
    assert fault.other is not None and {fault.where.block[0], fault.other.block[0]} == {0, 1}


def test_two_blocks_that_store_to_one_place(program: SimulatedProgram) -> None:
    fault = fault_of(program, "two_writers")
    assert (fault.kind, fault.buffer, fault.access) == ("race", "place", "write")


def test_a_place_that_no_block_wrote(program: SimulatedProgram) -> None:
    fault = fault_of(program, "unwritten", floats(1))
    assert (fault.kind, fault.buffer, fault.offset) == ("uninitialised", "place", 4)


@pytest.mark.parametrize(("rank", "thread"), [(0, 0), (1, 0), (1, 40)])
def test_a_thread_that_leaves_before_a_clusters_barrier(program: SimulatedProgram, rank: int, thread: int) -> None:
    fault = fault_of(program, "leaves", rank, thread)
    assert fault.kind == "divergence" and fault.source == line_of("cluster_wait();  // of all")
    assert "waits at a cluster barrier in line" in str(fault)
    assert f"thread ({thread}, 0, 0) of block ({rank}, 0, 0) has ended" in str(fault)


def test_the_narrowest_wait_is_named(program: SimulatedProgram) -> None:
    fault = fault_of(program, "half_stays", floats(1))
    assert fault.kind == "divergence"
    assert fault.detail.startswith("thread (0, 0, 0) of block (0, 0, 0) waits at a block barrier")
    assert "thread (16, 0, 0) of block (0, 0, 0) waits at a cluster barrier" in fault.detail


@pytest.mark.parametrize(
    ("kernel", "text", "line"),
    [
        ("arrives_twice", "arrives again at a cluster barrier", "cluster_arrive();  // again"),
        ("never_arrives", "at which it has not arrived", "__global__ void never_arrives"),
    ],
)
def test_steps_of_a_barrier_out_of_turn(program: SimulatedProgram, kernel: str, text: str, line: str) -> None:
    fault = fault_of(program, kernel)
    assert fault.kind == "divergence" and text in str(fault) and fault.source == line_of(line)


@pytest.mark.parametrize(
    ("unit", "index", "kind", "offset"),
    [
        ("float", 32, "out-of-bounds", 128),
        ("float", -1, "out-of-bounds", -4),
        ("Bytes16", 126, "out-of-bounds", 504),
        ("Bytes16", 2, "misaligned", 8),
    ],
)
def test_a_store_is_held_to_the_array(program: SimulatedProgram, unit: str, index: int, kind: str, offset: int) -> None:
    fault = fault_of(program, f"store_at<{unit}>", index, 1)
    assert (fault.kind, fault.access, fault.buffer, fault.offset) == (kind, "write", "place", offset)
    assert fault.source == line_of("if (threadIdx.x == 0) store_remote(reinterpret_cast")


def test_a_store_to_no_place_of_the_cluster(program: SimulatedProgram) -> None:
    assert "remote store to rank 2 of a cluster of 2" in str(fault_of(program, "store_at<float>", 0, 2))
    assert "not in shared memory" in str(fault_of(program, "store_at_global", floats(1)))


@pytest.mark.parametrize(
    ("grid", "cluster", "text"),
    [
        (4, 0, "cluster is 0; 1 to 16 blocks are possible"),
        (32, 17, "cluster is 17"),
        ((6, 4), 4, r"grid is \(6, 4\): its 6 blocks along x cannot be cut into clusters of 4"),
    ],
)
def test_clusters_that_no_gpu_has(program: SimulatedProgram, grid: Any, cluster: int, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        program.launch("arrives_twice", grid, 1, {}, cluster=cluster)


def test_only_what_the_gpus_header_stores_is_stored(tmp_path: Any) -> None:
    source = tmp_path / "wide.cu"
    source.write_text(
        "#include <minisgl/device.h>\n"
        "__global__ void wide() { MINISGL_SHARED(int, x, 1); minisgl::store_remote(x, 0, 1); }\n"
    )
    with pytest.raises(CompileError, match="these two"):
        simulate([source], "wide", 1, 1, {}, cluster=1)
