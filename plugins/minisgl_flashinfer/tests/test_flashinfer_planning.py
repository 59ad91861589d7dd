"""What the plugin does around the library: sizes, the page list, the guard of the pinned staging memory."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch

from minisgl_core.builtin.platform import CpuPlatform
from minisgl_core.plugin_api import AttentionSetup, LayerFacts
from minisgl_core.testing.attention_bench import AttentionBench, Geometry
from minisgl_core.testing.device_fixture import DeviceFixture
from minisgl_cpu_sim.fakes import flashinfer as library
from minisgl_cpu_sim.fakes import inject
from minisgl_flashinfer.attention import FlashInferAttention
from minisgl_flashinfer.options import FlashInferOptions
from minisgl_flashinfer.pages import flatten_pages
from minisgl_flashinfer.sizes import decode_partials, use_tensor_cores, workspace_bytes

MIB = 1 << 20


@pytest.mark.parametrize(
    ("ratio", "wanted", "chosen"),
    [
        (1, None, False),
        (3, None, False),
        (4, None, True),
        (8, False, False),
        (2, True, True),
        (5, None, True),
        (7, False, True),  # the CUDA-core kernel does not exist
    ],
)
def test_tensor_cores_by_ratio(ratio: int, wanted: bool | None, chosen: bool) -> None:
    assert use_tensor_cores(ratio, wanted) is chosen


def test_the_workspace_holds_a_prefill_that_splits() -> None:
    assert workspace_bytes(16, 8, 128, None) == 128 * MIB
    assert workspace_bytes(64, 4, 128, None) == 64 * 80 * 128 * 129 * 4
    assert workspace_bytes(64, 4, 128, 64) == 64 * MIB


def test_partial_results_of_a_captured_decode() -> None:
    assert decode_partials(1, 32, 8, 128) == 32 * 40 * 16 * 129 * 4  # the grid decides: 320 / 8 tiles
    assert decode_partials(256, 32, 8, 128) == 32 * (64 + 256) * 16 * 129 * 4  # the rows decide


@pytest.mark.parametrize("body", ["torch", "triton"])
def test_the_page_list_is_what_the_view_says(body: str) -> None:
    if body == "triton":
        pytest.importorskip("triton")
        from minisgl_flashinfer.triton_ops.pages import launch as fill
    else:
        fill = flatten_pages
    random = torch.Generator().manual_seed(1)
    for rows, width, size in ((1, 1, 1), (5, 7, 16), (3, 2500, 1), (9, 3, 64)):
        page_ids = torch.randint(0, 1 << 20, (rows, width + 3), generator=random, dtype=torch.int32)[:, :width]
        lens = torch.randint(1, width * size + 1, (rows,), generator=random, dtype=torch.int32)
        counts = (lens + size - 1) // size
        want = torch.cat([ids[:count] for ids, count in zip(page_ids, counts.tolist(), strict=True)])
        indptr, last, pages = (torch.full((n,), -1, dtype=torch.int32) for n in (rows + 1, rows, rows * width))
        fill(page_ids, lens, size, indptr, pages, last)
        assert indptr.tolist() == [0, *counts.cumsum(0).tolist()]
        assert torch.equal(pages[: len(want)], want)
        assert (pages[len(want) :] == -1).all()
        assert torch.equal(last, lens - (counts - 1) * size)


def test_the_views_flat_pages_are_the_same_list() -> None:
    view = _bench().eager("decode", ((1, 1), (1, 20), (1, 70))).view
    indptr, pages, last = (torch.zeros(n, dtype=torch.int32) for n in (4, 8, 3))
    flatten_pages(view.page_ids_device, view.kv_lens_device, 16, indptr, pages, last)
    for got, want in zip(view.flat_page_ids_device(), (indptr, pages, last), strict=True):
        assert got.dtype == torch.int32
        assert torch.equal(got, want)


class _LoggedPlatform(CpuPlatform):
    """Its events record the calls on them."""

    def __init__(self, log: list[str]) -> None:
        super().__init__()
        self._log = log
        self._events = 0

    def new_event(self) -> Any:
        self._events += 1
        number, log = self._events, self._log

        class Event:
            def record(self) -> None:
                log.append(f"record {number}")

            def synchronize(self) -> None:
                log.append(f"wait {number}")

            def query(self) -> bool:
                return True

        return Event()


def _setup(platform: Any = None, layers: tuple[LayerFacts, ...] = (LayerFacts(0.1),), **changes: Any) -> AttentionSetup:
    facts: dict[str, Any] = {
        "device": torch.device("cpu"),
        "dtype": torch.float32,
        "kv_dtype": torch.float32,
        "kv_layout": "NHD",
        "page_size": 16,
        "q_heads": 4,
        "kv_heads": 2,
        "head_dim": 64,
        "layers": layers,
        "max_batch": 4,
        "max_tokens": 64,
        "max_seq_len": 128,
        "batches_in_flight": 2,
        "platform": platform or CpuPlatform(),
        **changes,
    }
    return AttentionSetup(**facts)


SMALL = FlashInferOptions(workspace_mib=16)


def _bench() -> AttentionBench:
    bench = AttentionBench(
        DeviceFixture("cpu"), Geometry("float32", "float32", 16, 2, 4, 64, (LayerFacts(0.1),)), 3, 128, 0
    )
    bench.fill([1, 20, 70])
    return bench


def test_case_62_a_plan_waits_for_the_copy_of_the_last_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eager batches use two sets of wrappers in turn; each plan first waits for its own wrapper's last copy."""
    log: list[str] = []
    inject(monkeypatch, "flashinfer")
    real_plan = library.BatchDecodeWithPagedKVCacheWrapper.plan

    def plan(self: Any, *args: Any, **kwargs: Any) -> None:
        log.append("plan")
        real_plan(self, *args, **kwargs)

    monkeypatch.setattr(library.BatchDecodeWithPagedKVCacheWrapper, "plan", plan)
    backend = FlashInferAttention(_setup(_LoggedPlatform(log)), SMALL)
    bench = _bench()
    for _ in range(3):
        backend.prepare_metadata(bench.eager("decode", ((1, 1), (1, 20), (1, 70))))
    first, second = log[0].split()[1], log[3].split()[1]
    assert first != second
    assert log == [*_guarded(first), *_guarded(second), *_guarded(first)]


