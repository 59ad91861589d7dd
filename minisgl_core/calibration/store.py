"""The file that keeps measurements, and which of them still hold. Imports neither torch nor the conformance kit."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

from minisgl_core import __version__
from minisgl_core.env import ENV
from minisgl_core.errors import UsageError
from minisgl_core.modelconfig import ModelConfig
from minisgl_core.plugin_api import ROLES, BackendSpec
from minisgl_core.registry import PlanQuery, Registry

__all__ = [
    "Calibration",
    "Loaded",
    "Point",
    "file_of",
    "is_timed",
    "load",
    "save",
    "scope_of",
    "sources_of",
    "unmeasured",
    "versions_now",
]

FORMAT: Final = 3


@dataclass(frozen=True, slots=True)
class Point:
    """One measurement: a backend in one plan entry, at one size."""

    entry: str
    """Such as ``attention.decode``, ``linear.4096x1024``, ``ops.sample``, ``kv``"""
    rows: int
    """Rows of the batch; tokens for matrix products, operations, experts and KV stores"""
    length: int
    """Tokens with KV in each row; 0 where the length does not matter"""
    backend: str
    """Such as ``fa/fa3@minisgl-fa``"""
    version: str
    microseconds: float
    """Time of one layer's call; attention includes its share of the step's metadata"""
    captured: bool = False
    """Was it replayed from a graph?"""
    page_size: int | None = None
    source: str = ""
    """For an editable installation, a digest of its files; empty otherwise"""


@dataclass(frozen=True, slots=True)
class Calibration:
    """The measurements of one machine for the shapes of one model, on one rank."""

    scope: Mapping[str, Any]
    """Device and shapes: each scope has a calibration of its own"""
    versions: Mapping[str, str]
    """Versions of the core, torch and the driver. If one has changed, the measurements are stale."""
    points: tuple[Point, ...]
    notes: tuple[str, ...] = ()
    """What could not be measured, and why"""
    noise: float = 0.0
    """Spread of equal measurements over the whole run: the largest divided by the smallest, minus 1"""

    def to_json(self) -> dict[str, Any]:
        """As plain JSON data."""
        return {
            "format": FORMAT,
            "scope": dict(self.scope),
            "versions": dict(self.versions),
            "points": [asdict(point) for point in self.points],
            "notes": list(self.notes),
            "noise": self.noise,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Calibration:
        """The inverse of :meth:`to_json`."""
        points = tuple(Point(**point) for point in data["points"])
        return cls(data["scope"], data["versions"], points, tuple(data["notes"]), data["noise"])


@dataclass(frozen=True, slots=True)
class Loaded:
    """The measurements that still hold, and a line for each reason why others do not."""

    calibration: Calibration | None
    ignored: tuple[str, ...] = ()


def scope_of(query: PlanQuery, model: ModelConfig) -> dict[str, Any]:
    """Device and rank-local shapes as plain data."""
    q_heads, kv_heads = query.model.rank_heads(query.tp_size)
    moe = model.moe
    device = query.device
    return {
        "device": {"kind": device.kind, "sm": device.sm, "name": device.name or _host_name()},
        "graph": query.graph,
        "dtype": query.dtype,
        "kv_dtype": query.pool_dtype,
        "tp_size": query.tp_size,
        "q_heads": q_heads,
        "kv_heads": kv_heads,
        "head_dim": model.head_dim,
        "window": _usual_window(query, model),
        "hidden_size": model.hidden_size,
        "intermediate_size": model.intermediate_size,
        "vocab_size": model.vocab_size,
        "moe": None if moe is None else [moe.num_experts, moe.top_k, moe.intermediate_size],
    }


def _usual_window(query: PlanQuery, model: ModelConfig) -> int | None:
    """The most common window of the layers; None = full attention."""
    windows = [None if window is None or window >= query.seq_limit else window for window in model.windows]
    return max(dict.fromkeys(windows), key=windows.count, default=None)


def _host_name() -> str:
    """What decides a CPU's speed: its model and the threads that this process may use."""
    model = ""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    except OSError:
        pass  # not Linux
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    threads = os.environ.get("OMP_NUM_THREADS") or cores
    return f"{model or 'CPU'}, {threads} threads"


