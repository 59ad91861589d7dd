"""Each fake against the real library: the same signatures, and the same results on random ragged batches."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
import torch

from minisgl_core.testing.device_fixture import DeviceFixture
from minisgl_cpu_sim.fakes import flash_attn_interface
from minisgl_cpu_sim.fakes import flashinfer as fake_flashinfer

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]  # the libraries warn when they are imported
TOLERANCE = {"rtol": 2e-2, "atol": 2e-2}
INT = torch.int32


@pytest.fixture(scope="module")
def device_fixture() -> DeviceFixture:
    fixture = DeviceFixture("auto")
    if fixture.facts.sm != 90:
        pytest.skip("compares with libraries that are installed for Hopper")
    fixture.platform.activate()
    return fixture


@pytest.fixture(autouse=True)
def _no_compilation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only prebuilt kernels: others take minutes to compile."""
    monkeypatch.setenv("FLASHINFER_DISABLE_JIT", "1")


def _parameters(function: Callable[..., Any]) -> list[tuple[str, Any, Any]]:
    found = inspect.signature(inspect.unwrap(function)).parameters.values()
    return [(p.name, p.kind, p.default) for p in found]


@pytest.mark.parametrize("name", ["flash_attn_with_kvcache", "flash_attn_varlen_func", "get_scheduler_metadata"])
def test_signatures_of_flash_attention_3(device_fixture: DeviceFixture, name: str) -> None:
    real = getattr(import_module("flash_attn_interface"), name)
    assert _parameters(getattr(flash_attn_interface, name)) == _parameters(real)


def test_the_operator_of_flash_attention_3(device_fixture: DeviceFixture) -> None:
    """A newer library may have more arguments after those that the fake knows."""
    real, fake = (
        [(a.name, str(a.type), a.default_value) for a in library.flash_attn_3_gpu.fwd.default._schema.arguments]
        for library in (import_module("flash_attn_interface"), flash_attn_interface)
    )
    assert real[: len(fake)] == fake


@pytest.mark.parametrize("name", ["__init__", "plan", "_plan_impl", "run", "reset_workspace_buffer"])
@pytest.mark.parametrize("wrapper", ["BatchDecodeWithPagedKVCacheWrapper", "BatchPrefillWithPagedKVCacheWrapper"])
def test_signatures_of_flashinfer(device_fixture: DeviceFixture, wrapper: str, name: str) -> None:
    real, fake = (getattr(library, wrapper) for library in (import_module("flashinfer"), fake_flashinfer))
    if not hasattr(real, name):
        assert not hasattr(fake, name)
        return
    assert _parameters(getattr(fake, name)) == _parameters(getattr(real, name))


@pytest.mark.parametrize(
    "name", ["fast_decode_plan", "sampling_from_probs", "top_k_renorm_probs", "top_p_renorm_probs"]
)
def test_signatures_of_flashinfers_functions(device_fixture: DeviceFixture, name: str) -> None:
    real = getattr(import_module("flashinfer"), name)
    assert _parameters(getattr(fake_flashinfer, name)) == _parameters(real)


def test_renormalised_probabilities(device_fixture: DeviceFixture) -> None:
    random = torch.Generator().manual_seed(3)
    probs = torch.softmax(3 * torch.randn(5, 1000, generator=random), -1)
    top_k, top_p = torch.tensor([1, 2, 40, 999, 1000], dtype=INT), torch.tensor([0.01, 0.3, 0.7, 0.95, 0.999])
    real = import_module("flashinfer")
    for name, value in (("top_k_renorm_probs", top_k), ("top_p_renorm_probs", top_p)):
        want = getattr(fake_flashinfer, name)(probs, value)
        got = getattr(real, name)(probs.to(device_fixture.device), value.to(device_fixture.device)).cpu()
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6)


def test_one_seed_serves_all_rows(device_fixture: DeviceFixture) -> None:
    """Why its spec does not declare ``per_row_seed``: other rows' seeds change nothing, and equal ones do not agree."""
    probs = torch.full((8, 1000), 1e-3)
    zeros = torch.zeros(8, dtype=torch.int64)
    other = torch.arange(8)
    for library, device in (
        (fake_flashinfer, torch.device("cpu")),
        (import_module("flashinfer"), device_fixture.device),
    ):
        draw = library.sampling_from_probs
        first, second = (draw(probs.to(device), seed=s.to(device), offset=zeros.to(device)) for s in (zeros, other))
        assert first.tolist() == second.tolist()
        assert len(set(first.tolist())) > 1


