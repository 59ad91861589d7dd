"""Running a capsule on a backend: without the model, against what was recorded and against the float64 reference."""

from __future__ import annotations

import importlib.metadata
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from minisgl_core import __version__
from minisgl_core.errors import BackendError, UsageError
from minisgl_core.kvcache.pool import repaged
from minisgl_core.plugin_api import AttentionSetup, BackendSpec, BatchView, LayerFacts
from minisgl_core.registry.matching import kernel_page_size, match
from minisgl_core.registry.query import Need
from minisgl_core.testing import Mismatch, Rig, Subject, reference
from minisgl_core.testing.rig import KitBatch, dtype_named
from minisgl_core.testing.timing import Timer, median_seconds

from .difference import Difference, row_of, tolerance_of, worst
from .format import Capsule, RecordedLayer, load_capsule

if TYPE_CHECKING:
    from minisgl_core.plugin_api import Caps

__all__ = ["LayerResult", "ReplayReport", "check_capsule", "errors_against_reference", "expected", "replay"]


@dataclass(frozen=True, slots=True)
class LayerResult:
    """Worst errors of one layer, ``|got - want| / (1 + |want|)``."""

    layer: int
    error: float
    """Of the backend, against the float64 reference"""
    against_recorded: float
    """Of the backend, against what was recorded; infinity where the recorded backend raised"""
    recorded_error: float
    """Of what was recorded, against the float64 reference"""
    worst: str
    """Where the first of these is, and the two values"""


@dataclass(frozen=True, slots=True)
class ReplayReport:
    """What a replay found. The float64 reference decides: what was recorded may itself be wrong."""

    capsule: str
    recorded_by: str
    backend: str
    device: str
    versions: Mapping[str, str]
    tolerance: float
    layers: tuple[LayerResult, ...]
    raised: str = ""
    """What the backend raised instead of a result"""
    metadata_us: float | None = None
    """Median time of the step's metadata"""
    layer_us: float | None = None
    """Median time of one layer"""

    @property
    def passed(self) -> bool:
        return not self.raised and all(layer.error <= self.tolerance for layer in self.layers)

    @property
    def worst(self) -> LayerResult | None:
        """The layer with the largest error."""
        return max(self.layers, key=lambda layer: layer.error, default=None)

    def failure(self) -> str:
        """What is wrong in one line; empty if it passed."""
        if self.raised:
            return f"{self.backend} raised {self.raised}"
        found = self.worst
        if self.passed or found is None:
            return ""
        return f"layer {found.layer}: {found.worst} (error {found.error:.3g}, allowed {self.tolerance:.3g})"

    def to_json(self) -> dict[str, Any]:
        """As plain JSON data."""
        return {**asdict(self), "passed": self.passed, "layers": [_finite(asdict(layer)) for layer in self.layers]}


def _finite(values: dict[str, Any]) -> dict[str, Any]:
    """JSON has no infinity."""
    return {k: str(v) if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}


def replay(
    capsule: Capsule, subject: Subject, rig: Rig, *, repeats: int = 20, timer: Timer | None = None
) -> ReplayReport:
    """Run every layer of a capsule once, judge the results, and time them (``repeats`` 0 = do not).

    Raises :class:`BackendError` with all reasons for a capsule outside the backend's declared caps.
    """
    box = _box_of(capsule, subject, rig)
    with rig.active():
        run = _Run(capsule, subject, box, rig)
        report = run.judged()
        if repeats and not report.raised:
            timer = timer or partial(median_seconds, repeats=repeats)
            layers = timer(run.all_layers, rig) / len(capsule.layers)
            report = replace(report, metadata_us=timer(run.metadata, rig) * 1e6, layer_us=layers * 1e6)
        run.close()
    return report


def check_capsule(path: str | Path, backend: BackendSpec | str, *, device: str = "auto") -> None:
    """For tests: raise :class:`~minisgl_core.testing.Mismatch` unless the backend computes a capsule right.

    ``backend``: ``"attention:NAME"`` of an installed plugin, or a spec.
    """
    rig = Rig(device)
    report = replay(load_capsule(path), Subject.of(backend, rig.facts, role="attention"), rig, repeats=0)
    if not report.passed:
        raise Mismatch(report.failure())


