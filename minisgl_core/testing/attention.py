"""Checks of the role ``attention``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import chain
from typing import TYPE_CHECKING, Any, Final, Literal

import torch

from minisgl_core.plugin_api import LayerFacts, Phase
from minisgl_core.registry.query import Requirement

from .attention_batches import check_in_flight, check_in_turn, check_moved, lens_of_moved
from .attention_bench import AttentionBench, Geometry, Lens, whose
from .attention_replay import CAPTURE_ROWS, LONGEST, check_replays, check_replays_in_turn, check_stress
from .check import Check, Result, caps_of
from .check_run import check_growth
from .compare import close, expect, fresh, unchanged
from .endurance import STEPS, Step, check_endurance, sizes_in_turn

if TYPE_CHECKING:
    from minisgl_core.plugin_api import BatchView

    from .backend_under_test import BackendUnderTest
    from .device_fixture import DeviceFixture, KitBatch

__all__ = ["AttentionCheck"]

INSTANCES: Final = 3
"""Number of instances in checks that use several in turns."""


@dataclass(frozen=True, kw_only=True, repr=False)
class AttentionCheck(Check):
    """One batch (or a few) against the float64 reference. ``rows``: (new tokens, total tokens) per row.

    ``scenario``: ``eager`` runs one batch; ``growth`` measures memory; ``endurance`` runs many steps of changing
    lengths; ``in_flight`` prepares the next batch before the last one has finished; in ``moved`` such batches have
    equal lengths, on other rows, pages and contents; ``in_turn`` uses three instances in turns. ``replay`` captures a
    decode step and replays it while lengths grow and shrink; ``replay_in_turn`` does so with three instances, and
    ``stress`` with many or long rows: ``capture_rows`` of up to ``longest`` tokens.
    """

    imports = "from minisgl_core.plugin_api import LayerFacts"

    scenario: Literal[
        "eager", "growth", "endurance", "in_flight", "moved", "in_turn", "replay", "stress", "replay_in_turn"
    ] = "eager"
    phase: Phase = "decode"
    dtype: str = "float32"
    kv_dtype: str = ""
    """Empty means ``dtype``."""
    page_size: int = 16
    kv_heads: int = 2
    gqa_ratio: int = 2
    head_dim: int = 64
    rows: tuple[tuple[int, int], ...] = ((1, 33),)
    layers: tuple[LayerFacts, ...] = (LayerFacts(scale=0.125),)
    capture_rows: int = CAPTURE_ROWS
    longest: int = LONGEST
    slots: int = 0
    """Least number of slots of the pool."""
    seed: int = 0

    def requirement(self, fixture: DeviceFixture) -> Requirement:
        features = set[str]()
        if any(facts.window is not None for facts in self.layers):
            features.add("window")
        if any(facts.softcap is not None for facts in self.layers):
            features.add("softcap")
        return Requirement(
            device=fixture.facts,
            dtype=self.dtype,
            kv_dtype=self.kv_dtype or self.dtype,
            head_dim=self.head_dim,
            gqa_ratio=self.gqa_ratio,
            page_size=self.page_size,
            kv_layout="NHD",
            phase=self.phase,
            capture=self.is_replay,
            features=frozenset(features),
        )

    def run(self, under_test: BackendUnderTest, fixture: DeviceFixture) -> Result:
        caps = caps_of(under_test, self, fixture)
        host_plan = caps is not None and caps.host_plan
        geometry = self._geometry(caps is not None and caps.finite_tail)
        pairs = (self._instance(under_test, fixture, geometry, place) for place in range(INSTANCES))
        first = bench, backend = next(pairs)
        note = ""
        match self.scenario:
            case "eager":
                worst = self._eager(bench, backend)
            case "growth":
                worst = self._growth(bench, backend)
            case "endurance":
                worst, note = self._endurance(bench, backend)
            case "in_flight":
                worst = check_in_flight(bench, backend, self.phase, self.rows)
            case "moved":
                worst = check_moved(bench, backend, self.phase, self.rows)
            case "in_turn":
                worst = check_in_turn(chain([first], pairs), self.phase, self.rows)
            case "replay":
                worst = check_replays(bench, backend, host_plan=host_plan)
            case "stress":
                worst = check_stress(bench, backend, host_plan=host_plan)
            case "replay_in_turn":
                worst = check_replays_in_turn(chain([first], pairs), host_plan=host_plan)
        fixture.platform.synchronize()
        backend.close()
        return Result({self.dtype: worst}, note)

    def _instance(
        self, under_test: BackendUnderTest, fixture: DeviceFixture, geometry: Geometry, place: int
    ) -> tuple[AttentionBench, Any]:
        """A pool and its backend. The second instance has the first one's shapes and other facts, the third other
        shapes.
        """
        if place == 1:
            layers = tuple(replace(facts, scale=facts.scale / 2) for facts in self.layers)
            geometry = replace(geometry, layers=layers)
        elif place == 2:
            kv_heads = self.kv_heads + 1
            geometry = replace(geometry, kv_heads=kv_heads, q_heads=kv_heads * self.gqa_ratio)
        lens = lens_of_moved(self.rows) if self.scenario == "moved" else self.rows
        rows, longest = len(lens), max(total for _, total in lens)
        if self.scenario == "endurance":
            longest = STEPS
        if self.is_replay:
            rows, longest = self.capture_rows - 1, self.longest
        bench = AttentionBench(fixture, geometry, rows, longest, self.seed + place, self.slots)
        backend = under_test.build(bench.setup(max(sum(new for new, _ in self.rows), rows + 1)))
        backend.bind_kv(bench.pool)
        return bench, backend

    @property
    def is_replay(self) -> bool:
        """True if a decode step is captured."""
        return self.scenario in ("replay", "stress", "replay_in_turn")

    def _geometry(self, finite_tail: bool) -> Geometry:
        return Geometry(
            self.dtype,
            self.kv_dtype or self.dtype,
            self.page_size,
            self.kv_heads,
            self.kv_heads * self.gqa_ratio,
            self.head_dim,
            self.layers,
            finite_tail,
        )

    def _eager(self, bench: AttentionBench, backend: Any) -> float:
        bench.fill([total for _, total in self.rows])
        batch = bench.eager(self.phase, self.rows)
        before = _copy(batch.view)
        backend.prepare_metadata(batch)
        backend.update_metadata(batch)
        worst = 0.0
        earlier: tuple[torch.Tensor, torch.Tensor] | None = None
        for layer in range(len(self.layers)):
            wide = bench.wide(sum(new for new, _ in self.rows))
            bench.write_inputs(wide, self.rows, layer)
            inputs, pool = wide.clone(), bench.pool.storage.clone()
            q, k, v = bench.views(wide)
            out = backend.forward(q, k, v, layer, batch)
            unchanged(wide, inputs, "q, k or v")
            expect(out.dtype == q.dtype, f"the result is {out.dtype}, expected {q.dtype}")
            want = bench.expected(q, self.rows, layer)
            worst = max(worst, close(out, want, f"layer {layer}", whose=whose(self.rows)))
            unchanged(bench.pool.storage, pool, "the pool")
            others = {"q, k or v": wide, "the pool": bench.pool.storage}
            fresh(out, others if earlier is None else {**others, "an earlier result": earlier[0]}, "the result")
            if earlier is not None:
                unchanged(earlier[0], earlier[1], "an earlier result")
            earlier = (out, out.clone())
        assert earlier is not None  # there is at least one layer
        self._check_again(bench, backend, batch, earlier)
        _check_view(batch.view, before)
        return worst

    def _check_again(
        self, bench: AttentionBench, backend: Any, batch: KitBatch, earlier: tuple[torch.Tensor, torch.Tensor]
    ) -> None:
        """A second call of the last layer must not write into the first one's result."""
        wide = bench.wide(sum(new for new, _ in self.rows))
        layer = len(self.layers) - 1
        bench.write_inputs(wide, self.rows, layer)
        out = backend.forward(*bench.views(wide), layer, batch)
        fresh(out, {"an earlier result": earlier[0]}, "the result")
        unchanged(*earlier, "an earlier result")

    def _endurance(self, bench: AttentionBench, backend: Any) -> tuple[float, str]:
        """The first row goes through all lengths, with up to as many new tokens as it has here; the others form the
        repeated call.
        """
        (new, _), constant = self.rows[0], self.rows[1:]
        others = range(1, len(self.rows))
        sizes = sizes_in_turn(bench.fixture)
        wide = bench.wide(sum(count for count, _ in constant))
        bench.write_inputs(wide, constant, 0, others)

        def run(lens: Lens, rows: Sequence[int], inputs: torch.Tensor) -> torch.Tensor:
            batch = bench.eager(self.phase, lens, rows)
            backend.prepare_metadata(batch)
            backend.update_metadata(batch)
            out: torch.Tensor = backend.forward(*bench.views(inputs), 0, batch)
            return out

        def fresh(number: int) -> float:
            total = sizes[number]
            lens = ((min(total, 1 + number % new), total),)
            bench.fill([total, *(length for _, length in constant)])
            inputs = bench.wide(lens[0][0])
            bench.write_inputs(inputs, lens, 0)
            return close(run(lens, (0,), inputs), bench.expected(bench.views(inputs)[0], lens, 0), "the result")

        bench.fill([1, *(length for _, length in constant)])
        return check_endurance(bench.fixture, Step(fresh, lambda: (run(constant, others, wide),)))

    def _growth(self, bench: AttentionBench, backend: Any) -> float:
        """After two warm-up steps, equal steps must not use more memory."""
        bench.fill([total for _, total in self.rows])
        wide = bench.wide(sum(new for new, _ in self.rows))
        bench.write_inputs(wide, self.rows, 0)

        def step() -> None:
            batch = bench.eager(self.phase, self.rows)
            backend.prepare_metadata(batch)
            backend.update_metadata(batch)
            backend.forward(*bench.views(wide), 0, batch)

        check_growth(bench.fixture, step)
        return 0.0


def _copy(view: BatchView) -> dict[str, Any]:
    values = {item.name: getattr(view, item.name) for item in fields(view)}
    return {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in values.items()}


def _check_view(view: BatchView, before: dict[str, Any]) -> None:
    for name, value in before.items():
        now = getattr(view, name)
        if isinstance(value, torch.Tensor):
            unchanged(now, value, f"batch.view.{name}")
        else:
            expect(now == value, f"batch.view.{name} was changed from {value!r} to {now!r}")
