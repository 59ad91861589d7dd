"""EmulatedGraph: a replay computes what the step computes, on what its fixed inputs hold now, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from minisgl_cpu_sim.graph import EmulatedGraph, GraphViolation, MemoryPool

_LIBRARY = torch.library.Library("graph_capture_test", "FRAGMENT")
_LIBRARY.define("swap_halves_(Tensor(a!) x) -> ()")
_LIBRARY.define("accumulate(Tensor x, Tensor(a!) total) -> Tensor")
_LIBRARY.define("largest(Tensor x) -> (Tensor, Tensor)")


def _swap_halves_(x: torch.Tensor) -> None:
    x.copy_(x.flip(0))


_LIBRARY.impl("swap_halves_", _swap_halves_, "CPU")
_LIBRARY.impl("accumulate", lambda x, total: total.add_(x).clone(), "CPU")
_LIBRARY.impl("largest", lambda x: tuple(x.max(-1)), "CPU")


@pytest.fixture(autouse=True, params=[False, True], ids=["no_grad", "inference"])
def _mode(request: pytest.FixtureRequest) -> Iterator[None]:
    """Torch dispatches composite operations differently in its two modes; every test runs in both."""
    torch.set_num_threads(1)
    with torch.no_grad(), torch.inference_mode(request.param):
        yield


def tensors(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(sum(map(sum, shapes)))
    return [torch.randn(shape, generator=generator) for shape in shapes]


def check_replays(step: Callable[[], Any], inputs: list[torch.Tensor], times: int = 3) -> EmulatedGraph[Any]:
    """Capture, then compare replays with eager runs on new inputs, outside memory included."""
    graph = EmulatedGraph.capture(step)
    generator = torch.Generator().manual_seed(1)
    for _ in range(times):
        fresh = [torch.randn(x.shape, generator=generator) if x.is_floating_point() else x.flip(0) for x in inputs]
        for x, new in zip(inputs, fresh, strict=True):
            x.copy_(new)
        eager = [t.clone() for t in torch.utils._pytree.tree_leaves(step())]
        after = [x.clone() for x in inputs]
        for x, new in zip(inputs, fresh, strict=True):
            x.copy_(new)
        replayed = torch.utils._pytree.tree_leaves(graph.replay())
        assert len(replayed) == len(eager)
        assert all(torch.equal(a, b) for a, b in zip(replayed, eager, strict=True))
        assert all(torch.equal(a, b) for a, b in zip(inputs, after, strict=True))
    return graph


def test_linear_layers() -> None:
    x, w1, w2, bias = tensors((4, 16), (32, 16), (8, 32), (8,))
    functional = torch.nn.functional
    check_replays(lambda: functional.linear(functional.silu(functional.linear(x, w1)), w2, bias), [x])


def test_paged_attention() -> None:
    q, k, v, cache_k, cache_v = tensors((3, 2, 8), (3, 8), (3, 8), (10, 8), (10, 8))
    slots, lengths = torch.tensor([2, 5, 9]), torch.tensor([3, 6, 10])

    def step() -> torch.Tensor:
        cache_k.index_put_((slots,), k)
        cache_v[slots] = v
        scores = q @ cache_k.t() / 8**0.5
        hidden = torch.arange(10)[None, :] >= lengths[:, None]
        return torch.softmax(scores.masked_fill(hidden[:, None, :], float("-inf")), -1) @ cache_v

    check_replays(step, [q, k, v, cache_k, cache_v, slots, lengths])


def test_scaled_dot_product_attention() -> None:
    q, k, v = tensors((1, 2, 5, 8), (1, 2, 5, 8), (1, 2, 5, 8))
    check_replays(lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True), [q, k, v])


def test_views_of_views_written_in_place() -> None:
    (x,) = tensors((6, 8))

    def step() -> tuple[torch.Tensor, torch.Tensor]:
        y = x * 2
        y.view(12, 4).t()[1:3].narrow(1, 2, 5).add_(1)
        x[::2, 1:4].mul_(y[1::2, 2:5])
        return y.transpose(0, 1), x[1]

    check_replays(step, [x])


def test_chunk_split_unbind_stack() -> None:
    (x,) = tensors((4, 12))

    def step() -> torch.Tensor:
        gate, up = (x + 1).chunk(2, -1)
        a, b = up.split([2, 4], -1)
        rows = torch.cat([gate, b, a], -1).unbind(0)
        return torch.stack(rows[::-1])

    check_replays(step, [x])


def test_several_outputs_and_expanded_outputs() -> None:
    (x,) = tensors((4, 6))

    def step() -> tuple[torch.Tensor, ...]:
        values, ids = x.topk(3, -1)
        ordered, order = torch.sort(x, dim=-1, descending=True)
        mean, variance = torch.var_mean(x, -1)
        return values, ids, ordered, order, mean, variance, x.mean(0).expand(3, 6)

    check_replays(step, [x])


def test_factories_and_partial_writes_start_afresh_in_every_replay() -> None:
    (x,) = tensors((4, 6))

    def step() -> torch.Tensor:
        total = torch.zeros(4, 6)
        out = torch.empty(4, 7)
        total += x
        out[:, :6] = total
        out[:, 6] = torch.arange(4)
        return out

    check_replays(step, [x])


def test_type_conversion_and_metadata_changes() -> None:
    (x,) = tensors((4, 6))

    def step() -> torch.Tensor:
        y = x.double().to(torch.float32).contiguous()
        y.t_()
        y.unsqueeze_(0)
        y.add_(1)
        return y.squeeze(0).reshape(-1).view(torch.int32).view(torch.float32)

    check_replays(step, [x])


def test_reductions_and_factories_keep_the_requested_type() -> None:
    (x,) = tensors((4, 300))

    def step() -> tuple[torch.Tensor, ...]:
        half = x.bfloat16()
        return (
            torch.softmax(half, -1, dtype=torch.float32),
            half.sum(-1, dtype=torch.float32),
            half.mean(-1, dtype=torch.float64),
            x.cumsum(-1, dtype=torch.float64),
            torch.zeros(3, dtype=torch.int32) + 1,
            torch.arange(3, dtype=torch.float64),
            torch.full_like(half, 0.3),
        )

    check_replays(step, [x])


def test_library_operation_with_mutable_argument() -> None:
    x, total = tensors((4, 6), (4, 6))

    def step() -> Any:
        y = x + 1
        torch.ops.graph_capture_test.swap_halves_(y[1:3])
        return torch.ops.graph_capture_test.accumulate(y, total)

    graph = check_replays(step, [x, total])
    names = [op.name for op in graph.ops]
    assert names.count("graph_capture_test.swap_halves_.default") == 1
    assert "aten.flip.default" not in names, "the body of a library operation is not recorded"


def test_library_operation_with_several_outputs() -> None:
    (x,) = tensors((4, 6))
    check_replays(lambda: torch.ops.graph_capture_test.largest(x), [x])


def test_state_advances_once_per_replay() -> None:
    count = torch.zeros(2, dtype=torch.int64)
    graph = EmulatedGraph.capture(lambda: count.add_(1), warmup=2)
    assert count.tolist() == [3, 3], "two warm-up runs and the capture"
    for _ in range(4):
        graph.replay()
    assert count.tolist() == [7, 7]


def test_a_host_read_is_frozen() -> None:
    x, length = torch.arange(6.0), torch.tensor(2)
    graph = EmulatedGraph.capture(lambda: x[: int(length)].sum() + 0)
    assert graph.replay().item() == 1.0
    length.fill_(4)
    assert graph.replay().item() == 1.0, "the replay never asks the host again"
    x.mul_(10)
    assert graph.replay().item() == 10.0, "but it reads device memory"
    assert [op.result for op in graph.ops if op.action == "host_read"] == [2]


def test_python_is_not_run_again() -> None:
    calls = []
    x = torch.ones(2)

    def step() -> torch.Tensor:
        calls.append(1)
        return x * len(calls)

    graph = EmulatedGraph.capture(step)
    graph.replay()
    assert len(calls) == 2
    assert graph.replay().tolist() == [2.0, 2.0]


def test_only_the_fixed_buffer_counts() -> None:
    buffer = torch.zeros(3)
    graph = EmulatedGraph.capture(lambda: buffer * 2)
    new = torch.tensor([1.0, 2.0, 3.0])
    assert graph.replay().tolist() == [0.0, 0.0, 0.0]
    buffer.copy_(new)
    assert graph.replay().tolist() == [2.0, 4.0, 6.0]


def test_results_keep_their_addresses() -> None:
    (x,) = tensors((4, 6))
    graph = EmulatedGraph.capture(lambda: (x + 1, torch.nn.functional.linear(x, x), x.max(-1)))
    before = [t.data_ptr() for t in torch.utils._pytree.tree_leaves(graph.result)]
    after = [t.data_ptr() for t in torch.utils._pytree.tree_leaves(graph.replay())]
    assert before == after


@pytest.mark.parametrize(
    ("kind", "step"),
    [
        ("dynamic_shape", lambda x: x[x > 0]),
        ("dynamic_shape", lambda x: x.nonzero()),
        ("dynamic_shape", lambda x: torch.where(x > 0)),
        ("dynamic_shape", lambda x: x.unique()),
        ("dynamic_shape", lambda x: torch.repeat_interleave(x, (x > 0).long().flatten()[:3], dim=0)),
        ("random", lambda x: torch.rand_like(x)),
        ("random", lambda x: torch.nn.functional.dropout(x, 0.5)),
        ("storage", lambda x: x.clone().resize_(100)),
    ],
)
def test_refused_at_capture(kind: str, step: Callable[[torch.Tensor], Any]) -> None:
    x = torch.arange(-3.0, 3.0).reshape(3, 2)
    with pytest.raises(GraphViolation, match=r"test_graph_capture.py:\d+ in <lambda>") as caught:
        EmulatedGraph.capture(lambda: step(x), warmup=0)
    assert caught.value.kind == kind


def test_integer_indexing_has_a_fixed_shape() -> None:
    (x,) = tensors((4, 6))
    rows = torch.tensor([0, 3, 3])
    counts = torch.tensor([2, 0, 1, 1])
    check_replays(lambda: (x[rows], torch.repeat_interleave(x, counts, dim=0, output_size=4)), [x, rows, counts])


def test_dropped_tensors_share_memory_and_held_ones_do_not() -> None:
    (x,) = tensors((64, 64))
    held: list[torch.Tensor] = []

    def step() -> torch.Tensor:
        held.clear()
        y = x
        for _ in range(20):
            y = y + 1
            y = y * 0.5
        held.append(y.sum(0))
        return torch.softmax(y, -1)

    pool = MemoryPool()
    graph = EmulatedGraph.capture(step, pool=pool)
    assert pool.nbytes == 2 * 64 * 64 * 4, "two of the forty live at a time"
    x.mul_(2)
    graph.replay()
    want = step()
    assert torch.equal(graph.replay(), want)
    second = EmulatedGraph.capture(step, pool=pool)
    assert pool.nbytes == 2 * 64 * 64 * 4, "a second graph needs no more"
    assert torch.equal(second.replay(), graph.replay())


def test_what_the_step_leaves_behind_is_filled_by_replays() -> None:
    (x,) = tensors((4, 6))
    kept: dict[str, torch.Tensor] = {}

    def step() -> torch.Tensor:
        kept["lengths"] = (x + 1).view(-1)[3:9]
        return x.sum()

    graph = EmulatedGraph.capture(step)
    x.fill_(4)
    graph.replay()
    assert kept["lengths"].tolist() == [5.0] * 6


def test_closing_frees_the_operations() -> None:
    (x,) = tensors((4, 6))
    graph = EmulatedGraph.capture(lambda: x + 1)
    result = graph.replay()
    graph.close()
    assert graph.ops == ()
    assert torch.equal(result, x + 1)


def test_operations_print_with_shapes_and_place() -> None:
    x, w = tensors((4, 6), (3, 6))
    graph = EmulatedGraph.capture(lambda: torch.nn.functional.linear(x, w).softmax(-1))
    text = str(graph.ops[-1])
    assert "softmax" in text
    assert "f32[4, 3]" in text
    assert "test_graph_capture.py" in text
