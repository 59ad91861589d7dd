"""Checks of the role ``graph``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, Literal

import torch

from minisgl_core.plugin_api import GraphSetup, SamplingMode
from minisgl_core.registry.query import Requirement

from .check import Check, Result
from .compare import Mismatch, close, expect, same
from .graph_host import MAX_LEN, MAX_ROWS, ToyBatch, ToyHost
from .lifetime import LifetimeCheck

if TYPE_CHECKING:
    from collections.abc import Callable

    from .backend_under_test import BackendUnderTest
    from .device_fixture import DeviceFixture

__all__ = ["GraphCheck", "graph_checks"]

ALONE: Final = 6
"""The second of two runners is closed from this step on."""
MODES: Final[tuple[SamplingMode, ...]] = ("greedy", "random", "filtered")


@dataclass(frozen=True, kw_only=True, repr=False)
class GraphCheck(Check):
    """``capture``: every size and mode is captured; ``padding``: which batches can be replayed; ``size``: one size in
    every mode against eager steps; ``mixed``: batches that grow and shrink; ``in_turn``: two runners in one process;
    ``eager``: a runner that never captures.
    """

    scenario: Literal["capture", "padding", "size", "mixed", "in_turn", "eager"]
    sizes: tuple[int, ...] = (1, 2, 4, 8)
    size: int = 1
    seed: int = 0

    def requirement(self, fixture: DeviceFixture) -> Requirement:
        return Requirement(device=fixture.facts, capture=self.scenario != "eager", no_capture=self.scenario == "eager")

    def run(self, under_test: BackendUnderTest, fixture: DeviceFixture) -> Result:
        if self.scenario == "in_turn":
            return Result({"float32": self._in_turn(under_test, fixture)})
        host = ToyHost(fixture, self.seed)
        sizes = () if self.scenario == "eager" else self.sizes
        reports: list[str] = []
        runner = _captured(under_test, fixture, host, sizes, reports)
        if self.scenario == "capture":
            _check_captured(host, sizes, reports)
        elif self.scenario == "padding":
            _check_padding(runner, sizes)
        elif self.scenario == "eager":
            _check_eager(runner)
        else:
            batches = self._batches()
            worst = _check_replays(runner, host, ToyHost(fixture, self.seed), batches)
            runner.close()
            return Result({"float32": worst})
        runner.close()
        return Result()

    def _in_turn(self, under_test: BackendUnderTest, fixture: DeviceFixture) -> float:
        """Two runners over different hosts exist at once; the first outlives the second."""
        seeds = (self.seed, self.seed + 1)
        hosts, truths = ([ToyHost(fixture, seed) for seed in seeds] for _ in range(2))
        runners = [_captured(under_test, fixture, host, self.sizes, []) for host in hosts]
        worst = 0.0
        for number, batch in enumerate(self._batches()):
            for place in (0, 1) if number < ALONE else (0,):
                own = replace(batch)
                worst = max(worst, _check_replays(runners[place], hosts[place], truths[place], iter([own])))
            if number == ALONE - 1:
                runners[1].close()
        runners[0].close()
        return worst

    def _batches(self) -> Iterator[ToyBatch]:
        if self.scenario == "size":
            for number, mode in enumerate((*MODES, *MODES)):
                yield ToyBatch(tuple((row + number) % MAX_ROWS for row in range(self.size)), mode=mode)
            return
        for number, size in enumerate((3, 8, 1, 5, 2, 7, 4, 6, 1, 8)):
            yield ToyBatch(tuple((5 * row + number) % MAX_ROWS for row in range(size)), mode=MODES[number % 3])


def _captured(
    under_test: BackendUnderTest, fixture: DeviceFixture, host: ToyHost, sizes: tuple[int, ...], reports: list[str]
) -> Any:
    """A runner after its capture."""
    runner = under_test.build(
        GraphSetup(fixture.platform, fixture.device, host, sizes, MODES, MAX_LEN, _progress(reports))
    )
    runner.capture()
    fixture.platform.synchronize()
    return runner


def _progress(reports: list[str]) -> Callable[[str, int], Callable[[], None]]:
    def start(title: str, total: int) -> Callable[[], None]:
        reports.append(f"{title}: {total}")
        return lambda: reports.append("one")

    return start


def _check_captured(host: ToyHost, sizes: tuple[int, ...], reports: list[str]) -> None:
    wanted = {(size, mode) for size in sizes for mode in MODES}
    missing = sorted(wanted - set(host.captured))
    expect(not missing, f"not recorded: {missing}")
    expect(len(host.captured) == len(wanted), f"{len(host.captured)} captures for {len(wanted)} sizes and modes")
    for name, now, before in zip(host.state(), host.state().values(), _untouched(host), strict=True):
        same(now, before, f"after the captures, `{name}` of live rows")
    expect(reports.count("one") == len(wanted), f"the progress report says {reports[:3]}.. for {len(wanted)} captures")


def _untouched(host: ToyHost) -> tuple[torch.Tensor, ...]:
    rows = torch.arange(MAX_ROWS, device=host.device)
    return torch.zeros_like(rows), host.last_token[:MAX_ROWS], torch.zeros_like(host.cache[:MAX_ROWS])


def _check_padding(runner: Any, sizes: tuple[int, ...]) -> None:
    for mode in MODES:
        for size in range(1, MAX_ROWS + 1):
            batch = ToyBatch(tuple(range(size)), mode=mode)
            runner.pad_batch(batch)
            padded, fits = batch.padded_size, size <= max(sizes)
            what = f"a {mode} decode batch of {size} (captured are {list(sizes)})"
            expect(padded >= size, f"{what} is padded to {padded}")
            expect(runner.can_replay(batch) == fits, f"{what}, padded to {padded}: can_replay is not {fits}")
            expect(not fits or padded in sizes, f"{what} is padded to {padded}, which was not captured")
        batch = ToyBatch((0, 1), phase="prefill", mode=mode)
        runner.pad_batch(batch)
        expect(batch.padded_size == 2, f"a prefill batch of 2 is padded to {batch.padded_size}")
        expect(not runner.can_replay(batch), "a prefill batch can be replayed")


def _check_eager(runner: Any) -> None:
    for size in (1, 3, MAX_ROWS):
        batch = ToyBatch(tuple(range(size)))
        runner.pad_batch(batch)
        expect(batch.padded_size == size, f"a batch of {size} is padded to {batch.padded_size}")
        expect(not runner.can_replay(batch), "a runner that never captures says that it can replay")
    try:
        runner.replay(batch)
    except Exception:
        return
    raise Mismatch("replay() of a runner that never captures returns")


def _check_replays(runner: Any, host: ToyHost, truth: ToyHost, batches: Iterator[ToyBatch]) -> float:
    worst = 0.0
    for number, batch in enumerate(batches):
        what = f"step {number} (rows {list(batch.table_rows)}, {batch.mode})"
        runner.pad_batch(batch)
        expect(runner.can_replay(batch), f"{what} cannot be replayed at padded size {batch.padded_size}")
        host.upload(batch)
        steps, prepared = host.steps, host.prepared
        out = runner.replay(batch)
        expect(host.steps == steps, f"{what}: replay runs the step's Python")
        expect(host.prepared == prepared + 1, f"{what}: prepare_replay was called {host.prepared - prepared} times")
        eager = ToyBatch(batch.table_rows, mode=batch.mode, padded_size=batch.size)
        truth.upload(eager)
        want = truth.step(eager)
        worst = max(worst, close(out.logits[: batch.size], want.logits.to(torch.float64), f"{what}: logits"))
        same(out.next_tokens[: batch.size], want.next_tokens, f"{what}: next_tokens")
        _check_state(host, truth, what)
        host.finish(batch)
    return worst


def _check_state(host: ToyHost, truth: ToyHost, what: str) -> None:
    for name, now in host.state().items():
        wanted = truth.state()[name]
        if now.is_floating_point():
            close(now, wanted.to(torch.float64), f"{what}: afterwards, `{name}` of all rows")
        else:
            same(now, wanted, f"{what}: afterwards, `{name}` of all rows")


def graph_checks(under_test: BackendUnderTest, fixture: DeviceFixture, quick: bool) -> list[Check]:
    """For a capturing runner: sizes, modes, padding, replays. For others: that every step stays eager."""
    capability_sets = under_test.capability_sets(fixture.facts)
    if not any(caps.graph != "never" for caps in capability_sets):
        return [GraphCheck(name="eager", scenario="eager")] if capability_sets else []
    sizes = (1, 2, 3, 4, 5, 8)
    return [
        LifetimeCheck(name="lifetime", of=GraphCheck(name="size=2", scenario="size", size=2)),
        GraphCheck(name="capture", scenario="capture"),
        GraphCheck(name="padding", scenario="padding"),
        GraphCheck(name="padding/one_size", scenario="padding", sizes=(4,)),
        *(GraphCheck(name=f"size={size}", scenario="size", size=size) for size in (sizes if quick else range(1, 9))),
        GraphCheck(name="mixed", scenario="mixed"),
        GraphCheck(name="in_turn", scenario="in_turn"),
        GraphCheck(name="mixed/odd_sizes", scenario="mixed", sizes=(3, 5, 8), seed=1),
    ]