class Ragged:
    """Random rows on shuffled pages, in bfloat16; everything that no row owns is NaN."""

    def __init__(self, seed: int, page_size: int, q_heads: int, kv_heads: int, head_dim: int, decode: bool) -> None:
        random = torch.Generator().manual_seed(seed)
        self.page_size, self.heads = page_size, (q_heads, kv_heads, head_dim)
        rows = int(torch.randint(1, 9, (), generator=random))
        self.kv_lens = torch.randint(1, 400, (rows,), generator=random, dtype=INT)
        self.q_lens = torch.ones_like(self.kv_lens)
        if not decode:
            self.q_lens = (self.kv_lens * torch.rand(rows, generator=random)).to(INT).clamp(min=1)
        counts = (self.kv_lens + page_size - 1) // page_size
        order = torch.randperm(int(counts.sum()) + 3, generator=random).to(INT)
        self.pages = order[: int(counts.sum())]
        self.page_table = torch.zeros(rows, int(counts.max()), dtype=INT)
        shape = (len(order), page_size, kv_heads, head_dim)
        self.k, self.v = (torch.full(shape, torch.nan, dtype=torch.bfloat16) for _ in range(2))
        for row, own in enumerate(self.pages.split(counts.tolist())):
            self.page_table[row, : len(own)] = own
            length = int(self.kv_lens[row])
            for cache in (self.k, self.v):
                filled = torch.zeros(len(own) * page_size, kv_heads, head_dim)
                filled[:length] = torch.randn(length, kv_heads, head_dim, generator=random)
                cache[own.long()] = filled.view(len(own), page_size, kv_heads, head_dim).bfloat16()
        self.indptr, self.cu_q = _prefix(counts), _prefix(self.q_lens)
        self.last = self.kv_lens - (counts - 1) * page_size
        tokens = int(self.q_lens.sum())
        self.q = torch.randn(tokens, q_heads, head_dim, generator=random).bfloat16()
        self.scale = 1.7 * head_dim**-0.5

    def on(self, device: torch.device) -> dict[str, torch.Tensor]:
        names = ("q", "k", "v", "kv_lens", "cu_q", "page_table", "pages")
        return {name: getattr(self, name).to(device) for name in names}


