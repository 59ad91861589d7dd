"""The CUDA simulator: right kernels run, wrong ones are reported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from minisgl_cpu_sim.cuda_sim import CompileError, SimulatedFault, SimulatedProgram, simulate
from minisgl_cpu_sim.cuda_sim.memory import extent_of

SOURCE = """
#include <minisgl/device.h>

template <class T>
__global__ void scale(T* __restrict__ x, T factor, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) x[i] *= factor;
}

struct Pair { const int64_t* from; int64_t* to; int64_t count; };

__global__ void __launch_bounds__(64) by_struct(const Pair pair) {
    for (int64_t i = threadIdx.x; i < pair.count; i += blockDim.x) pair.to[i] = pair.from[i] + 1;
}

__global__ void positions(int* out) {
    const int block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
    const int thread = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
    out[block * blockDim.x * blockDim.y * blockDim.z + thread] = 100 * block + thread;
}

// Sum of 64 values: two warps, then shared memory.
template <bool BARRIER>
__global__ void sum(float* out, const float* in) {
    MINISGL_SHARED(float, parts, 2);
    float value = in[threadIdx.x];
    for (int d = 16; d > 0; d /= 2) value += __shfl_xor_sync(0xffffffff, value, d);
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = value;
    if (BARRIER) __syncthreads();
    if (threadIdx.x == 0) out[0] = parts[0] + parts[1];
}

__global__ void shuffles(int* out) {
    const int lane = threadIdx.x;
    out[lane] = __shfl_sync(0xffffffff, lane, 3);
    out[32 + lane] = __shfl_down_sync(0xffffffff, lane, 1);
    out[64 + lane] = __shfl_up_sync(0xffffffff, lane, 2);
    out[96 + lane] = __shfl_xor_sync(0xffffffff, lane, 4, 8);
    out[128 + lane] = int(__ballot_sync(0xffffffff, lane % 2));
    out[160 + lane] = __any_sync(0xffffffff, lane == 7) * 10 + __all_sync(0xffffffff, lane < 32);
}

// Each lane passes a value to the next lane through shared memory.
template <bool BARRIER>
__global__ void next_lane(int* out) {
    MINISGL_SHARED(int, values, 32);
    values[threadIdx.x] = threadIdx.x;
    if (BARRIER) __syncwarp();
    out[threadIdx.x] = values[(threadIdx.x + 1) % 32];
}

__global__ void by_shuffle(int* out) {
    MINISGL_SHARED(int, values, 32);
    values[threadIdx.x] = threadIdx.x;
    __shfl_sync(0xffffffff, 0, 0);  // orders no memory
    out[threadIdx.x] = values[(threadIdx.x + 1) % 32];
}

__global__ void reused(int* out) {
    MINISGL_SHARED(int, value, 1);
    for (int round = 0; round < 3; ++round) {
        if (threadIdx.x == round) value[0] = 10 * round;
        __syncthreads();
        out[round * blockDim.x + threadIdx.x] = value[0];
        SECOND_BARRIER;
    }
}

__global__ void reversed(int* out, int reach) {
    MINISGL_DYNAMIC_SHARED(int, values);
    values[threadIdx.x] = threadIdx.x;
    __syncthreads();
    out[threadIdx.x] = values[reach - threadIdx.x];
}

__global__ void count(int* total, int* plain) {
    atomicAdd(total, 1);
    if (plain != nullptr) plain[0] = atomicMax(total, 0);
}

__global__ void atomic_and_plain(int* total) {
    if (blockIdx.x == 0) atomicAdd(total, 1);
    else total[0] = 5;
}

__global__ void read_and_write(int* x) {
    if (threadIdx.x == 40) x[1] = x[0];
    if (threadIdx.x == 3) x[0] = 1;
}

__global__ void early_exit(int n) {
    if (threadIdx.x >= n) return;
    __syncthreads();
}

__global__ void two_barriers(int n) {
    if (threadIdx.x < n)
        __syncthreads();
    else
        __syncthreads();
}

__global__ void half_a_warp(int* out, int mask) {
    if (threadIdx.x < 16) out[threadIdx.x] = __shfl_xor_sync(unsigned(mask), int(threadIdx.x), 1);
}

__global__ void outside_its_mask(int* out) {
    if (threadIdx.x < 16) out[threadIdx.x] = __shfl_sync(0xffff, int(threadIdx.x), 20);
}

struct alignas(16) Four { float x, y, z, w; };

