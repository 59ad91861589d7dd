"""Any program of torch operations on fixed buffers: replayed = run eagerly."""

from __future__ import annotations

from collections.abc import Callable

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minisgl_cpu_sim.graph import EmulatedGraph, StrictReplay
from minisgl_cpu_sim.graph.poison import Rows

ROWS, COLUMNS, BUFFERS = 4, 6, 3
_LIBRARY = torch.library.Library("graph_property_test", "FRAGMENT")
_LIBRARY.define("mix_(Tensor(a!) x, Tensor y, Tensor(b!) z) -> Tensor")


def _mix(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    old = x.clone()
    x.copy_(y.tanh())
    z.add_(old)
    return old - y


_LIBRARY.impl("mix_", _mix, "CPU")
Matrix = torch.Tensor
Two = Callable[[Matrix, Matrix], Matrix]


def _in_rows(a: Matrix, b: Matrix) -> Matrix:
    a[1::2].copy_(b[::2] * 0.5)
    return a


def _scatter(a: Matrix, b: Matrix) -> Matrix:
    rows = (b[:, 0].abs() * 10).long() % ROWS
    a.index_put_((rows[:1],), b[:1])
    return a.index_select(0, rows)


def _top(a: Matrix, b: Matrix) -> Matrix:
    values, ids = a.topk(COLUMNS, -1)
    return values + b.gather(1, ids)


def _halves(a: Matrix, b: Matrix) -> Matrix:
    left, right = a.chunk(2, -1)
    left.add_(b[:, :3])
    return torch.cat([right, left], -1)


def _partial(a: Matrix, b: Matrix) -> Matrix:
    out = torch.empty(COLUMNS, ROWS).t()
    out[:2] = a[2:]
    out[2:] = b.flip(1)[:2]
    return out


OPERATIONS: list[Two] = [
    lambda a, b: a + b,
    lambda a, b: a * 0.5 - b,
    lambda a, b: a.add_(b),
    lambda a, b: a.copy_(b.tanh()),
    lambda a, b: (a @ b.t()) @ a,
    lambda a, b: torch.softmax(a, -1),
    lambda a, b: a.t().contiguous().t(),
    lambda a, b: a.reshape(COLUMNS, ROWS).t(),
    lambda a, b: torch.where(a > 0, a, b),
    lambda a, b: a - a.max(-1, keepdim=True).values,
    lambda a, b: a.clamp_(-1, 1),
    lambda a, b: a.double().cumsum(0).float().tanh(),
    lambda a, b: torch.stack([a[3], b[1], a[0], b[0]]),
    lambda a, b: a.masked_fill_(b > 0.5, 0.25),
    lambda a, b: a.mean(0, keepdim=True).expand(ROWS, COLUMNS),
    lambda a, b: torch.nn.functional.silu(a) * b.sigmoid(),
    lambda a, b: torch.nn.functional.linear(a, b).repeat(1, 2)[:, :COLUMNS],
    lambda a, b: torch.ops.graph_property_test.mix_(a, b, b.clone()),
    lambda a, b: torch.addmm(a, torch.eye(ROWS), b),
    _in_rows,
    _scatter,
    _top,
    _halves,
    _partial,
]
"""Each takes two (ROWS, COLUMNS) matrices, may write the first one, and returns such a matrix."""

INSTRUCTION = st.tuples(st.integers(0, len(OPERATIONS) - 1), st.integers(0, 30), st.integers(0, 30))


def _run(program: list[tuple[int, int, int]], buffers: list[Matrix]) -> list[Matrix]:
    values = list(buffers)
    for operation, first, second in program:
        a, b = values[-1 - first % len(values)], values[-1 - second % len(values)]
        if 0 in a.stride():
            a = a.clone()  # an expanded matrix cannot be written
        values.append(OPERATIONS[operation](a, b.clone() if a is b else b))
    return values[-3:]


def _same(a: list[Matrix], b: list[Matrix]) -> bool:
    return all(torch.equal(x.nan_to_num(7.0), y.nan_to_num(7.0)) for x, y in zip(a, b, strict=True))


@settings(max_examples=150, deadline=None)
@given(st.lists(INSTRUCTION, min_size=1, max_size=12), st.integers(0, 1000), st.booleans(), st.booleans())
def test_replay_equals_eager(program: list[tuple[int, int, int]], seed: int, inference: bool, strict: bool) -> None:
    torch.set_num_threads(1)
    with torch.no_grad(), torch.inference_mode(inference):
        generator = torch.Generator().manual_seed(seed)
        buffers = [torch.randn(ROWS, COLUMNS, generator=generator) for _ in range(BUFFERS)]
        graph = EmulatedGraph.capture(lambda: _run(program, buffers), strict=strict)
        for _ in range(2):
            start = [torch.randn(ROWS, COLUMNS, generator=generator) for _ in range(BUFFERS)]
            for buffer, value in zip(buffers, start, strict=True):
                buffer.copy_(value)
            eager = [t.clone() for t in _run(program, buffers)]
            after = [t.clone() for t in buffers]
            for buffer, value in zip(buffers, start, strict=True):
                buffer.copy_(value)
            if strict:
                check = StrictReplay(graph, lambda: _run(program, buffers), {})
                replayed = check({}, {}, Rows(0, 0), {})
            else:
                replayed = graph.replay()
            assert _same(replayed, eager)
            assert _same(buffers, after)
