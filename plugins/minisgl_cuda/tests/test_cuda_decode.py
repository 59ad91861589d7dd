"""attention:cuda_decode against float64: interpreted on a CPU, compiled on a GPU."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="cuda_decode needs triton")

from pydantic import ValidationError

from minisgl_core.plugin_api import AttentionSetup, BatchView, CannotRun, LayerFacts, OneOf
from minisgl_core.testing import BackendUnderTest, DeviceFixture, checks_of
from minisgl_cpu_sim.fakes import on_cpu
from minisgl_cuda.attention import CudaDecodeAttention
from minisgl_cuda.options import DecodeOptions
from minisgl_cuda.plugin import minisgl_attention_backends
from minisgl_cuda.triton_ops.dependent import DEPENDENT_LAUNCH

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}
pytestmark = [pytest.mark.gpu] if ON_GPU else []


class Pool:
    """One layer of caches; every slot that no row owns is NaN."""

    layout = "NHD"

    def __init__(self, pages: int, size: int, kv_heads: int, dim: int, dtype: torch.dtype) -> None:
        self.num_pages, self.page_size = pages, size
        self.caches = [torch.full((pages + 1, size, kv_heads, dim), torch.nan, dtype=dtype) for _ in range(2)]

    def k_cache(self, layer: int) -> torch.Tensor:
        return self.caches[0]

    def v_cache(self, layer: int) -> torch.Tensor:
        return self.caches[1]


def make_case(
    lengths: list[int], size: int, q_heads: int, kv_heads: int, dim: int, dtype: torch.dtype
) -> tuple[Pool, torch.Tensor, BatchView]:
    """Rows of these lengths on shuffled pages."""
    torch.manual_seed(sum(lengths) + size + dim)
    counts = [-(-n // size) for n in lengths]
    pool = Pool(sum(counts) + 3, size, kv_heads, dim, dtype)
    order = torch.randperm(pool.num_pages).tolist()
    page_ids = torch.full((len(lengths), max(counts) + 2), pool.num_pages, dtype=torch.int32)
    for row, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        mine = [order.pop() for _ in range(count)]
        page_ids[row, :count] = torch.tensor(mine)
        slots = [mine[i // size] * size + i % size for i in range(length)]
        for cache in pool.caches:
            cache.view(-1, kv_heads, dim)[slots] = torch.randn(length, kv_heads, dim).to(dtype)
    pool.caches = [cache.to(DEVICE) for cache in pool.caches]
    q = torch.randn(len(lengths), q_heads + 2, dim).to(DEVICE, dtype)[:, :q_heads]  # a view with a wider token stride
    kv_lens = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    cu_q = torch.arange(len(lengths) + 1, dtype=torch.int32, device=DEVICE)
    view = BatchView(None, None, 1, max(lengths), cu_q, kv_lens, page_ids.to(DEVICE), size)
    return pool, q, view


def reference(pool: Pool, q: torch.Tensor, view: BatchView, facts: LayerFacts) -> torch.Tensor:
    """One row and head after the other, in float64."""
    out = torch.zeros(q.shape, dtype=torch.float64)
    k_all, v_all = (cache.double().cpu().view(-1, *cache.shape[2:]) for cache in pool.caches)
    group, size = q.shape[1] // k_all.shape[1], view.page_size
    for row, length in enumerate(view.kv_lens_device.tolist()):
        first = max(0, length - facts.window) if facts.window else 0
        pages = view.page_ids_device[row].tolist()
        slots = [pages[i // size] * size + i % size for i in range(first, length)]
        for head in range(q.shape[1]):
            scores = k_all[slots, head // group] @ q[row, head].double().cpu() * facts.scale
            if facts.softcap:
                scores = facts.softcap * torch.tanh(scores / facts.softcap)
            out[row, head] = torch.softmax(scores, 0) @ v_all[slots, head // group]
    return out


def setup_of(
    facts: LayerFacts, heads: tuple[int, int], dim: int, rows: int, size: int = 16, sm: int = 90,
    dtype: torch.dtype = torch.bfloat16,
) -> AttentionSetup:  # fmt: skip
    platform: Any = SimpleNamespace(sm=sm)
    return AttentionSetup(DEVICE, dtype, dtype, "NHD", size, *heads, dim, (facts,), rows, 64, 8192, 2, platform)


def backend(pool: Pool, q: torch.Tensor, facts: LayerFacts, options: DecodeOptions | None = None) -> Any:
    heads = q.shape[1], pool.caches[0].shape[2]
    setup = setup_of(facts, heads, q.shape[2], len(q), pool.page_size, dtype=q.dtype)
    # The interpreter runs one program after the other: few of them are enough there.
    found = CudaDecodeAttention(setup, options or (DecodeOptions() if ON_GPU else DecodeOptions(programs=8)))
    found.bind_kv(pool)
    return found


def check(lengths: list[int], size: int, heads: tuple[int, int], dim: int, dtype: torch.dtype, **facts: Any) -> None:
    pool, q, view = make_case(lengths, size, *heads, dim, dtype)
    layer = LayerFacts(1 / math.sqrt(dim), **facts)
    out = backend(pool, q, layer).forward(q, q, q, 0, SimpleNamespace(view=view))
    assert out.shape == q.shape and out.dtype == dtype
    torch.testing.assert_close(
        out.double().cpu(), reference(pool, q, view, layer), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype]
    )


@pytest.mark.parametrize("size", [1, 16, 64, 256])
@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_case_68_short_and_split_sequences(size: int, dtype: torch.dtype) -> None:
    check([1, 2, 15, 16, 17, 4097 if ON_GPU else 300], size, (4, 2), 64, dtype)


@pytest.mark.parametrize(
    "heads", [(9, 3), (15, 5), (14, 2), (12, 2), (40, 8), (24, 4), (28, 4), (64, 4), (8, 1), (7, 7)]
)
@pytest.mark.parametrize("dim", [64, 128])
def test_case_1_odd_gqa_ratios(heads: tuple[int, int], dim: int) -> None:
    check([33] if not ON_GPU else [33, 7], 16, heads, dim, torch.float32)


@pytest.mark.parametrize("dim", [80, 96, 256])
def test_case_2_head_dims(dim: int) -> None:
    check([33, 1, 130], 16, (8, 1) if dim == 256 else (3, 3), dim, torch.float32)


FORMS = pytest.mark.parametrize("launches", [1, 2])


def run(pool: Pool, q: torch.Tensor, view: BatchView, facts: LayerFacts, ours: Any) -> torch.Tensor:
    """Our answer, proved right; what it leaves behind, too. Nothing that an earlier launch left is of use to it."""
    ours._scratch.fill_(torch.nan)
    out: torch.Tensor = ours.forward(q, q, q, 0, SimpleNamespace(view=view))
    torch.testing.assert_close(out.double().cpu(), reference(pool, q, view, facts), atol=2e-6, rtol=2e-6)
    assert ours._arrived.abs().sum() == 0
    return out


@FORMS
@pytest.mark.parametrize(
    "more", [{"window": 1}, {"window": 8}, {"window": 64}, {"window": 500}, {"softcap": 2.0}], ids=str
)
def test_window_and_softcap(launches: Any, more: dict[str, Any]) -> None:
    pool, q, view = make_case([1, 9, 100], 16, 2, 1, 64, torch.float32)
    facts = LayerFacts(0.125, **more)
    options = DecodeOptions(splits=4, block_tokens=16, launches=launches)
    run(pool, q, view, facts, backend(pool, q, facts, options))


@FORMS
@pytest.mark.parametrize("splits", [1, 2, 64] if ON_GPU else [1, 2, 16])
def test_any_number_of_splits_gives_the_same(splits: Any, launches: Any) -> None:
    """Of 16 parts, rows have 1, 4, 5 and 13; the others are empty."""
    pool, q, view = make_case([1, 63, 65, 200], 16, 2, 1, 64, torch.float32)
    facts = LayerFacts(0.125)
    run(pool, q, view, facts, backend(pool, q, facts, DecodeOptions(splits=splits, block_tokens=16, launches=launches)))


@FORMS
@pytest.mark.parametrize(("heads", "dim", "splits"), [((5, 1), 80, 8), ((6, 3), 256, 8), ((33, 1), 256, 4)])
def test_more_parts_than_are_joined_at_once(heads: tuple[int, int], dim: int, splits: Any, launches: Any) -> None:
    """Odd groups, padded dimensions, and enough heads that parts are joined one after the other."""
    pool, q, view = make_case([130, 20], 16, *heads, dim, torch.float32)
    facts = LayerFacts(dim**-0.5)
    run(pool, q, view, facts, backend(pool, q, facts, DecodeOptions(splits=splits, block_tokens=16, launches=launches)))


@FORMS
def test_lengths_that_change_on_the_device_are_followed(launches: Any) -> None:
    pool, q, view = make_case([150, 100], 16, 4, 2, 64, torch.float32)
    facts = LayerFacts(0.125)
    ours = backend(pool, q, facts, DecodeOptions(splits=8, block_tokens=16, launches=launches))
    first = run(pool, q, view, facts, ours)
    for lengths in ([1, 100], [16, 17], [150, 1], [150, 100]):
        view.kv_lens_device.copy_(torch.tensor(lengths))
        last = run(pool, q, view, facts, ours)
    assert torch.equal(first, last)


def test_who_comes_last_does_not_change_a_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU the order varies by itself; the interpreter goes forwards, so it is made to go backwards too."""
    pool, q, view = make_case([150, 100, 3], 16, 4, 2, 64, torch.float32)
    facts = LayerFacts(0.125)
    ours = backend(pool, q, facts, DecodeOptions(splits=8, block_tokens=16, launches=1))
    forwards = run(pool, q, view, facts, ours)
    if not ON_GPU:
        from triton.runtime.interpreter import interpreter_builder as builder

        place, seen = builder.set_grid_idx, []

        def backwards(x: int, y: int, z: int) -> None:
            seen.append(builder.grid_dim[2] - 1 - z)
            place(x, y, seen[-1])

        monkeypatch.setattr(builder, "set_grid_idx", backwards)
        assert torch.equal(run(pool, q, view, facts, ours), forwards)
        assert seen[:8] == [7, 6, 5, 4, 3, 2, 1, 0]
    for _ in range(200 if ON_GPU else 0):
        assert torch.equal(ours.forward(q, q, q, 0, SimpleNamespace(view=view)), forwards)