def _guarded(number: str) -> list[str]:
    return [f"wait {number}", "plan", f"record {number}"]


def test_case_62_a_replay_waits_for_the_copy_of_its_own_last_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    inject(monkeypatch, "flashinfer")

    def fast_plan(*args: Any, **kwargs: Any) -> None:
        log.append("plan")

    monkeypatch.setattr(library, "fast_decode_plan", fast_plan)
    backend, bench = FlashInferAttention(_setup(_LoggedPlatform(log)), SMALL), _bench()
    backend.init_capture_graph(128, (1, 3))
    numbers = {}
    for rows in (3, 1):
        batch = bench.captured(torch.full((rows,), 3))
        log.clear()
        backend.prepare_for_capture(batch)
        numbers[rows] = log[0].split()[1]
    log.clear()
    for rows in (3, 1, 3):
        backend.prepare_for_replay(bench.eager("decode", ((1, 20),) * rows))
    assert log == [line for rows in (3, 1, 3) for line in _guarded(numbers[rows])]


def test_two_prepared_batches_keep_their_own_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    inject(monkeypatch, "flashinfer")
    backend, bench = FlashInferAttention(_setup(), SMALL), _bench()
    backend.bind_kv(bench.pool)
    batches = [(rows, bench.eager("decode", rows)) for rows in (((1, 1), (1, 20), (1, 70)), ((1, 1), (1, 20)))]
    for _, batch in batches:
        backend.prepare_metadata(batch)
    for rows, batch in batches:
        wide = bench.wide(len(rows))
        bench.write_inputs(wide, rows, 0)
        q, k, v = bench.views(wide)
        torch.testing.assert_close(backend.forward(q, k, v, 0, batch).double(), bench.expected(q, rows, 0))


def test_equal_layers_share_a_plan_and_a_window_no_sequence_exceeds_is_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plans: list[dict[str, Any]] = []
    inject(monkeypatch, "flashinfer")
    real = library.BatchPrefillWithPagedKVCacheWrapper.plan

    def plan(self: Any, *args: Any, **kwargs: Any) -> None:
        plans.append(kwargs)
        real(self, *args, **kwargs)

    monkeypatch.setattr(library.BatchPrefillWithPagedKVCacheWrapper, "plan", plan)
    layers = (LayerFacts(0.1, 20), LayerFacts(0.1, 128), LayerFacts(0.1), LayerFacts(0.1, 20), LayerFacts(0.2))
    backend = FlashInferAttention(_setup(layers=layers), SMALL)
    backend.prepare_metadata(_bench().eager("prefill", ((1, 1), (20, 20))))
    assert [(p["sm_scale"], p["window_left"], p["causal"]) for p in plans] == [
        (0.1, 19, True),
        (0.1, -1, True),
        (0.2, -1, True),
    ]


@pytest.mark.parametrize(("rows", "own"), [(3, False), (256, True)])
def test_graphs_of_many_rows_have_room_for_their_partial_results(
    monkeypatch: pytest.MonkeyPatch, rows: int, own: bool
) -> None:
    """The fake, like the library, refuses a plan whose partial results do not fit."""
    inject(monkeypatch, "flashinfer")
    geometry = Geometry("float32", "float32", 16, 8, 40, 64, (LayerFacts(0.1),))
    bench = AttentionBench(DeviceFixture("cpu"), geometry, rows, 20, 0)
    backend = FlashInferAttention(_setup(q_heads=40, kv_heads=8, max_batch=rows), SMALL)
    backend.init_capture_graph(20, (rows,))
    assert (backend._graph_workspace is not backend._workspace) is own
    backend.prepare_for_capture(bench.captured(torch.full((rows,), rows)))
    backend.prepare_for_replay(bench.eager("decode", ((1, 20),) * rows))


def test_a_captured_batch_cannot_be_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    inject(monkeypatch, "flashinfer")
    backend, bench = FlashInferAttention(_setup(), SMALL), _bench()
    with pytest.raises(RuntimeError, match="needs a batch with host lengths"):
        backend.prepare_metadata(bench.captured(torch.tensor([3])))


def test_close_gives_the_memory_back(monkeypatch: pytest.MonkeyPatch) -> None:
    inject(monkeypatch, "flashinfer")
    backend = FlashInferAttention(_setup(), SMALL)
    backend.init_capture_graph(128, (1, 2))
    backend.prepare_for_capture(_bench().captured(torch.tensor([3])))
    held = [weakref.ref(getattr(backend, name)) for name in ("_workspace", "_pages", "_indptr", "_last_page_len")]
    assert all(ref() is not None for ref in held)
    backend.close()
    gc.collect()
    assert [ref() for ref in held] == [None] * 4
