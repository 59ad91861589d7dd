"""The strict sanitiser: every mistake is found and named, correct steps pass, and checking changes no state."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from minisgl_cpu_sim.graph import EmulatedGraph, GraphViolation, Rows, StrictReplay, check_inputs, strict_check

_LIBRARY = torch.library.Library("graph_strict_test", "FRAGMENT")
_LIBRARY.define("stateful(Tensor x) -> Tensor")
_LIBRARY.define("hoarding(Tensor x) -> Tensor")
_HIDDEN = SimpleNamespace(calls=0, kept=[])


def _stateful(x: torch.Tensor) -> torch.Tensor:
    _HIDDEN.calls += 1
    return x.add(_HIDDEN.calls)


def _hoarding(x: torch.Tensor) -> torch.Tensor:
    _HIDDEN.kept.append(x * 2)
    return x + 1


_LIBRARY.impl("stateful", _stateful, "CPU")
_LIBRARY.impl("hoarding", _hoarding, "CPU")


@pytest.fixture(autouse=True, params=[False, True], ids=["no_grad", "inference"])
def _mode(request: pytest.FixtureRequest) -> Iterator[None]:
    torch.set_num_threads(1)
    _HIDDEN.calls, _HIDDEN.kept = 0, []
    with torch.no_grad(), torch.inference_mode(request.param):
        yield


class Decoder:
    """A step with all that a decode step has: fixed inputs, derived positions, a cache with a dummy page, state."""

    live, padded = 3, 4

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.table = torch.randn(20, 8, generator=generator)
        self.weight = torch.randn(8, 8, generator=generator) / 3
        self.rows = torch.tensor([0, 1, 2, 4])
        self.lengths = torch.tensor([3, 2, 1, 9, 0], dtype=torch.int32)
        self.last_token = torch.tensor([7, 8, 9, 10, 0])
        self.page_table = torch.arange(50).reshape(5, 10)
        self.page_table[4] = 50
        self.cache = torch.randn(51, 8, generator=generator)
        self.scale = 0.5

    def buffers(self) -> dict[str, torch.Tensor]:
        return {"rows": self.rows, "lengths": self.lengths, "last_token": self.last_token, "weight": self.weight}

    def step(self) -> torch.Tensor:
        positions = self.lengths[self.rows]
        x = self.table[self.last_token[self.rows]] @ self.weight
        self.cache[self.page_table[self.rows, positions]] = x
        keys = self.cache[self.page_table[self.rows]]
        dead = torch.arange(10) > positions[:, None]
        keys = keys.masked_fill(dead[:, :, None], 0.0)
        scores = (x[:, None, :] * keys).sum(-1) * self.scale
        out = torch.softmax(scores.masked_fill(dead, float("-inf")), -1)[:, None, :] @ keys
        self.lengths.index_put_((self.rows,), positions + 1)
        self.lengths[4].zero_()
        return out[:, 0] @ self.table.t()

    def places(self) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """Everything but what the live rows' page tables name up to their lengths."""
        named = {int(self.page_table[r, i]) for r in self.rows[: self.live] for i in range(int(self.lengths[r]) + 1)}
        return {"cache": (self.cache, torch.tensor([i for i in range(51) if i not in named]))}


class CapturedDecoder:
    """A decoder, its graph and its checker."""

    def __init__(self, decoder: Decoder | None = None) -> None:
        self.decoder = decoder or Decoder()
        self.graph = EmulatedGraph.capture(self.decoder.step, strict=True)
        self.check = StrictReplay(self.graph, self.decoder.step, self.decoder.buffers())

    def replay(self, expected: dict[str, tuple[torch.Tensor, torch.Tensor]] | None = None) -> torch.Tensor:
        d = self.decoder
        return self.check(d.buffers(), expected or {}, Rows(d.live, d.padded), d.places())

    def fails(self, kind: str) -> GraphViolation:
        with pytest.raises(GraphViolation) as caught:
            self.replay()
        assert caught.value.kind == kind, caught.value
        return caught.value


def test_a_correct_step_passes_and_state_advances_once() -> None:
    captured, plain = CapturedDecoder(), Decoder()
    plain.lengths.copy_(captured.decoder.lengths)
    plain.cache.copy_(captured.decoder.cache)
    for _ in range(4):
        want = plain.step()
        assert torch.equal(captured.replay()[:3], want[:3])
        assert torch.equal(captured.decoder.lengths, plain.lengths)
        assert torch.equal(captured.decoder.cache, plain.cache)


def test_a_finding_leaves_state_as_it_was() -> None:
    captured = CapturedDecoder()
    before = captured.decoder.lengths.clone(), captured.decoder.cache.clone()
    captured.decoder.scale = 0.25
    captured.fails("frozen_value")
    assert torch.equal(captured.decoder.lengths, before[0])
    assert torch.equal(captured.decoder.cache, before[1])
    captured.decoder.scale = 0.5
    captured.replay()
    assert captured.decoder.lengths[0] == before[0][0] + 1