@pytest.mark.parametrize(
    ("kv_heads", "splits"),
    [
        # rows: 1   2   4   8  16 32 33 34 64 256
        (8, (64, 32, 16, 8, 4, 2, 2, 1, 1, 1)),
        (4, (64, 64, 32, 16, 8, 4, 4, 2, 2, 1)),
        (1, (64, 64, 64, 64, 32, 16, 16, 8, 8, 2)),
    ],
)
def test_small_batches_are_cut_into_parts(kv_heads: int, splits: tuple[int, ...]) -> None:
    ours = CudaDecodeAttention(setup_of(LayerFacts(0.1), (8 * kv_heads, kv_heads), 128, 4))
    assert tuple(ours.splits_for(rows) for rows in (1, 2, 4, 8, 16, 32, 33, 34, 64, 256)) == splits


@pytest.mark.parametrize("launches", [1, 2])
def test_one_part_is_one_launch(launches: Any) -> None:
    ours = CudaDecodeAttention(setup_of(LayerFacts(0.1), (64, 4), 128, 4), DecodeOptions(launches=launches))
    assert [ours.joins_inside(rows) for rows in (1, 66, 67, 256)] == [launches == 1, launches == 1, True, True]


@pytest.mark.parametrize("bad", [{"launches": 3}, {"warps": 3}, {"stages": 0}, {"splits": 3}, {"lanes": 1}])
def test_options_out_of_range_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=next(iter(bad))):
        DecodeOptions(**bad)