__global__ void vectors(float* to, const float* from) {
    reinterpret_cast<Four*>(to)[threadIdx.x] = reinterpret_cast<const Four*>(from)[threadIdx.x];
}

__constant__ int TABLE[4] = {3, 1, 4, 1};

__global__ void table(int* out) {
    int local[4];
    for (int i = 0; i < 4; ++i) local[(i + threadIdx.x) % 4] = TABLE[i];
    out[threadIdx.x] = local[threadIdx.x % 4];
}

__global__ void spin(const int* flag) {
    while (*const_cast<volatile const int*>(flag) == 0) {}
}

__global__ void too_much() {
    MINISGL_SHARED(char, large, 300 * 1024);
    large[threadIdx.x] = 0;
}
"""

KERNELS = (
    "scale<float>",
    "scale<double>",
    "scale<int>",
    "by_struct",
    "positions",
    "sum<true>",
    "sum<false>",
    "shuffles",
    "next_lane<true>",
    "next_lane<false>",
    "by_shuffle",
    "reused",
    "reversed",
    "count",
    "atomic_and_plain",
    "read_and_write",
    "early_exit",
    "two_barriers",
    "half_a_warp",
    "outside_its_mask",
    "vectors",
    "table",
    "spin",
    "too_much",
    "racy::reused",
)


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> SimulatedProgram:
    source = tmp_path_factory.mktemp("cuda_sim") / "kernels.cu"
    reused = SOURCE[SOURCE.index("__global__ void reused") : SOURCE.index("__global__ void reversed")]
    whole = SOURCE.replace("SECOND_BARRIER", "__syncthreads()")
    source.write_text(f"{whole}\nnamespace racy {{ {reused.replace('SECOND_BARRIER', '')} }}\n")
    return SimulatedProgram([source], KERNELS)


def line_of(text: str) -> str:
    return f"kernels.cu:{SOURCE[: SOURCE.index(text)].count(chr(10)) + 1}"


def fault_of(program: SimulatedProgram, kernel: str, grid: Any, block: Any, **args: Any) -> SimulatedFault:
    with pytest.raises(SimulatedFault) as raised:
        program.launch(kernel, grid, block, args)
    return raised.value


@pytest.mark.parametrize(("kernel", "dtype", "factor"), [("float", np.float32, 2.5), ("double", float, 0.5)])
def test_arrays_and_numbers_are_passed_as_the_parameters_type(
    program: SimulatedProgram, kernel: str, dtype: Any, factor: float
) -> None:
    x = np.arange(100, dtype=dtype)
    program.launch(f"scale<{kernel}>", 4, 32, {"x": x, "factor": factor, "n": 100})
    assert np.array_equal(x, np.arange(100) * factor)


def test_torch_tensors_and_integers(program: SimulatedProgram) -> None:
    x = torch.arange(100, dtype=torch.int32)
    program.launch("scale<int>", 1, 128, {"x": x, "factor": -3, "n": 100})
    assert torch.equal(x, -3 * torch.arange(100, dtype=torch.int32))


def test_a_struct_takes_an_argument_for_each_field(program: SimulatedProgram) -> None:
    given, taken = np.arange(70), np.zeros(70, np.int64)
    program.launch("by_struct", 1, 64, {"from": given, "to": taken, "count": 70})
    assert np.array_equal(taken, given + 1)


def test_every_thread_of_a_grid_runs_once(program: SimulatedProgram) -> None:
    out = np.zeros((12, 30), np.int32)
    program.launch("positions", (2, 3, 2), (5, 3, 2), {"out": out})
    assert np.array_equal(out, 100 * np.arange(12)[:, None] + np.arange(30))


def test_warps_and_shared_memory(program: SimulatedProgram) -> None:
    x, out = np.arange(64, dtype=np.float32), np.zeros(1, np.float32)
    program.launch("sum<true>", 1, 64, {"out": out, "in": x})
    assert out[0] == 2016


def test_shuffles_and_votes(program: SimulatedProgram) -> None:
    out = np.zeros((6, 32), np.int32)
    program.launch("shuffles", 1, 32, {"out": out})
    lanes = np.arange(32)
    assert np.array_equal(out[0], np.full(32, 3))
    assert np.array_equal(out[1], np.minimum(lanes + 1, 31))
    assert np.array_equal(out[2], np.where(lanes >= 2, lanes - 2, lanes))
    assert np.array_equal(out[3], lanes ^ 4)
    assert np.array_equal(out[4].view(np.uint32), np.full(32, 0xAAAAAAAA, np.uint32))
    assert np.array_equal(out[5], np.full(32, 11))


def test_dynamic_shared_memory_and_its_end(program: SimulatedProgram) -> None:
    out = np.zeros(8, np.int32)
    program.launch("reversed", 2, 8, {"out": out[:8], "reach": 7}, shared_bytes=32, unordered={"out": range(32)})
    assert np.array_equal(out, np.arange(8)[::-1])
    with pytest.raises(SimulatedFault) as raised:
        program.launch("reversed", 1, 8, {"out": out, "reach": 8}, shared_bytes=32)
    assert (raised.value.kind, raised.value.buffer, raised.value.offset) == (
        "out-of-bounds",
        "dynamic shared memory",
        32,
    )
    assert raised.value.source == line_of("values[reach")


def test_constants_and_local_arrays_are_nobodys_fault(program: SimulatedProgram) -> None:
    out = np.zeros(4, np.int32)
    program.launch("table", 1, 4, {"out": out})
    assert np.array_equal(out, [3, 3, 3, 3])


def test_a_missing_barrier_is_a_race(program: SimulatedProgram) -> None:
    fault = fault_of(program, "sum<false>", 1, 64, out=np.zeros(1, np.float32), x=np.ones(64, np.float32))
    assert fault.kind in ("race", "uninitialised") and fault.buffer == "parts" and fault.offset == 4
    assert fault.source == line_of("out[0] = parts[0]")


def test_a_missing_barrier_before_a_rewrite_is_a_race(program: SimulatedProgram) -> None:
    program.launch("reused", 1, 40, {"out": np.zeros(120, np.int32)})
    fault = fault_of(program, "racy::reused", 1, 40, out=np.zeros(120, np.int32))
    assert (fault.kind, fault.access, fault.buffer) == ("race", "write", "value")
    assert fault.where.thread == (1, 0, 0) and fault.other is not None and fault.other.thread != (1, 0, 0)


def test_a_warp_barrier_orders_a_warp_and_a_shuffle_does_not(program: SimulatedProgram) -> None:
    out = np.zeros(32, np.int32)
    program.launch("next_lane<true>", 1, 32, {"out": out})
    assert np.array_equal(out, (np.arange(32) + 1) % 32)
    for kernel in ("next_lane<false>", "by_shuffle"):
        fault = fault_of(program, kernel, 1, 32, out=out)
        assert fault.kind in ("race", "uninitialised") and fault.buffer == "values"


def test_a_read_that_a_later_write_may_overtake(program: SimulatedProgram) -> None:
    fault = fault_of(program, "read_and_write", 1, 64, x=np.zeros(2, np.int32))
    assert (fault.kind, fault.offset) == ("race", 0)
    assert {fault.where.thread, fault.other.thread if fault.other else None} == {(3, 0, 0), (40, 0, 0)}


def test_atomics_race_with_plain_accesses_only(program: SimulatedProgram) -> None:
    total = np.zeros(1, np.int32)
    program.launch("count", 3, 50, {"total": total, "plain": 0})
    assert total[0] == 150
    assert fault_of(program, "atomic_and_plain", 2, 1, total=total).kind == "race"
    assert fault_of(program, "count", 1, 2, total=total, plain=np.zeros(1, np.int32)).buffer == "plain"
    assert total[0] == 150, "a launch with a fault leaves the arrays as they were"


@pytest.mark.parametrize(
    ("kernel", "block", "args", "text"),
    [
        ("early_exit", 64, {"n": 40}, r"waits at a block barrier in line \d+, thread \(40, 0, 0\) has ended"),
        ("two_barriers", 64, {"n": 40}, "waits at a block barrier in line"),
        ("half_a_warp", 32, {"out": np.zeros(32, np.int32), "mask": 0xFFFFFFFF}, r"thread \(16, 0, 0\) has ended"),
        ("half_a_warp", 32, {"out": np.zeros(32, np.int32), "mask": 0xFFF}, "not in its own mask"),
        ("outside_its_mask", 32, {"out": np.zeros(32, np.int32)}, "reads a lane outside its mask"),
        ("sum<true>", 48, {"out": np.zeros(1, np.float32), "in": np.ones(48, np.float32)}, "do not exist"),
    ],
)
def test_barriers_that_not_all_reach(
    program: SimulatedProgram, kernel: str, block: int, args: dict[str, Any], text: str
) -> None:
    with pytest.raises(SimulatedFault, match=text) as raised:
        program.launch(kernel, 1, block, args)
    assert raised.value.kind == "divergence" and raised.value.source.startswith("kernels.cu:")


def test_half_a_warp_may_meet_alone(program: SimulatedProgram) -> None:
    out = np.zeros(16, np.int32)
    program.launch("half_a_warp", 1, 32, {"out": out, "mask": 0xFFFF})
    assert np.array_equal(out, np.arange(16) ^ 1)


def test_plain_vector_accesses_must_be_aligned(program: SimulatedProgram) -> None:
    memory = np.zeros(40, np.float32)
    start = -(memory.ctypes.data // 4) % 4  # the first multiple of 16 bytes
    good, bad, to = memory[start : start + 16], memory[start + 1 : start + 17], torch.zeros(16)
    program.launch("vectors", 1, 4, {"to": to, "from": good})
    fault = fault_of(program, "vectors", 1, 4, to=to, x=bad)
    assert (fault.kind, fault.access, fault.size, fault.buffer) == ("misaligned", "read", 16, "x")


def test_reads_between_the_rows_of_a_view_are_out_of_bounds(program: SimulatedProgram) -> None:
    wide = torch.zeros(4, 8, dtype=torch.int32)
    fault = fault_of(program, "scale<int>", 1, 32, x=wide[:, :6], factor=1, n=32)
    assert (fault.kind, fault.buffer, fault.offset) == ("out-of-bounds", "x", 24)


def test_two_views_of_one_tensor_stay_aliases(program: SimulatedProgram) -> None:
    wide = np.arange(8)
    program.launch("by_struct", 1, 1, {"from": wide[:7], "to": wide[1:], "count": 7})
    assert np.array_equal(wide, np.arange(8))  # each thread-ordered step reads what the last one wrote


def test_adjacent_memory_is_out_of_bounds(program: SimulatedProgram) -> None:
    both = np.zeros(20, np.int32)
    fault = fault_of(program, "scale<int>", 1, 32, x=both[:10], factor=1, n=11)
    assert (fault.kind, fault.offset, fault.extent) == ("out-of-bounds", 40, 40)


def test_a_thread_that_spins_is_stopped(program: SimulatedProgram) -> None:
    assert fault_of(program, "spin", 1, 1, flag=np.zeros(1, np.int32)).kind == "stuck"


def test_shared_memory_is_limited(program: SimulatedProgram) -> None:
    assert "232448 bytes" in str(fault_of(program, "too_much", 1, 32))


@pytest.mark.parametrize(
    ("grid", "block", "text"), [(0, 32, "grid is 0"), (1, 2048, "block is 2048"), (1, (32, 64), "2048 threads")]
)
def test_shapes_that_no_gpu_has(program: SimulatedProgram, grid: Any, block: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        program.launch("positions", grid, block, {"out": np.zeros(1, np.int32)})


def test_a_compile_error_shows_the_compilers_words(tmp_path: Path) -> None:
    source = tmp_path / "bad.cu"
    source.write_text("#include <minisgl/device.h>\n__global__ void bad(int* x) { x[0] = undeclared; }\n")
    with pytest.raises(CompileError, match="undeclared"):
        simulate([source], "bad", 1, 1, {"x": np.zeros(1, np.int32)})


@pytest.mark.parametrize(
    ("array", "extent"),
    [
        (np.zeros((3, 4), np.float32), (1, 48, 48)),
        (np.zeros((3, 8), np.float32)[:, :5], (3, 20, 32)),
        (np.zeros((2, 3, 8), np.int16)[:, :, 2:4], (6, 4, 16)),
        (np.zeros((2, 3, 8), np.int16)[:, :2, :4], (1, 72, 72)),
        (np.broadcast_to(np.zeros(4, np.int8), (5, 4)), (1, 4, 4)),
        (np.zeros((0, 4)), (0, 0, 8)),
        (torch.zeros(4, 6, dtype=torch.bfloat16).t(), (1, 48, 48)),
    ],
)
def test_extents(array: Any, extent: tuple[int, int, int]) -> None:
    found = extent_of(array)
    assert (found.rows, found.row_bytes, found.stride) == extent


def test_negative_strides_are_refused() -> None:
    with pytest.raises(ValueError, match="negative stride"):
        extent_of(np.zeros(4)[::-1])