def _prefix(counts: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(counts.cumsum(0, dtype=INT), (1, 0))


GEOMETRIES = [(1, 16, 8, 128), (16, 16, 8, 128), (16, 8, 8, 64), (64, 10, 2, 128), (256, 16, 2, 64)]


def _flash_attention(library: Any, case: Ragged, device: torch.device, decode: bool, window: Any, many: bool) -> Any:
    t = case.on(device)
    schedule_of = {
        "page_size": case.page_size,
        "qkv_dtype": torch.bfloat16,
        "window_size": window,
        "causal": not decode,
    }
    most = 1 if decode else int(case.q_lens.max())
    varlen = {} if decode else {"cu_seqlens_q": t["cu_q"]}
    schedule = None
    if many:
        width = case.page_table.shape[1] * case.page_size
        shape = (len(case.kv_lens), most, width, *case.heads)
        schedule = library.get_scheduler_metadata(*shape, t["kv_lens"], **schedule_of, **varlen)
    for _ in range(3 if many else 1):  # as the layers of a step share a schedule
        out = library.flash_attn_with_kvcache(
            t["q"][:, None] if decode else t["q"],
            t["k"],
            t["v"],
            cache_seqlens=t["kv_lens"],
            page_table=t["page_table"],
            softmax_scale=case.scale,
            causal=not decode,
            window_size=window,
            scheduler_metadata=schedule,
            **varlen,
            **({} if decode else {"max_seqlen_q": most}),
        )
    return out[:, 0] if decode else out


@pytest.mark.parametrize("decode", [True, False], ids=["decode", "prefill"])
@pytest.mark.parametrize("geometry", GEOMETRIES)
@pytest.mark.parametrize("many", [False, True], ids=["plain", "schedule"])
def test_flash_attention_3(
    device_fixture: DeviceFixture, geometry: tuple[int, int, int, int], decode: bool, many: bool
) -> None:
    real = import_module("flash_attn_interface")
    for seed, window in ((0, (-1, -1)), (1, (-1, -1)), (2, (40, 0))):
        case = Ragged(seed, *geometry, decode)
        want = _flash_attention(flash_attn_interface, case, torch.device("cpu"), decode, window, many)
        got = _flash_attention(real, case, device_fixture.device, decode, window, many)
        torch.testing.assert_close(got.cpu(), want, **TOLERANCE)


@pytest.mark.parametrize("geometry", GEOMETRIES[1:])
@pytest.mark.parametrize("window", [(-1, -1), (40, 0)])
def test_flash_attention_3_without_pages(
    device_fixture: DeviceFixture, geometry: tuple[int, int, int, int], window: tuple[int, int]
) -> None:
    real = import_module("flash_attn_interface")
    _, q_heads, kv_heads, head_dim = geometry
    random = torch.Generator().manual_seed(0)
    lens = [1, 130, 77]
    heads = (q_heads, kv_heads, kv_heads)
    rows = torch.randn(sum(lens), sum(heads), head_dim, generator=random).to(torch.bfloat16)
    cu = torch.tensor([0, 1, 131, 208], dtype=torch.int32)

    def run(library: Any, device: torch.device) -> torch.Tensor:
        q, k, v = rows.to(device).split(heads, dim=1)  # with the stride of the merged projection
        where = cu.to(device)
        options = {"causal": True, "window_size": window, "softmax_scale": 0.1, "num_splits": 0}
        out: torch.Tensor = library.flash_attn_varlen_func(q, k, v, where, where, 130, 130, **options)
        return out

    got = run(real, device_fixture.device)
    torch.testing.assert_close(got.cpu(), run(flash_attn_interface, torch.device("cpu")), **TOLERANCE)


def _flashinfer(library: Any, case: Ragged, device: torch.device, decode: bool, cores: bool) -> Any:
    t = case.on(device)
    workspace = torch.zeros(64 << 20, dtype=torch.uint8, device=device)
    facts = {"sm_scale": case.scale, "q_data_type": torch.bfloat16}
    geometry = (*case.heads, case.page_size)
    pages = (case.indptr, t["pages"], case.last)
    if decode:
        wrapper = library.BatchDecodeWithPagedKVCacheWrapper(workspace, use_tensor_cores=cores)
        wrapper.plan(*pages, *geometry, **facts)
    else:
        wrapper = library.BatchPrefillWithPagedKVCacheWrapper(workspace, backend="fa2" if cores else "auto")
        wrapper.plan(case.cu_q, *pages, *geometry, causal=True, **facts)
    return wrapper.run(t["q"], (t["k"], t["v"]), return_lse=True)


@pytest.mark.parametrize("decode", [True, False], ids=["decode", "prefill"])
@pytest.mark.parametrize("geometry", GEOMETRIES)
@pytest.mark.parametrize("cores", [False, True], ids=["first", "second"])
def test_flashinfer(
    device_fixture: DeviceFixture, geometry: tuple[int, int, int, int], decode: bool, cores: bool
) -> None:
    """``first`` and ``second`` are its two kernels: CUDA or tensor cores in decode, fa3 or fa2 in prefill."""
    real = import_module("flashinfer")
    cores = cores or (decode and geometry[1] // geometry[2] == 5)  # a ratio that only tensor cores have
    for seed in range(3):
        case = Ragged(seed, *geometry, decode)
        want, want_lse = _flashinfer(fake_flashinfer, case, torch.device("cpu"), decode, cores)
        got, lse = _flashinfer(real, case, device_fixture.device, decode, cores)
        torch.testing.assert_close(got.cpu(), want, **TOLERANCE)
        torch.testing.assert_close(lse.cpu(), want_lse, **TOLERANCE)


def _replayed(library: Any, first: Ragged, later: Ragged, device: torch.device, ratio_cores: bool) -> torch.Tensor:
    """Plan for ``first`` with fixed buffers, then fill the buffers and replan with the fast plan for ``later``."""
    rows = len(first.kv_lens)
    fixed = [torch.zeros(n, dtype=INT, device=device) for n in (rows + 1, 4096, rows)]
    workspace = torch.zeros(64 << 20, dtype=torch.uint8, device=device)
    names = ("paged_kv_indptr_buffer", "paged_kv_indices_buffer", "paged_kv_last_page_len_buffer")
    buffers = dict(zip(names, fixed, strict=True))
    wrapper = library.BatchDecodeWithPagedKVCacheWrapper(
        workspace, use_cuda_graph=True, use_tensor_cores=ratio_cores, **buffers
    )
    wrapper.reset_workspace_buffer(workspace, torch.zeros(1 << 20, dtype=torch.uint8, device=device))
    facts: dict[str, Any] = {"sm_scale": first.scale, "q_data_type": torch.bfloat16, "disable_split_kv": False}
    geometry = (*first.heads, first.page_size)
    wrapper.plan(first.indptr, first.pages.to(device), first.last, *geometry, **facts)
    for buffer, now in zip(fixed, (later.indptr, later.pages, later.last), strict=True):
        buffer[: len(now)] = now.to(device)
    library.fast_decode_plan(wrapper, later.indptr, fixed[1], later.last, *geometry, **facts)
    t = later.on(device)
    out: torch.Tensor = wrapper.run(t["q"], (t["k"], t["v"]))
    return out


@pytest.mark.parametrize("cores", [False, True], ids=["cuda", "tensor"])
@pytest.mark.parametrize("page_size", [1, 16])
def test_flashinfer_replanned(device_fixture: DeviceFixture, page_size: int, cores: bool) -> None:
    real = import_module("flashinfer")
    cases = [Ragged(seed, page_size, 16, 8, 128, True) for seed in range(40)]
    first = cases[0]
    later = next(case for case in cases[1:] if len(case.kv_lens) == len(first.kv_lens))
    want = _replayed(fake_flashinfer, first, later, torch.device("cpu"), cores)
    torch.testing.assert_close(_replayed(real, first, later, device_fixture.device, cores).cpu(), want, **TOLERANCE)
