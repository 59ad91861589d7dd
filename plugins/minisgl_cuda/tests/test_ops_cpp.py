"""ops:cuda in CUDA C++ as the simulator and the host see it: rounding, shapes, paths, races, planted faults."""

from __future__ import annotations

import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from minisgl_core.builtin.ops import ComposedOps
from minisgl_core.plugin_api import RopeStoreArgs
from minisgl_cpu_sim.cuda_sim import SimulatedFault, SimulatedProgram
from minisgl_cuda.kv_build import CSRC
from minisgl_cuda.ops_cpp import (
    BLOCK,
    HELD,
    NORM,
    ROPE,
    WARP,
    WIDE_BLOCK,
    CompiledOps,
    act_shape,
    norm_shape,
    rope_shape,
)

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32

ROUNDING = """
#include <minisgl/device.h>

template <class T>
__global__ void round_trip(uint16_t* narrowed, float* widened, const float* from, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    const T value = minisgl::narrow<T>(from[i]);
    narrowed[i] = value.bits;
    widened[i] = minisgl::widen(value);
}
"""


def awkward_floats() -> np.ndarray:
    """Every sign, exponent and rounding case: random bits, ties and adjacent values, the ends of both ranges."""
    random = np.random.default_rng(0)
    bits = random.integers(0, 2**32, 20000, dtype=np.uint32)
    ties = (bits & np.uint32(0xFFFF0000)) | np.uint32(0x8000)  # half-way between bfloat16 numbers
    half = random.integers(0x38000000 >> 13, 0x47800000 >> 13, 4000, dtype=np.uint32) << np.uint32(13)
    half |= np.uint32(0x1000)  # half-way between float16 numbers
    tiny = random.integers(0, 4096, 4000).astype(np.float32) * np.float32(2.0**-26)  # float16 without leading one
    ends = np.array([0.0, -0.0, np.inf, -np.inf, 65504, 65519.99, 65520, -65520, 3.4e38, 2**-24, 2**-25], np.float32)
    whole = np.concatenate((bits, ties, ties + np.uint32(1), ties - np.uint32(1), half, half + np.uint32(1)))
    floats = np.concatenate((whole.view(np.float32), tiny, -tiny, ends))
    return floats[~np.isnan(floats)]


