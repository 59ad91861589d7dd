"""ops:cuda on a GPU beyond single calls: graphs, dependent launches, huge pools."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from minisgl_core.builtin.platform import CudaPlatform
from minisgl_core.plugin_api import RopeStoreArgs
from minisgl_cuda.launch import CompiledLauncher
from minisgl_cuda.ops_cpp import CompiledOps

pytestmark = pytest.mark.gpu

Q, K, D, HIDDEN, INNER = 4, 2, 128, 512, 768
EPS = 1e-6


@pytest.fixture(scope="module")
def platform() -> Iterator[CudaPlatform]:
    platform = CudaPlatform(0)
    platform.activate()
    yield platform
    platform.close()


@pytest.fixture(scope="module", params=["cpp", "cpp without dependent launches", "triton"])
def ops(request: pytest.FixtureRequest, platform: CudaPlatform) -> Any:
    comm = SimpleNamespace(all_reduce=lambda x: x)
    setup: Any = SimpleNamespace(q_heads=Q, kv_heads=K, head_dim=D, kv=None, comm=comm, platform=platform)
    if request.param == "triton":
        pytest.importorskip("triton", reason="the Triton variant needs triton")
        from minisgl_cuda.ops import CudaOps

        return CudaOps(setup)
    if shutil.which("nvcc") is None:
        pytest.skip("needs nvcc")
    return CompiledOps(setup, launcher=None if request.param == "cpp" else CompiledLauncher(platform, dependent=False))


class Step:
    """Operations that each read what the one before wrote, on ``tokens`` rows."""

    def __init__(self, ops: Any, tokens: int) -> None:
        random = torch.Generator("cuda").manual_seed(0)

        def randn(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, device="cuda", generator=random).bfloat16()

        self.ops, self.tokens = ops, tokens
        self.x, self.residual, self.norm_weight = randn(tokens, HIDDEN), randn(tokens, HIDDEN), randn(HIDDEN)
        self.norm_weights = (randn(D), randn(D))
        self.up = randn(tokens, 2 * INNER)
        self.caches = torch.zeros(2, tokens + 5, 1, K, D, device="cuda", dtype=torch.bfloat16)
        self.where = torch.randint(0, 64, (tokens,), device="cuda", dtype=torch.int32, generator=random)
        self.out_loc = torch.randperm(tokens, device="cuda", generator=random).to(torch.int32)
        self.angles = torch.randn(64, D, device="cuda", generator=random)

    def run(self) -> tuple[torch.Tensor, ...]:
        """New tensors; the inputs stay as they are, the caches are written."""
        ops, x, residual = self.ops, self.x.clone(), self.residual.clone()
        for _ in range(6):
            x, residual = ops.add_rms_norm(x, residual, self.norm_weight, EPS)
            inner = ops.act_and_mul(self.up)[:, :HIDDEN].contiguous()
            x = ops.rms_norm(x + inner, self.norm_weight, EPS)
            qkv = torch.cat((x, x), dim=1)
            q, k, v = ops.qk_norm_rope_store(
                qkv, RopeStoreArgs(*self.norm_weights, EPS, self.angles, *self.caches), self.where, self.out_loc
            )
            x = q.reshape(self.tokens, -1)
        return x, residual, k.clone(), v.clone(), self.caches.clone()


@pytest.mark.parametrize("tokens", [1, 64, 3000])
def test_a_chain_gives_the_same_alone_in_a_row_and_in_a_graph(ops: Any, platform: CudaPlatform, tokens: int) -> None:
    """Each kernel may start before the last has ended; none may read too early."""
    step = Step(ops, tokens)
    first = [t.clone() for t in step.run()]
    platform.synchronize()
    for _ in range(10):
        for found, expected in zip(step.run(), first, strict=True):
            assert torch.equal(found, expected)
    platform.synchronize()
    graph, out, _ = platform.capture(step.run, None)
    for _ in range(10):
        step.caches.zero_()
        graph.replay()
        for found, expected in zip(out, first, strict=True):
            assert torch.equal(found, expected)
    graph.close()


def test_case_70_huge_offsets(ops: Any, platform: CudaPlatform) -> None:
    slots = 2_200_000 * 4
    if platform.free_bytes() < 20 * 2**30:
        pytest.skip("needs 20 GiB of free GPU memory")
    caches = torch.zeros(2, slots, 1, K, D, device="cuda", dtype=torch.bfloat16)
    qkv = torch.randn(2, (Q + 2 * K) * D, device="cuda").bfloat16()
    at = [slots - 1, 6_000_000]
    where, out_loc = (torch.tensor(n, dtype=torch.int32, device="cuda") for n in ([3, 5], at))
    angles = torch.randn(8, D, device="cuda")
    _, k, v = ops.qk_norm_rope_store(qkv, RopeStoreArgs(None, None, EPS, angles, *caches), where, out_loc)
    assert torch.equal(caches[0, at, 0], k) and torch.equal(caches[1, at, 0], v)
    assert int(caches[:, :, 0, :, 0].count_nonzero()) == 2 * 2 * K


def test_case_70_huge_rows(ops: Any, platform: CudaPlatform) -> None:
    rows, width = 300_000, 4096 * 2
    if platform.free_bytes() < 12 * 2**30:
        pytest.skip("needs 12 GiB of free GPU memory")
    x = torch.zeros(rows, width, device="cuda", dtype=torch.bfloat16)
    x[-1] = 2.0
    out = ops.act_and_mul(x)
    assert torch.equal(out[-1], torch.full((width // 2,), 3.515625, device="cuda", dtype=torch.bfloat16))
    assert not out[-2].any()
    normed = ops.rms_norm(x, torch.ones(width, device="cuda", dtype=torch.bfloat16), EPS)
    assert bool((normed[-1] == 1).all()) and not normed[0].any()
