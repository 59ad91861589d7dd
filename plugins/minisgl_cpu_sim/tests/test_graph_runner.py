"""EmulatedGraphRunner: which batches it pads and replays, and that replays equal eager steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from minisgl_core.plugin_api import GraphSetup, StepOutput
from minisgl_cpu_sim.graph import EmulatedGraphOptions, EmulatedGraphRunner, GraphViolation

MAX_ROWS, WIDTH, VOCAB, HIDDEN, PAGE = 24, 12, 40, 16, 2
DUMMY_SLOT = MAX_ROWS * WIDTH


@dataclass
class ToyBatch:
    """As much of a batch as a runner looks at; ``table_rows`` are its live rows."""

    table_rows: list[int]
    phase: str = "decode"
    mode: str = "greedy"
    padded_size: int = 0
    rows: torch.Tensor = field(default_factory=lambda: torch.empty(0))

    @property
    def size(self) -> int:
        return len(self.table_rows)


class ToyHost:
    """A one-layer decoder on fixed buffers with a paged cache: the host side of a graph runner."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(3)
        self.embedding = torch.randn(VOCAB, HIDDEN, generator=generator)
        self.w_out = torch.randn(VOCAB, HIDDEN, generator=generator)
        self.cache = torch.zeros(MAX_ROWS * WIDTH // PAGE + 1, PAGE, HIDDEN)
        self.rows = torch.full((MAX_ROWS + 1,), MAX_ROWS)
        self.lengths = torch.zeros(MAX_ROWS + 1, dtype=torch.int64)
        self.last_token = torch.arange(MAX_ROWS + 1) % VOCAB
        self.last_token[MAX_ROWS] = 0
        self.page_table = torch.arange((MAX_ROWS + 1) * WIDTH).reshape(MAX_ROWS + 1, WIDTH)
        self.page_table[MAX_ROWS] = DUMMY_SLOT
        self.lengths_host = [0] * MAX_ROWS
        self.forget: set[str] = set()
        self.events: list[Any] = []

    def step(self, batch: ToyBatch) -> StepOutput:
        self.events.append(("step", len(batch.rows), batch.mode))
        positions = self.lengths[batch.rows]
        x = self.embedding[self.last_token[batch.rows]]
        flat = self.cache.view(-1, HIDDEN)
        flat.index_put_((self.page_table[batch.rows, positions],), x)
        dead = torch.arange(WIDTH) > positions[:, None]
        keys = flat[self.page_table[batch.rows]].masked_fill(dead[:, :, None], 0.0)
        weights = torch.softmax((x[:, None] * keys).sum(-1).masked_fill(dead, float("-inf")), -1)
        logits = (weights[:, :, None] * keys).sum(1) @ self.w_out.t()
        if batch.mode == "random":
            logits = logits / 0.7
        tokens = logits.argmax(-1)
        self.lengths.index_put_((batch.rows,), positions + 1)
        self.last_token.index_put_((batch.rows,), tokens)
        self.lengths[MAX_ROWS].zero_()
        self.last_token[MAX_ROWS].zero_()
        return StepOutput(logits, tokens.to(torch.int32))

    def upload(self, batch: ToyBatch) -> None:
        """What an engine does before a pass: the batch's rows, padded with the dummy row."""
        padded = batch.table_rows + [MAX_ROWS] * (batch.padded_size - batch.size)
        if "rows" not in self.forget:
            self.rows[: batch.padded_size].copy_(torch.tensor(padded))
        batch.rows = self.rows[: batch.padded_size]

    def make_capture_batch(self, size: int, mode: Any) -> ToyBatch:
        self.events.append(("capture", size, mode))
        self.rows[:size].fill_(MAX_ROWS)
        return ToyBatch([], mode=mode, padded_size=size, rows=self.rows[:size])

    def prepare_replay(self, batch: ToyBatch) -> None:
        self.events.append(("prepare", batch.size))

    def input_buffers(self) -> dict[str, torch.Tensor]:
        return {"rows": self.rows, "lengths": self.lengths, "page_table": self.page_table}

    def expected_inputs(self, batch: ToyBatch) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        padded = batch.table_rows + [MAX_ROWS] * (batch.padded_size - batch.size)
        lengths = torch.tensor([self.lengths_host[row] for row in batch.table_rows])
        return {
            "rows": (self.rows[: batch.padded_size], torch.tensor(padded)),
            "lengths": (self.lengths[batch.table_rows], lengths),
        }


class PoisonedHost(ToyHost):
    """Says which pages no live row names."""

    def poison_targets(self, batch: ToyBatch) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        named = {
            int(slot) // PAGE
            for row in batch.table_rows
            for slot in self.page_table[row, : self.lengths_host[row] + 1].tolist()
        }
        return {"cache": (self.cache, torch.tensor([p for p in range(len(self.cache)) if p not in named]))}


def make_runner(
    host: ToyHost,
    sizes: tuple[int, ...],
    *,
    strict: bool = False,
    modes: tuple[str, ...] = ("greedy",),
    progress: Callable[[str, int], Callable[[], None]] | None = None,
) -> EmulatedGraphRunner:
    torch.set_num_threads(1)
    setup: Any = GraphSetup(None, torch.device("cpu"), host, sizes, modes, WIDTH, progress)  # type: ignore[arg-type]
    runner = EmulatedGraphRunner(setup, EmulatedGraphOptions(strict=strict))
    runner.capture()
    return runner


def run(host: ToyHost, runner: EmulatedGraphRunner, batch: Any) -> StepOutput:
    """One decode pass, as an engine makes it."""
    runner.pad_batch(batch)
    host.upload(batch)
    with torch.inference_mode():
        out = runner.replay(batch) if runner.can_replay(batch) else host.step(batch)
    for row in batch.table_rows:
        host.lengths_host[row] += 1
    return StepOutput(out.logits[: batch.size].clone(), out.next_tokens[: batch.size].clone())


@pytest.mark.parametrize("strict", [False, True])
def test_case_65_padding_to_graph_size(strict: bool) -> None:
    """Sizes shrink and grow across graphs; results and cache equal the eager run's, padding writes the dummy page."""
    host, eager = PoisonedHost(), ToyHost()
    runner, plain = make_runner(host, (1, 2, 4, 8, 16), strict=strict), make_runner(eager, ())
    for turn, size in enumerate((3, 5, 7, 9, 15, 17, 15, 9, 7, 5, 3)):
        rows = list(range(turn % 3, turn % 3 + size))
        batch, reference = ToyBatch(rows), ToyBatch(rows)
        out, want = run(host, runner, batch), run(eager, plain, reference)
        assert torch.equal(out.next_tokens, want.next_tokens)
        assert torch.allclose(out.logits, want.logits, atol=1e-5)
        assert torch.allclose(host.cache[:-1], eager.cache[:-1], atol=1e-5), "only the dummy page may differ"
        assert reference.padded_size == size
    replays = [event for event in host.events if event[0] == "prepare"]
    assert len(replays) == 10, "all but the batch of 17"


def test_padded_sizes() -> None:
    runner = make_runner(ToyHost(), (1, 2, 4, 8, 16))
    padded = {}
    for size in (1, 2, 3, 4, 5, 8, 9, 16, 17, 24):
        batch: Any = ToyBatch(list(range(size)))
        runner.pad_batch(batch)
        padded[size] = (batch.padded_size, runner.can_replay(batch))
    assert padded == {
        1: (1, True),
        2: (2, True),
        3: (4, True),
        4: (4, True),
        5: (8, True),
        8: (8, True),
        9: (16, True),
        16: (16, True),
        17: (17, False),
        24: (24, False),
    }


def test_prefill_and_unknown_modes_run_eagerly() -> None:
    runner = make_runner(ToyHost(), (4,), modes=("greedy", "random"))
    prefill: Any = ToyBatch([0, 1, 2], phase="prefill")
    runner.pad_batch(prefill)
    assert prefill.padded_size == 3
    assert not runner.can_replay(prefill)
    filtered: Any = ToyBatch([0, 1, 2], mode="filtered")
    runner.pad_batch(filtered)
    assert not runner.can_replay(filtered)


def test_captures_every_size_and_mode_largest_first_and_reports() -> None:
    host = ToyHost()
    seen: list[Any] = []

    def progress(title: str, total: int) -> Callable[[], None]:
        seen.append((title, total))
        return lambda: seen.append("done")

    make_runner(host, (1, 4, 2), modes=("greedy", "random"), progress=progress)
    captured = [event[1:] for event in host.events if event[0] == "capture"]
    assert captured == [(size, mode) for size in (4, 2, 1) for mode in ("greedy", "random")]
    assert seen == [("Capturing graphs", 6), *["done"] * 6]


def test_modes_have_graphs_of_their_own() -> None:
    host = ToyHost()
    runner = make_runner(host, (2,), modes=("greedy", "random"))
    greedy = run(host, runner, ToyBatch([0, 1]))
    host.lengths.zero_()
    host.last_token.copy_(torch.arange(MAX_ROWS + 1))
    random = run(host, runner, ToyBatch([0, 1], mode="random"))
    assert torch.allclose(random.logits, greedy.logits / 0.7)


def test_replays_run_no_python_and_prepare_once() -> None:
    host = ToyHost()
    runner = make_runner(host, (4,))
    host.events.clear()
    run(host, runner, ToyBatch([0, 1, 2]))
    assert host.events == [("prepare", 3)]


def test_case_69_no_sizes_no_graphs() -> None:
    def progress(title: str, total: int) -> Callable[[], None]:
        raise AssertionError("there is nothing to report")

    host = ToyHost()
    runner = make_runner(host, (), progress=progress)
    batch: Any = ToyBatch([0, 1, 2])
    runner.pad_batch(batch)
    assert (batch.padded_size, runner.can_replay(batch), host.events) == (3, False, [])
    runner.close()


def test_strict_names_the_forgotten_upload() -> None:
    host = ToyHost()
    runner = make_runner(host, (4,), strict=True)
    run(host, runner, ToyBatch([0, 1, 2]))
    host.forget.add("rows")
    with pytest.raises(
        GraphViolation, match=r"stale_buffer: rows: rows \[0\] hold \[0\], the host's records say \[5\]"
    ):
        run(host, runner, ToyBatch([5, 1, 2]))


def test_strict_names_a_buffer_that_was_replaced() -> None:
    host = ToyHost()
    runner = make_runner(host, (4,), strict=True)
    host.page_table = host.page_table.clone()
    with pytest.raises(GraphViolation, match=r"moved_pointer: page_table: was at 0x"):
        run(host, runner, ToyBatch([0]))


def test_strict_refuses_a_step_that_synchronises() -> None:
    class Reading(ToyHost):
        def step(self, batch: ToyBatch) -> StepOutput:
            self.longest = int(self.lengths[batch.rows].max())
            return super().step(batch)

    make_runner(Reading(), (2,))
    with pytest.raises(GraphViolation, match=r"host_read: Tensor.__int__.*test_graph_runner.py:\d+ in step"):
        make_runner(Reading(), (2,), strict=True)


def test_close_drops_all_graphs() -> None:
    host = ToyHost()
    runner = make_runner(host, (4,), strict=True)
    runner.close()
    batch: Any = ToyBatch([0])
    runner.pad_batch(batch)
    assert not runner.can_replay(batch)


def test_options_are_validated() -> None:
    assert EmulatedGraphOptions() == EmulatedGraphOptions(strict=False)
    with pytest.raises(ValidationError, match="strickt"):
        EmulatedGraphOptions(strickt=True)  # type: ignore[call-arg]
