"""Cases of the role ``attention``."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal

import torch

from minisgl_core.plugin_api import LayerFacts, Phase
from minisgl_core.registry.query import Need

from .attention_bench import AttentionBench, Geometry
from .case import Case, Finding, box_of
from .compare import close, expect, fresh, unchanged
from .trial import check_growth

if TYPE_CHECKING:
    from collections.abc import Sequence

    from minisgl_core.plugin_api import BatchView

    from .rig import KitBatch, Rig
    from .subject import Subject

__all__ = ["AttentionCase"]

REPLAYS = ((5, 17, 33), (6, 18, 34), (90, 64, 65), (1, 2), (16, 40, 3))
"""Lengths of the live rows at each replay, the new token included: they grow, shrink, and a row leaves and returns."""
CAPTURE_ROWS = 4


@dataclass(frozen=True, kw_only=True, repr=False)
class AttentionCase(Case):
    """One batch (or a few) against the float64 reference. ``rows``: (new tokens, tokens in all) per row.

    ``check``: ``eager`` runs one batch; ``replay`` captures a decode step and replays it while lengths grow and shrink;
    ``in_flight`` prepares the next batch before the last one is waited for; ``growth`` measures memory.
    """

    imports = "from minisgl_core.plugin_api import LayerFacts"

    check: Literal["eager", "replay", "in_flight", "growth"] = "eager"
    phase: Phase = "decode"
    dtype: str = "float32"
    kv_dtype: str = ""
    """Empty = dtype"""
    page_size: int = 16
    kv_heads: int = 2
    gqa_ratio: int = 2
    head_dim: int = 64
    rows: tuple[tuple[int, int], ...] = ((1, 33),)
    layers: tuple[LayerFacts, ...] = (LayerFacts(scale=0.125),)
    seed: int = 0

    def need(self, rig: Rig) -> Need:
        features = {}
        if any(facts.window is not None for facts in self.layers):
            features["window"] = "a shorter max_seq_len needs none"
        if any(facts.softcap is not None for facts in self.layers):
            features["softcap"] = ""
        return Need(
            device=rig.facts,
            dtype=self.dtype,
            kv_dtype=self.kv_dtype or self.dtype,
            head_dim=self.head_dim,
            gqa_ratio=self.gqa_ratio,
            page_size=self.page_size,
            kv_layout="NHD",
            phase=self.phase,
            capture=self.check == "replay",
            features=features,
        )

    def run(self, subject: Subject, rig: Rig) -> Finding:
        box = box_of(subject, self, rig)
        longest = max(total for _, total in self.rows)
        rows = len(self.rows)
        if self.check == "replay":
            longest, rows = max(max(lens) for lens in REPLAYS) + 6, CAPTURE_ROWS - 1
        bench = AttentionBench(rig, self._geometry(box is not None and box.finite_tail), rows, longest, self.seed)
        backend = subject.build(bench.setup(max(sum(new for new, _ in self.rows), CAPTURE_ROWS)))
        backend.bind_kv(bench.pool)
        if self.check == "replay":
            worst = self._replay(bench, backend, host_plan=box is not None and "decode" in box.host_plan)
        else:
            run = {"eager": self._eager, "in_flight": self._in_flight, "growth": self._growth}[self.check]
            worst = run(bench, backend)
        rig.platform.synchronize()
        backend.close()
        return Finding({self.dtype: worst})

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
            worst = max(worst, close(out, bench.expected(q, self.rows, layer), f"layer {layer}"))
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

    def _replay(self, bench: AttentionBench, backend: Any, *, host_plan: bool) -> float:
        rig, device = bench.rig, bench.rig.device
        rows = torch.full((CAPTURE_ROWS,), bench.rows, dtype=torch.int64, device=device)  # all are the dummy row
        inputs = [bench.wide(CAPTURE_ROWS) for _ in self.layers]
        bench.fill([1] * bench.rows)
        backend.init_capture_graph(bench.longest, (CAPTURE_ROWS,))
        batch = bench.captured(rows)
        backend.prepare_for_capture(batch)

        def step() -> tuple[torch.Tensor, ...]:
            bench.derive(batch, rows, None)
            backend.update_metadata(batch)
            return tuple(backend.forward(*bench.views(x), layer, batch) for layer, x in enumerate(inputs))

        captured = rig.capture(step, batch)
        worst = 0.0
        for number, lens in enumerate(REPLAYS):
            worst = max(worst, self._replay_once(bench, backend, captured, rows, inputs, lens, number, host_plan))
        if host_plan:
            last = (captured, rows, inputs, REPLAYS[-1], len(REPLAYS), host_plan)
            check_growth(rig, lambda: self._replay_once(bench, backend, *last))
        captured.close()
        return worst

    def _replay_once(
        self,
        bench: AttentionBench,
        backend: Any,
        captured: Any,
        rows: torch.Tensor,
        inputs: Sequence[torch.Tensor],
        lens: tuple[int, ...],
        number: int,
        host_plan: bool,
    ) -> float:
        live, per_row = len(lens), [(1, n) for n in lens]
        bench.deal_pages()
        bench.fill(lens)
        bench.lengths.zero_()
        bench.lengths[:live] = torch.tensor(lens, dtype=torch.int32).to(bench.rig.device) - 1
        rows.fill_(bench.rows)
        rows[:live] = torch.arange(live, device=rows.device)
        for layer, wide in enumerate(inputs):
            bench.write_inputs(wide, per_row, layer)
        if host_plan:
            batch = bench.eager("decode", per_row)
            batch.padded_size = CAPTURE_ROWS
            bench.derive(batch, rows, (*lens, *(1,) * (CAPTURE_ROWS - live)))
            backend.prepare_for_replay(batch)
        pool = bench.pool.storage.clone()
        captured.replay()
        worst = 0.0
        for layer, (out, wide) in enumerate(zip(captured.outputs, inputs, strict=True)):
            q = bench.views(wide)[0][:live]
            what = f"replay {number} (live lengths {list(lens)}), layer {layer}"
            worst = max(worst, close(out[:live], bench.expected(q, per_row, layer), what))
        unchanged(bench.pool.storage, pool, f"the pool, by replay {number},")
        return worst

    def _in_flight(self, bench: AttentionBench, backend: Any) -> float:
        """Batches of different sizes and lengths follow each other without a wait."""
        bench.fill([total for _, total in self.rows])
        runs = []
        for count in (len(self.rows), 1, len(self.rows) - 1, len(self.rows)) * 2:
            lens = self.rows[:count]
            wide = bench.wide(sum(new for new, _ in lens))
            bench.write_inputs(wide, lens, 0)
            batch = bench.eager(self.phase, lens)
            backend.prepare_metadata(batch)
            backend.update_metadata(batch)
            runs.append((lens, wide, backend.forward(*bench.views(wide), 0, batch)))
        return max(
            close(out, bench.expected(bench.views(wide)[0], lens, 0), f"batch {number} in flight")
            for number, (lens, wide, out) in enumerate(runs)
        )

    def _growth(self, bench: AttentionBench, backend: Any) -> float:
        """After two warm-up steps, equal steps leave no memory behind."""
        bench.fill([total for _, total in self.rows])
        wide = bench.wide(sum(new for new, _ in self.rows))
        bench.write_inputs(wide, self.rows, 0)

        def step() -> None:
            batch = bench.eager(self.phase, self.rows)
            backend.prepare_metadata(batch)
            backend.update_metadata(batch)
            backend.forward(*bench.views(wide), 0, batch)

        check_growth(bench.rig, step)
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