def expected(capsule: Capsule, layer: RecordedLayer, row: int) -> torch.Tensor:
    """float64 (new tokens, H, D) of one row, from its pages."""
    size, total = capsule.geometry.page_size, capsule.kv_lens[row]
    pages = capsule.page_ids[row, : -(-total // size)].long()
    k, v = (cache[pages].flatten(0, 1)[:total] for cache in (layer.k_pages, layer.v_pages))
    start = sum(capsule.q_lens[:row])
    return reference.attention(layer.q[start : start + capsule.q_lens[row]], k, v, layer.facts)


def _expected_rows(capsule: Capsule, layer: RecordedLayer) -> torch.Tensor:
    """float64 (tokens of real rows, H, D)"""
    return torch.cat([expected(capsule, layer, row) for row in range(len(capsule.uids))])


def errors_against_reference(capsule: Capsule, place: int, results: Sequence[torch.Tensor]) -> tuple[float, ...]:
    """Worst error of each (T, H, D) host tensor as a result of one layer."""
    want = _expected_rows(capsule, capsule.layers[place])
    return tuple(worst(result[: capsule.real_tokens], want).error for result in results)


def _box_of(capsule: Capsule, subject: Subject, rig: Rig) -> Caps:
    if subject.spec.role != "attention":
        raise UsageError(
            f"{subject.label} is a backend of role {subject.spec.role}, and the capsule is of attention",
            field="--backend",
            value=subject.label,
            remedy="write attention:NAME",
        )
    g = capsule.geometry
    layers = [layer.facts for layer in capsule.layers]
    features = {name: "" for name in ("window", "softcap") if any(getattr(item, name) is not None for item in layers)}
    need = Need(
        device=rig.facts,
        dtype=g.dtype,
        kv_dtype=g.kv_dtype,
        head_dim=g.head_dim,
        gqa_ratio=g.q_heads // g.kv_heads,
        page_size=g.page_size,
        kv_layout=g.kv_layout,
        phase=capsule.phase,
        features=features,
    )
    box, reasons = match(subject.spec, need)
    if box is None:
        why = "; ".join(map(str, reasons))
        raise BackendError(
            f"{subject.label} cannot run this capsule ({capsule.summary()}): {why}",
            field="--backend",
            value=subject.label,
            remedy="name a backend that declares it",
        )
    return box


class _Pool:
    """The capsule's pages on the device; implements ``KVPool``."""

    layout = "NHD"

    def __init__(self, capsule: Capsule, device: torch.device) -> None:
        self.num_pages, self.page_size = capsule.num_pages, capsule.geometry.page_size
        self._caches = [(layer.k_pages.to(device), layer.v_pages.to(device)) for layer in capsule.layers]

    def k_cache(self, layer: int) -> torch.Tensor:
        return self._caches[layer][0]

    def v_cache(self, layer: int) -> torch.Tensor:
        return self._caches[layer][1]


class _Run:
    """A capsule on the device, and the backend built for it."""

    def __init__(self, capsule: Capsule, subject: Subject, box: Caps, rig: Rig) -> None:
        self._capsule, self._subject, self._rig = capsule, subject, rig
        self._page_size = kernel_page_size(box.page_sizes, capsule.geometry.page_size) or capsule.geometry.page_size
        facts = tuple(layer.facts for layer in capsule.layers)
        self._backend = subject.build(_setup_of(capsule, self._page_size, facts, rig))
        self._backend.bind_kv(repaged(_Pool(capsule, rig.device), self._page_size))
        self._batch = self._new_batch()
        self._inputs = [[x.to(rig.device) for x in (layer.q, layer.k, layer.v)] for layer in capsule.layers]

    def _new_batch(self) -> KitBatch:
        c, device = self._capsule, self._rig.device
        cu_q = torch.tensor([0, *c.q_lens]).cumsum(0).to(device, torch.int32)
        kv_lens = torch.tensor(c.kv_lens, dtype=torch.int32, device=device)
        view = BatchView(
            c.q_lens, c.kv_lens, max(c.q_lens), max(c.kv_lens), cu_q, kv_lens, self._page_ids(), self._page_size
        )
        positions, out_loc = c.positions.to(device), c.out_loc.to(device)
        return KitBatch(c.phase, len(c.uids), len(c.q_lens), view, positions, out_loc)

    def _page_ids(self) -> torch.Tensor:
        """(B, P) in the kernels' page size; entries past the live length name the dummy page."""
        c, size = self._capsule, self._page_size
        parts = c.geometry.page_size // size
        ids = (c.page_ids[:, :, None] * parts + torch.arange(parts)).flatten(1)[:, : -(-max(c.kv_lens) // size)]
        starts = torch.arange(ids.shape[1]) * size
        ids = ids.masked_fill(starts[None, :] >= torch.tensor(c.kv_lens)[:, None], c.num_pages * parts)
        return ids.to(self._rig.device, torch.int32)

    def metadata(self) -> None:
        """The step's host and device metadata."""
        self._batch.scratch.clear()
        self._backend.prepare_metadata(self._batch)
        self._backend.update_metadata(self._batch)

    def all_layers(self) -> list[torch.Tensor]:
        """Every layer's result."""
        return [self._backend.forward(*given, place, self._batch) for place, given in enumerate(self._inputs)]

    def judged(self) -> ReplayReport:
        c = self._capsule
        raised, results = "", []
        try:
            self.metadata()
            # a backend may write into what it is given: each layer's own inputs are for the timing
            for place, given in enumerate(self._inputs):
                results.append(self._backend.forward(*(x.clone() for x in given), place, self._batch).cpu())
        except Exception as error:
            raised = f"{type(error).__name__}: {error}"
        allowed = tolerance_of(dtype_named(c.geometry.dtype))
        layers = []
        for layer, out in zip(c.layers, results, strict=False):
            if out.shape != layer.q.shape:
                raised = f"nothing, but returned shape {tuple(out.shape)} instead of {tuple(layer.q.shape)}"
                break
            layers.append(self._compare(layer, out))
        return ReplayReport(
            capsule=c.summary(),
            recorded_by=str(c.origin.get("backend", "")),
            backend=self._subject.label,
            device=f"{self._rig.facts} {self._rig.facts.name}".rstrip(),
            versions={**_versions(), self._subject.distribution: self._subject.version},
            tolerance=allowed,
            layers=tuple(layers),
            raised=raised,
        )

    def _compare(self, layer: RecordedLayer, out: torch.Tensor) -> LayerResult:
        c, real = self._capsule, self._capsule.real_tokens
        want = _expected_rows(c, layer)
        found = worst(out[:real], want)
        lost = bool(layer.out[:real].isnan().all())
        return LayerResult(
            layer.layer_id,
            found.error,
            math.inf if lost else worst(out[:real], layer.out[:real]).error,
            math.inf if lost else worst(layer.out[:real], want).error,
            _place(found, c),
        )

    def close(self) -> None:
        self._rig.platform.synchronize()
        self._backend.close()


def _place(found: Difference, capsule: Capsule) -> str:
    row, token = row_of(found.token, capsule.q_lens)
    return f"row {row}, new token {token}, head {found.head}: expected {found.want:.6g}, got {found.got:.6g}"


def _setup_of(capsule: Capsule, page_size: int, layers: tuple[LayerFacts, ...], rig: Rig) -> AttentionSetup:
    g = capsule.geometry
    return AttentionSetup(
        device=rig.device,
        dtype=dtype_named(g.dtype),
        kv_dtype=dtype_named(g.kv_dtype),
        kv_layout=g.kv_layout,
        page_size=page_size,
        q_heads=g.q_heads,
        kv_heads=g.kv_heads,
        head_dim=g.head_dim,
        layers=layers,
        max_batch=max(g.max_batch, len(capsule.q_lens)),
        max_tokens=max(g.max_tokens, sum(capsule.q_lens)),
        max_seq_len=g.max_seq_len,
        batches_in_flight=g.batches_in_flight,
        platform=rig.platform,
    )


def _versions() -> dict[str, str]:
    return {"minisgl-core": __version__, "torch": importlib.metadata.version("torch")}