def test_dependent_launches_are_refused_where_the_gpu_has_none() -> None:
    setup = setup_of(LayerFacts(0.1), (16, 8), 128, 4, sm=89)
    with pytest.raises(CannotRun, match=r"dependent_launch: wanted .*9\.0.*supported 8\.9.*leave it out"):
        CudaDecodeAttention(setup, DecodeOptions(dependent_launch=True))


@pytest.mark.parametrize("size", [1, 16])
def test_slots_come_from_the_engines_page_table(size: int) -> None:
    """Table rows in another order than the batch's, and unused ones; entries past a row's length are not read."""
    pool, q, view = make_case([33, 1, 70], size, 4, 2, 64, torch.float32)
    own, table_idx = view.slot_table()
    table = torch.full((6, own.shape[1] + 5), 2**31 - 1, dtype=torch.int32, device=DEVICE)
    for row, (line, length) in enumerate(zip((4, 0, 2), view.kv_lens_device.tolist(), strict=True)):
        table[line, :length] = own[table_idx[row], :length]
    view.page_table_device, view.table_idx_device = table, torch.tensor([4, 0, 2], dtype=torch.int32, device=DEVICE)
    facts = LayerFacts(0.125)
    out = backend(pool, q, facts).forward(q, q, q, 0, SimpleNamespace(view=view))
    torch.testing.assert_close(out.double().cpu(), reference(pool, q, view, facts), atol=2e-6, rtol=2e-6)


@FORMS
@pytest.mark.skipif(not DEPENDENT_LAUNCH, reason="this Triton has no dependent launches")
def test_dependent_launches_compute_the_same(launches: Any) -> None:
    pool, q, view = make_case([70, 20], 16, 4, 2, 64, torch.float32)
    facts = LayerFacts(0.125)
    if ON_GPU and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("needs compute capability 9.0")
    options = {"splits": 4, "block_tokens": 16, "launches": launches}
    outs = [
        run(pool, q, view, facts, backend(pool, q, facts, DecodeOptions(**options, dependent_launch=flag)))
        for flag in (False, True)
    ]
    assert torch.equal(*outs)


KIT_CASES = ("layers", "in_flight", "replay", "replay,window=20")


@pytest.mark.skipif(ON_GPU, reason="there the kit is run whole, for the backend as it is")
@pytest.mark.filterwarnings("ignore:(invalid value|All-NaN slice) encountered:RuntimeWarning")  # capture poisons rows
def test_one_launch_passes_the_conformance_kit() -> None:
    """The checks with several batches and with replays, in one capability set; the others take minutes interpreted."""
    spec = on_cpu(minisgl_attention_backends()[0])
    caps = replace(spec.caps[0], head_dims=OneOf(64), gqa_ratios=OneOf(2), page_sizes=OneOf(16))
    fixture = DeviceFixture("cpu")
    under_test = BackendUnderTest(replace(spec, caps=(caps,)), options={"launches": 1, "programs": 8})
    checks = {check.name: check for check in checks_of(under_test, fixture, quick=True)}
    for name in KIT_CASES:
        checks[f"decode/float32/{name}"].conform(under_test, fixture)