def versions_now(query: PlanQuery) -> dict[str, str]:
    """The versions that all measurements depend on."""
    torch = importlib.metadata.version("torch")
    return {"minisgl-core": __version__, "torch": torch, "driver": query.device.driver}


def file_of(scope: Mapping[str, Any]) -> Path:
    """The file that keeps the calibration of a scope."""
    text = json.dumps(dict(scope), sort_keys=True)
    return ENV.CACHE_DIR.value / "calibration" / f"{hashlib.sha256(text.encode()).hexdigest()[:24]}.json"


def save(calibration: Calibration) -> Path:
    """Write it, whole or not at all. Raises :class:`UsageError` if the folder cannot be written."""
    path = file_of(calibration.scope)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            json.dump(calibration.to_json(), file, indent=1)
        Path(file.name).replace(path)
    except OSError as error:
        raise UsageError(
            f"the calibration cannot be kept in {str(path.parent)!r}: {error.strerror}",
            field="MINISGL_CACHE_DIR",
            value=str(path.parent),
            remedy="set MINISGL_CACHE_DIR to a folder that can be written",
        ) from error
    return path


def load(query: PlanQuery, model: ModelConfig, registry: Registry) -> Loaded:
    """The measurements for this query that still hold, because no version that they depend on has changed."""
    path = file_of(scope_of(query, model))
    try:
        data = json.loads(path.read_text())
        if data["format"] != FORMAT:
            return Loaded(None, (f"{path} has format {data['format']}, this version reads {FORMAT}",))
        found = Calibration.from_json(data)
    except FileNotFoundError:
        return Loaded(None)
    except (OSError, ValueError, KeyError, TypeError) as error:
        return Loaded(None, (f"{path} cannot be read: {error}",))
    changed = [
        f"{name} {old or 'none'} is now {versions_now(query).get(name) or 'none'}"
        for name, old in found.versions.items()
        if versions_now(query).get(name) != old
    ]
    if changed:
        return Loaded(None, (f"all of it is stale: {', '.join(changed)}",))
    return _without_changed_backends(found, registry)


def _without_changed_backends(found: Calibration, registry: Registry) -> Loaded:
    installed = {item.key: item.version for role in ROLES for item in registry.candidates(role)}
    sources = sources_of(registry)
    kept, ignored = [], dict[str, None]()
    for point in found.points:
        key, distribution = f"{point.entry.partition('.')[0]}:{point.backend}", point.backend.rpartition("@")[2]
        if installed.get(key) == point.version:
            if sources.get(distribution, "") == point.source:
                kept.append(point)
            else:
                ignored[f"{key} was measured before its source changed"] = None
        else:
            now = f"now {installed[key]}" if key in installed else "not installed"
            ignored[f"{key} was measured at version {point.version}, it is {now}"] = None
    return Loaded(replace(found, points=tuple(kept)), tuple(ignored))


def sources_of(registry: Registry) -> dict[str, str]:
    """By distribution with an editable installation: a digest of its package's files, which can change without a new
    version.
    """
    return {
        plugin.distribution: _digest_of(Path(plugin.file).parent)
        for plugin in registry.plugins
        if plugin.editable and plugin.file
    }


def _digest_of(folder: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            digest.update(str(path.relative_to(folder)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def is_timed(spec: BackendSpec) -> bool:
    """Is this backend timed? A stand-in of role linear multiplies as torch does: noise would choose between it
    and ``plain``, which fuses nothing.
    """
    return not (spec.role == "linear" and spec.stand_in)


def unmeasured(calibration: Calibration, candidates: Sequence[tuple[str, str]]) -> list[str]:
    """Those of the (entry, backend) pairs that were not measured although another backend of the entry was."""
    measured = {(point.entry, point.backend) for point in calibration.points}
    entries = {entry for entry, _ in measured}
    return [
        f"{entry}: {backend}" for entry, backend in candidates if entry in entries and (entry, backend) not in measured
    ]