def test_a_forgotten_copy_gives_a_wrong_output_and_is_named() -> None:
    captured = CapturedDecoder()
    host = {"rows": torch.tensor([2, 1, 0, 4]), "last_token": torch.tensor([11, 12, 13, 10, 0])}
    for missing in ("rows", "last_token"):
        for name, values in host.items():
            if name != missing:
                captured.decoder.buffers()[name].copy_(values)
        state = captured.decoder.lengths.clone(), captured.decoder.cache.clone()
        wrong = captured.graph.replay().clone()
        captured.decoder.lengths.copy_(state[0])
        captured.decoder.cache.copy_(state[1])
        expected = {name: (captured.decoder.buffers()[name], values) for name, values in host.items()}
        with pytest.raises(GraphViolation) as caught:
            captured.replay(expected)
        assert (caught.value.kind, caught.value.name) == ("stale_buffer", missing)
        captured.decoder.buffers()[missing].copy_(host[missing])
        right = captured.replay(expected)
        assert not torch.allclose(wrong[:3], right[:3])
        captured = CapturedDecoder()


def test_a_stale_buffer_is_reported_with_rows_and_values() -> None:
    lengths = torch.tensor([4, 7, 2, 9])
    check_inputs({"lengths": (lengths, lengths.clone())})
    with pytest.raises(
        GraphViolation, match=re.escape("lengths: rows [1, 3] hold [7, 9], the host's records say [8, 10]")
    ):
        check_inputs({"lengths": (lengths, torch.tensor([4, 8, 2, 10]))})
    with pytest.raises(GraphViolation, match="changed_shape"):
        check_inputs({"lengths": (lengths, lengths[:3])})


def test_a_moved_named_buffer_is_named_before_anything_runs() -> None:
    captured = CapturedDecoder()
    captured.decoder.lengths = captured.decoder.lengths.clone()
    found = captured.fails("moved_pointer")
    assert found.name == "lengths"


def test_a_moved_weight_is_found_in_the_operation_that_reads_it() -> None:
    captured = CapturedDecoder()
    captured.decoder.table = captured.decoder.table.clone()
    found = captured.fails("moved_pointer")
    assert found.name == "a tensor from outside without a name"
    assert "f32[20, 8]" in found.detail
    assert "test_graph_strict.py" in found.detail
    assert " in step" in found.detail


def test_a_frozen_python_number_is_found() -> None:
    captured = CapturedDecoder()
    captured.decoder.scale = 0.25
    found = captured.fails("frozen_value")
    assert "was 0.5 at capture and is 0.25 now" in found.detail


def test_control_flow_that_depends_on_the_host_is_found() -> None:
    flag, x = SimpleNamespace(on=False), torch.ones(3)

    def step() -> torch.Tensor:
        y = x + 1
        return y.sigmoid() if flag.on else y.tanh()

    graph = EmulatedGraph.capture(step)
    strict_check(graph, step)
    flag.on = True
    with pytest.raises(GraphViolation, match=r"captured #1 aten.tanh.*but the step now runs #1 aten.sigmoid") as caught:
        strict_check(graph, step)
    assert caught.value.kind == "control_flow"


def test_more_operations_than_captured_are_found() -> None:
    times, x = SimpleNamespace(n=1), torch.ones(3)

    def step() -> torch.Tensor:
        y = x
        for _ in range(times.n):
            y = y + 1
        return y

    graph = EmulatedGraph.capture(step)
    times.n = 2
    with pytest.raises(GraphViolation, match=r"captured nothing more, but the step now runs #1 aten\.add"):
        strict_check(graph, step)


def test_another_tensor_of_the_same_shape_is_found() -> None:
    flag, x = SimpleNamespace(on=False), torch.ones(3)

    def step() -> torch.Tensor:
        a, b = x + 1, x + 1
        return (b if flag.on else a).tanh()

    graph = EmulatedGraph.capture(step)
    flag.on = True
    with pytest.raises(GraphViolation) as caught:
        strict_check(graph, step)
    assert (caught.value.kind, caught.value.name) == ("control_flow", "aten.tanh.default")


def test_a_changed_shape_is_found() -> None:
    width, x = SimpleNamespace(n=4), torch.ones(8)
    step = lambda: x[: width.n].tanh()  # noqa: E731
    graph = EmulatedGraph.capture(step)
    width.n = 6
    with pytest.raises(GraphViolation) as caught:
        strict_check(graph, step)
    assert caught.value.kind in ("changed_shape", "frozen_value")
    assert "4" in caught.value.detail
    assert "6" in caught.value.detail


def test_a_changed_host_constant_is_found() -> None:
    value, x = SimpleNamespace(v=1.0), torch.ones(3)
    step = lambda: x * torch.tensor(value.v)  # noqa: E731
    graph = EmulatedGraph.capture(step, strict=True)
    strict_check(graph, step)
    value.v = 2.0
    with pytest.raises(GraphViolation, match=r"host data \[1.0\] at capture, \[2.0\] now"):
        strict_check(graph, step)


