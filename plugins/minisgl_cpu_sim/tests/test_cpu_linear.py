"""linear:cpu against the product in float64, over every path: dot products, packing, tails, several K blocks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minisgl_core.plugin_api import LinearSetup
from minisgl_cpu_sim.native import linear as native_linear
from minisgl_cpu_sim.native.linear import NativeLinear

EPSILON = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-9, torch.float16: 2.0**-12}


def linear(dtype: torch.dtype) -> NativeLinear:
    return NativeLinear(LinearSetup(device=torch.device("cpu"), dtype=dtype, max_tokens=1024))


def check(m: int, n: int, k: int, dtype: torch.dtype, bias: bool, wide: int = 0) -> None:
    random = torch.Generator().manual_seed(m * 31 + n * 7 + k)
    x = torch.randn(m, k + wide, generator=random).to(dtype)[:, :k]
    weight = torch.randn(n, k, generator=random).to(dtype)
    b = torch.randn(n, generator=random).to(dtype) if bias else None
    backend = linear(dtype)
    out = backend.forward(x, backend.prepare_weights(weight), b)
    expected = x.double() @ weight.double().t() + (0 if b is None else b.double())
    # Rounding of the result, and a float32 sum of k products: their absolute sum bounds its error.
    bound = expected.abs() * 2 * EPSILON[dtype] + (x.double().abs() @ weight.double().abs().t() + 4) * k * 2.0**-24
    assert out.dtype == dtype and out.shape == (m, n)
    assert ((out.double() - expected).abs() <= bound).all()


@pytest.mark.parametrize("dtype", list(EPSILON))
@pytest.mark.parametrize("m", [1, 2, 3, 4, 5, 6, 7, 8, 13, 16, 17, 40])
def test_batch_sizes(m: int, dtype: torch.dtype) -> None:
    check(m, 70, 99, dtype, bias=True)


@pytest.mark.parametrize(("m", "n", "k"), [(1, 1, 1), (20, 1, 3), (600, 33, 20), (30, 65, 1100), (3, 200, 1031)])
def test_shapes(m: int, n: int, k: int) -> None:
    check(m, n, k, torch.float32, bias=False)
    check(m, n, k, torch.bfloat16, bias=True, wide=5)


@settings(max_examples=40, deadline=None)
@given(
    m=st.integers(1, 45),
    n=st.integers(1, 150),
    k=st.integers(1, 70),
    dtype=st.sampled_from(list(EPSILON)),
    bias=st.booleans(),
    wide=st.integers(0, 3),
)
def test_any_shape(m: int, n: int, k: int, dtype: torch.dtype, bias: bool, wide: int) -> None:
    check(m, n, k, dtype, bias, wide)


def test_no_rows() -> None:
    backend = linear(torch.float32)
    assert backend.forward(torch.empty(0, 8), backend.prepare_weights(torch.randn(5, 8))).shape == (0, 5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_case_46_a_row_does_not_depend_on_a_batch_of_up_to_16_or_the_threads(dtype: torch.dtype) -> None:
    x, weight = torch.randn(16, 300).to(dtype), torch.randn(500, 300).to(dtype)
    backend = linear(dtype)
    weights = backend.prepare_weights(weight)
    alone = torch.cat([backend.forward(row[None], weights) for row in x])
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        for m in (2, 3, 5, 8, 16):
            assert torch.equal(backend.forward(x[:m], weights), alone[:m])
    torch.set_num_threads(1)


def test_nan_stays_in_its_row() -> None:
    x = torch.randn(20, 40)
    x[3, 7] = torch.nan
    backend = linear(torch.float32)
    for m in (5, 20):
        bad = backend.forward(x[:m], backend.prepare_weights(torch.randn(30, 40))).isnan()
        assert bad[3].all() and not bad[[0, 1, 2, 4]].any()


def test_the_weight_can_be_read_back() -> None:
    weight = torch.randn(6, 5)
    backend = linear(torch.float32)
    for given_weight in (weight, weight.t().contiguous().t()):
        assert torch.equal(backend.weight_of(backend.prepare_weights(given_weight)), weight)


@pytest.mark.parametrize("what", ["weight", "x"])
def test_another_dtype_is_refused(what: str) -> None:
    backend = linear(torch.float32)
    tensors: dict[str, Any] = {"weight": torch.randn(6, 5), "x": torch.randn(2, 5)}
    tensors[what] = tensors[what].half()
    with pytest.raises(TypeError, match=r"torch\.float16"):
        backend.forward(tensors["x"], backend.prepare_weights(tensors["weight"]))


@pytest.mark.parametrize("faster", [False, True])
def test_large_products_go_to_torch_where_it_is_faster(faster: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_linear, "_torch_multiplies_faster", lambda dtype: faster)
    called: list[torch.Tensor] = []

    def spy(x: torch.Tensor, *rest: Any) -> torch.Tensor:
        called.append(x)
        return x

    monkeypatch.setattr(torch.nn.functional, "linear", spy)
    backend, weight = linear(torch.float32), torch.randn(3, 8)
    backend.forward(torch.randn(16, 8), weight)
    assert not called
    backend.forward(torch.randn(17, 8), weight)
    assert len(called) == faster


@pytest.mark.parametrize(
    ("dtype", "flags", "expected"),
    [
        (torch.bfloat16, "flags : fpu avx2 f16c\n\nflags : avx512_bf16", False),
        (torch.bfloat16, "flags : avx512f avx512_bf16", True),
        (torch.float16, "flags : avx512f avx512_bf16", False),
        (torch.float16, "flags : avx512_fp16", True),
    ],
)
def test_what_torch_multiplies_faster(
    dtype: torch.dtype, flags: str, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "read_text", lambda self: flags)
    assert native_linear._torch_multiplies_faster(dtype) is expected


@pytest.mark.parametrize(("capability", "expected"), [("AVX2", False), ("AVX512", True)])
def test_wide_vectors_are_left_to_torch(capability: str, expected: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    assert native_linear._torch_multiplies_faster(torch.float32) is expected