@pytest.mark.parametrize(("name", "dtype"), [("BFloat16", BF16), ("Float16", F16)])
def test_the_simulator_rounds_as_the_gpu_does(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    source = tmp_path / "rounding.cu"
    source.write_text(ROUNDING)
    kernel = f"round_trip<minisgl::{name}>"
    program = SimulatedProgram([source], [kernel])
    numbers = awkward_floats()
    narrowed, widened = np.zeros(numbers.size, np.uint16), np.zeros(numbers.size, np.float32)
    args = {"narrowed": narrowed, "widened": widened, "from": numbers, "n": numbers.size}
    program.launch(kernel, -(-numbers.size // 256), 256, args)
    expected = torch.from_numpy(numbers).to(dtype)
    assert np.array_equal(narrowed, expected.view(torch.int16).numpy().view(np.uint16))
    assert torch.equal(torch.from_numpy(widened), expected.float())
    args = {"narrowed": narrowed[:1], "widened": widened[:1], "from": np.array([np.nan], np.float32), "n": 1}
    program.launch(kernel, 1, 32, args)
    assert np.isnan(widened[0])


@given(st.integers(1, 2**20), st.integers(1, 40_000))
def test_norm_shapes_cover_every_row_in_whole_warps(tokens: int, vectors: int) -> None:
    shape = norm_shape(tokens, vectors)
    assert (shape.blocks - 1) * shape.rows < tokens <= shape.blocks * shape.rows
    assert shape.lanes % WARP == 0 and shape.lanes >= WARP and shape.lanes * shape.rows <= WIDE_BLOCK
    assert shape.lanes * HELD >= vectors or shape.lanes == WIDE_BLOCK


@given(st.integers(1, 2**20), st.integers(1, 40_000))
def test_act_shapes_cover_every_vector(tokens: int, vectors: int) -> None:
    shape, parts = act_shape(tokens, vectors)
    assert shape.blocks % parts == 0 and shape.blocks // parts * shape.rows >= tokens
    assert parts == 1 or shape.rows == 1
    assert shape.lanes % WARP == 0 and shape.lanes * shape.rows <= BLOCK
    assert (parts - 1) * shape.lanes < vectors


@given(st.integers(1, 2**20), st.integers(1, 512), st.integers(1, 600))
def test_rope_shapes_cover_every_head_in_whole_warps(tokens: int, heads: int, pairs: int) -> None:
    shape, parts = rope_shape(tokens, heads, pairs)
    assert shape.blocks == tokens * parts and (parts - 1) * shape.rows < heads <= parts * shape.rows
    assert shape.lanes & (shape.lanes - 1) == 0 and shape.lanes >= min(pairs, WARP)
    assert shape.lanes * shape.rows % WARP == 0 and shape.lanes * shape.rows <= BLOCK


@pytest.fixture
def ops(simulated_ops: Any) -> CompiledOps:
    setup: Any = SimpleNamespace(q_heads=2, kv_heads=1, head_dim=16, comm=SimpleNamespace(all_reduce=lambda x: x))
    return CompiledOps(setup, launcher=simulated_ops)


def test_vectors_and_elements_are_chosen_by_every_address_and_stride(ops: CompiledOps, simulated_ops: Any) -> None:
    rows, weight = torch.randn(2, 48), torch.randn(16)
    for x, w in (
        (rows[:, :16], weight),
        (rows[:, 1:17], weight),  # an address that is no multiple of 16 bytes
        (torch.randn(2, 17)[:, :16], weight),  # a stride that is none
        (rows[:, :16], torch.randn(17)[1:]),
        (rows[:, :15], weight[:15]),
    ):
        torch.testing.assert_close(ops.rms_norm(x, w, 1e-6), torch.nn.functional.rms_norm(x, x.shape[1:], w, 1e-6))
    names = [name.partition("<")[2] for name, _ in simulated_ops.seen]
    assert names == ["float, 4>", "float, 1>", "float, 1>", "float, 1>", "float, 1>"]


def _store(
    k_cache: torch.Tensor, v_cache: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out_loc: torch.Tensor
) -> None:
    for cache, rows in ((k_cache, k), (v_cache, v)):
        cache.flatten(0, 1)[out_loc] = rows


def test_what_a_layers_calls_share_is_kept_for_its_own_tensors_only(ops: CompiledOps, simulated_ops: Any) -> None:
    setup: Any = SimpleNamespace(q_heads=2, kv_heads=1, head_dim=16, kv=SimpleNamespace(store=_store))
    reference, where = ComposedOps(setup), torch.tensor([3, 0], dtype=torch.int32)
    k_cache, v_cache, other_cache = torch.zeros(3, 3, 2, 1, 16)
    angles, weights = torch.randn(2, 4, 16), torch.randn(4, 17)
    aligned, odd = torch.randn(2, 64), torch.randn(2, 65)[:, :64]
    for qkv, q_weight, k_weight, table, values in (
        (aligned, weights[0, 1:], weights[1, 1:], angles[0], v_cache),
        (aligned, None, None, angles[0], v_cache),
        (odd, None, None, angles[0], v_cache),  # rows that are no multiples of 16 bytes
        (aligned, None, None, angles[1], v_cache),
        (aligned, None, None, angles[1], other_cache),
    ):
        expected = torch.zeros(3, 2, 1, 16)
        rows = torch.empty_strided(qkv.shape, qkv.stride()).copy_(qkv)
        out = ops.qk_norm_rope_store(
            rows, RopeStoreArgs(q_weight, k_weight, 1e-6, table, k_cache, values), where, where
        )
        stored, k_stored = values.clone(), k_cache.clone()
        want = reference.qk_norm_rope_store(
            qkv, RopeStoreArgs(q_weight, k_weight, 1e-6, table, k_cache, expected), where, where
        )
        for got, right in zip((*out, stored, k_stored), (*want, expected, k_cache), strict=True):
            torch.testing.assert_close(got, right)
        values.zero_()
    names = [name.partition("<")[2] for name, _ in simulated_ops.seen]
    assert names == ["float, 1>", "float, 4>", "float, 1>", "float, 4>", "float, 4>"]


def test_a_closed_backend_holds_no_cache(ops: CompiledOps) -> None:
    ids, caches = torch.tensor([1, 0], dtype=torch.int32), [torch.zeros(2, 2, 1, 16) for _ in range(2)]
    held = weakref.ref(caches[0])
    ops.qk_norm_rope_store(torch.randn(2, 64), RopeStoreArgs(None, None, 1e-6, torch.randn(4, 16), *caches), ids, ids)
    ops.close()
    caches.clear()
    assert held() is None


def test_case_119_nothing_is_kept_of_caches_that_are_gone(ops: CompiledOps) -> None:
    ids, held = torch.tensor([1, 0], dtype=torch.int32), []
    for _ in range(3):
        caches = [torch.zeros(2, 2, 1, 16) for _ in range(2)]
        held += [weakref.ref(cache) for cache in caches]
        ops.qk_norm_rope_store(
            torch.randn(2, 64), RopeStoreArgs(None, None, 1e-6, torch.randn(4, 16), *caches), ids, ids
        )
        ops.qk_norm_rope_store(
            torch.randn(2, 64), RopeStoreArgs(None, None, 1e-6, torch.randn(4, 16), *caches), ids, ids
        )
        del caches
    assert [cache() for cache in held] == [None] * 6


def test_operations_are_one_each_to_a_recorder(ops: CompiledOps) -> None:
    seen = []

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            seen.append(str(func).partition(".")[2].removesuffix(".default"))
            return func(*args, **(kwargs or {}))

    x, ids = torch.randn(2, 64), torch.tensor([1, 0], dtype=torch.int32)
    caches, angles = torch.zeros(2, 2, 1, 1, 16), torch.randn(4, 16)
    with Recorder():
        ops.rms_norm(x, torch.randn(64), 1e-6)
        ops.add_rms_norm(x, x.clone(), torch.randn(64), 1e-6)
        ops.act_and_mul(x)
        ops.qk_norm_rope_store(x, RopeStoreArgs(None, None, 1e-6, angles, caches[0], caches[1]), ids, ids)
    ours = [name for name in seen if name.startswith("cpp_")]
    assert ours == ["cpp_rms_norm", "cpp_add_rms_norm", "cpp_act_and_mul", "cpp_qk_norm_rope_store"]


# Faults, each planted in a copy of the sources.

PLANTS = {
    "missing_barrier": ("norm", "    __syncthreads();\n", ""),
    "no_row_mask": ("norm", "token < args.tokens ? args.width / COUNT : 0", "args.width / COUNT"),
    "early_leave": (
        "norm",
        "    const T* x = static_cast",
        "    if (vectors == 0) return;\n    const T* x = static_cast",
    ),
    "shared_vector": ("rope", "store_vector(head + i * COUNT, pair.a)", "store_vector(head + i / 2 * COUNT, pair.a)"),
    "no_head_mask": ("rope", "index < q_heads + 2 * kv_heads ?", "true ?"),
    "one_unit_too_many": ("act", "i < vectors;", "i <= vectors;"),
}
KERNELS = {"norm": "add_rms_norm", "rope": "qk_norm_rope_store", "act": "act_and_mul"}


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> SimulatedProgram:
    folder = tmp_path_factory.mktemp("planted")
    sources, kernels = [], []
    for name, (file, right, wrong) in PLANTS.items():
        text = (CSRC / f"{file}.cuh").read_text()
        assert text.count(right) == 1, f"{name}: {right!r} is no longer once in {file}.cuh"
        text = text.replace(right, wrong).replace("#pragma once\n", "")
        text = text.replace("namespace minisgl {", f"namespace {name} {{ using namespace minisgl;")
        sources.append(folder / f"{name}.cuh")
        sources[-1].write_text(text)
        kernels.append(f"{name}::{KERNELS[file]}<float, 4>")
    return SimulatedProgram(sources, kernels, include_dirs=[CSRC])


def norm_args(tokens: int, width: int) -> dict[str, Any]:
    random = np.random.default_rng(0)
    x, residual = (random.standard_normal((tokens, width), np.float32) for _ in range(2))
    weight = random.standard_normal(width, np.float32)
    values = (x, x, residual, weight, width, width, width, width, tokens, 1e-6)
    return dict(zip(NORM.fields, values, strict=True))


def fault_of(program: SimulatedProgram, name: str, grid: int, block: tuple[int, int], args: Any) -> SimulatedFault:
    with pytest.raises(SimulatedFault) as raised:
        program.launch(f"{name}::{KERNELS[PLANTS[name][0]]}<float, 4>", grid, block, args)
    return raised.value


def test_a_missing_barrier_between_the_warps_of_a_row(planted: SimulatedProgram) -> None:
    assert fault_of(planted, "missing_barrier", 1, (64, 1), norm_args(1, 256)).kind in ("race", "uninitialised")


def test_rows_behind_the_last(planted: SimulatedProgram) -> None:
    fault = fault_of(planted, "no_row_mask", 2, (32, 2), norm_args(3, 128))
    assert (fault.kind, fault.buffer, fault.offset) == ("out-of-bounds", "out", 3 * 512)


def test_threads_that_leave_before_a_barrier(planted: SimulatedProgram) -> None:
    assert fault_of(planted, "early_leave", 1, (64, 2), norm_args(1, 256)).kind == "divergence"


def rope_args(q_heads: int = 2, kv_heads: int = 1, width: int = 16) -> dict[str, Any]:
    random = np.random.default_rng(0)
    qkv = random.standard_normal((2, q_heads + 2 * kv_heads, width), np.float32)
    caches = [np.zeros((5, kv_heads, width), np.float32) for _ in range(2)]
    positions, out_loc = np.array([3, 0], np.int32), np.array([4, 1], np.int32)
    angles = random.standard_normal((6, width), np.float32)
    row, slot = (q_heads + 2 * kv_heads) * width, kv_heads * width
    steps = (row, width, slot, width, slot, width)
    values = (qkv, 0, 0, positions, angles, *caches, out_loc, *steps, q_heads, kv_heads, width, width, 2, 1, 1e-6)
    return dict(zip(ROPE.fields, values, strict=True))


def test_two_threads_that_write_one_vector(planted: SimulatedProgram) -> None:
    fault = fault_of(planted, "shared_vector", 2, (2, 16), rope_args())
    assert (fault.kind, fault.access, fault.buffer, fault.offset) == ("race", "write", "qkv", 0)


def test_heads_behind_the_last(planted: SimulatedProgram) -> None:
    fault = fault_of(planted, "no_head_mask", 2, (2, 16), rope_args())
    assert fault.kind in ("out-of-bounds", "race")


def test_a_vector_too_many(planted: SimulatedProgram) -> None:
    x = np.zeros((1, 64), np.float32)
    out = np.zeros((1, 32), np.float32)
    args = {"out": out, "x": x, "x_stride": 64, "width": 32, "tokens": 1, "blocks_per_row": 1}
    fault = fault_of(planted, "one_unit_too_many", 1, (32, 1), args)
    assert (fault.kind, fault.offset) == ("out-of-bounds", 256)