def test_a_host_read_that_changed_is_found_even_without_strict_capture() -> None:
    x, n = torch.arange(4.0), torch.tensor(2)
    step = lambda: x * int(n)  # noqa: E731
    graph = EmulatedGraph.capture(step)
    strict_check(graph, step)
    n.fill_(3)
    with pytest.raises(GraphViolation, match="gave the host 2 at capture and 3 now"):
        strict_check(graph, step)


@pytest.mark.parametrize(
    ("kind", "step"),
    [
        ("host_read", lambda x: x[0].item()),
        ("host_read", lambda x: x.tolist()),
        ("host_read", lambda x: x.numpy()),
        ("host_read", lambda x: x.cpu()),
        ("host_read", lambda x: np.asarray(x)),
        ("host_read", lambda x: bool(x.sum() > 0)),
        ("host_read", lambda x: list(range(int(x[2])))),
        ("host_read", lambda x: float(x[2])),
        ("host_read", lambda x: torch.equal(x, x)),
        ("host_read", lambda x: torch.allclose(x, x)),
        ("host_read", lambda x: x[x[1].long()]),
        ("host_copy", lambda x: x + torch.tensor([1.0, 2.0, 3.0])),
        ("host_copy", lambda x: x + torch.as_tensor(np.ones(3))),
        ("host_copy", lambda x: x + torch.from_numpy(np.ones(3))),
        ("host_copy", lambda x: x[[0, 2]]),
        ("dynamic_shape", lambda x: x[x > 0]),
    ],
)
def test_host_synchronisation_is_found_with_its_line(kind: str, step: Callable[[torch.Tensor], Any]) -> None:
    x = torch.arange(3.0)
    with pytest.raises(GraphViolation, match=r"test_graph_strict.py:\d+ in <lambda>") as caught:
        EmulatedGraph.capture(lambda: step(x), strict=True)
    assert caught.value.kind == kind


def test_an_operation_with_hidden_state_is_found() -> None:
    x = torch.ones(3)
    step = lambda: torch.ops.graph_strict_test.stateful(x)  # noqa: E731
    graph = EmulatedGraph.capture(step)
    with pytest.raises(GraphViolation) as caught:
        strict_check(graph, step)
    assert (caught.value.kind, caught.value.name) == ("different_value", "graph_strict_test.stateful.default")


def test_padding_that_reaches_live_rows_is_found() -> None:
    class Mixing(Decoder):
        def step(self) -> torch.Tensor:
            out = super().step()
            return out - out.mean(0)

    captured = CapturedDecoder(Mixing())
    found = captured.fails("poison")
    assert "aten.mean.dim" in found.name
    assert "live rows [0, 1, 2]" in found.detail


def test_padding_written_to_a_live_slot_is_found() -> None:
    captured = CapturedDecoder()
    captured.decoder.page_table[4] = captured.decoder.page_table[0, 0]
    found = captured.fails("poison")
    assert found.name == "cache"
    assert "[0]" in found.detail


def test_a_read_of_a_free_page_is_found() -> None:
    class Careless(Decoder):
        def step(self) -> torch.Tensor:
            return super().step() + self.cache[self.page_table[self.rows, 9]].sum(-1, keepdim=True)

    found = CapturedDecoder(Careless()).fails("poison")
    assert "live rows [0, 1, 2]" in found.detail


def test_reading_uninitialised_memory_is_found() -> None:
    x = torch.ones(4, 2)

    def step() -> torch.Tensor:
        out = torch.empty(4, 3)
        out[:, :2] = x
        return out.nan_to_num(5.0).sum(-1)

    graph = EmulatedGraph.capture(step)
    assert strict_check(graph, step).tolist() == [7.0] * 4, "uninitialised floats are NaN under the checks"


def test_memory_that_every_step_leaves_behind_is_found() -> None:
    kept: list[torch.Tensor] = []
    x = torch.ones(3)

    def step() -> torch.Tensor:
        kept.append(x + 1)
        return x * 2

    check = StrictReplay(EmulatedGraph.capture(step), step, {})
    check({}, {}, Rows(0, 0), {})
    check({}, {}, Rows(0, 0), {})
    with pytest.raises(GraphViolation, match=r"growing_memory: aten.add.Tensor: .* in #0 aten.add"):
        check({}, {}, Rows(0, 0), {})


def test_memory_that_a_library_operation_hoards_is_found() -> None:
    x = torch.ones(3)
    step = lambda: torch.ops.graph_strict_test.hoarding(x)  # noqa: E731
    check = StrictReplay(EmulatedGraph.capture(step), step, {})
    check({}, {}, Rows(0, 0), {})
    check({}, {}, Rows(0, 0), {})
    with pytest.raises(GraphViolation, match=r"growing_memory: graph_strict_test.hoarding"):
        check({}, {}, Rows(0, 0), {})


def test_replacing_what_the_last_step_left_is_no_growth() -> None:
    kept: dict[str, torch.Tensor] = {}
    x = torch.ones(3)

    def step() -> torch.Tensor:
        kept["view"] = x + 1
        return kept["view"] * 2

    check = StrictReplay(EmulatedGraph.capture(step), step, {})
    for _ in range(6):
        check({}, {}, Rows(0, 0), {})
    assert kept["view"].tolist() == [2.0] * 3
