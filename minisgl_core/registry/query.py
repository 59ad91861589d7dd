"""What is asked of the plugins: the facts of model, device and configuration, and each role's part of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NamedTuple, Protocol

from minisgl_core.errors import ConfigError
from minisgl_core.plugin_api import OP_NAMES, Phase, Role

__all__ = [
    "ANY_KEY",
    "STORING_OP",
    "DeviceFacts",
    "Joint",
    "ModelFacts",
    "Need",
    "PlanEntry",
    "PlanQuery",
    "entries_of",
    "need_of",
    "rank_heads",
    "short_windows",
    "wants_graph",
    "weight_shape",
]

ANY_KEY: Final = "*"
"""In a role's table: everything that has no key of its own."""

BackendChoice = str | Sequence[str] | Mapping[str, Any]


class _MoEFacts(Protocol):
    @property
    def num_experts(self) -> int: ...


class ModelFacts(Protocol):
    """The part of a model's config that resolving reads; :class:`minisgl_core.modelconfig.ModelConfig` has it."""

    @property
    def architecture(self) -> str: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def num_q_heads(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def max_position_embeddings(self) -> int: ...
    @property
    def windows(self) -> tuple[int | None, ...]: ...
    @property
    def moe(self) -> _MoEFacts | None: ...


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """One device, as data. ``sm`` is the CUDA compute capability times ten (90 = 9.0), None elsewhere."""

    kind: Literal["cpu", "cuda"]
    sm: int | None = None
    name: str = ""
    total_bytes: int = 0
    count: int = 1
    driver: str = ""

    def __str__(self) -> str:
        return f"{self.kind} sm{self.sm}" if self.sm is not None else self.kind


@dataclass(frozen=True, slots=True)
class PlanQuery:
    """Everything that a plan depends on, apart from what is installed.

    ``max_seq_len`` 0 means the model's own limit, ``kv_dtype`` ``"auto"`` the model's dtype. ``backends`` maps a role
    to ``"auto"``, a name, an ordered list of names, or a table by phase (attention), operation (ops) or ``NxK`` shape
    (linear). A name may be narrowed to ``name/variant`` and ``name@distribution``. ``options`` are by ``"ROLE:NAME"``.
    ``calibration`` maps a plan entry such as ``attention.decode`` to measured costs by backend name (lower is better);
    ``calibration_by_batch`` has them by number of rows too: (largest number, costs), ascending, the last without one.
    Where the cheapest backend changes with the number of rows, so does the plan's choice.
    """

    model: ModelFacts
    device: DeviceFacts
    dtype: str
    kv_dtype: str = "auto"
    page_size: int | Literal["auto"] = "auto"
    tp_size: int = 1
    max_seq_len: int = 0
    graph: bool = False
    """Are graphs asked for?"""
    max_running_req: int = 256
    backends: Mapping[str, BackendChoice] = field(default_factory=dict)
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    allow: Sequence[str] | None = None
    """Distributions to load, no others but the core; None = all."""
    deny: Sequence[str] = ()
    calibration: Mapping[str, Mapping[str, float]] | None = None
    calibration_by_batch: Mapping[str, Sequence[tuple[int | None, Mapping[str, float]]]] = field(default_factory=dict)
    kv_layouts: tuple[str, ...] = ("NHD",)
    """Pool layouts that the engine can allocate."""

    @property
    def pool_dtype(self) -> str:
        """The dtype of the KV pool."""
        return self.dtype if self.kv_dtype == "auto" else self.kv_dtype

    @property
    def seq_limit(self) -> int:
        """Longest sequence that this engine will hold."""
        return self.max_seq_len or self.model.max_position_embeddings


def wants_graph(cuda_graph_max_bs: int | None, device: DeviceFacts) -> bool:
    """Are graphs asked for? None means the device's default: yes on CUDA, no on a CPU."""
    return device.kind == "cuda" if cuda_graph_max_bs is None else cuda_graph_max_bs > 0


class PlanEntry(NamedTuple):
    """One decision of a plan: a role, narrowed where the role is resolved piece by piece."""

    role: Role
    phase: Phase | None = None
    op: str | None = None
    shape: tuple[int, int] | None = None
    """(N, K) of a matrix product"""

    @property
    def label(self) -> str:
        """Such as ``attention.decode``, ``ops.sample``, ``linear.4096x1024`` or ``kv``."""
        part = self.phase or self.op or (f"{self.shape[0]}x{self.shape[1]}" if self.shape else "")
        return f"{self.role}.{part}" if part else self.role


class Joint(NamedTuple):
    """The values on which all roles must agree."""

    page_size: int
    kv_layout: str
    graph: bool
    writer: str | None = None
    """The distribution that must write the pool because config names its kv backend; empty if ``auto`` chooses the kv
    backend, None if it does not matter which one writes.
    """


@dataclass(frozen=True, slots=True)
class Need:
    """What one entry asks of a backend's caps. None (or an empty set) means that it does not ask."""

    device: DeviceFacts | None = None
    dtype: str | None = None
    kv_dtype: str | None = None
    head_dim: int | None = None
    gqa_ratio: int | None = None
    page_size: int | None = None
    kv_layout: str | None = None
    phase: Phase | None = None
    capture: bool = False
    """Must it survive capture?"""
    no_capture: bool = False
    """Must it be a runner that never captures?"""
    features: frozenset[str] = frozenset()
    op: str | None = None
    format: str | None = None
    architecture: str | None = None
    exact: bool = False
    """Must it lose nothing but the rounding of the dtype?"""


STORING_OP: Final = "qk_norm_rope_store"
"""The operation that writes the pool, so that its dtype and layout matter to it."""


def rank_heads(query: PlanQuery) -> tuple[int, int]:
    """This rank's (query heads, kv heads), kv heads replicated where there are fewer than ranks."""
    q_heads, kv_heads, tp = query.model.num_q_heads, query.model.num_kv_heads, query.tp_size
    if tp < 1:
        raise ConfigError(f"tp_size {tp} is not positive", field="tp_size", value=tp, remedy="use 1 or more ranks")
    whole = kv_heads % tp == 0 if kv_heads >= tp else tp % kv_heads == 0
    if q_heads % tp or not whole:
        raise ConfigError(
            f"{q_heads} query heads and {kv_heads} kv heads cannot be cut over tp_size {tp}",
            field="tp_size",
            value=tp,
            remedy=f"use a tp_size that divides {q_heads} and that divides {kv_heads} or is a multiple of it",
        )
    return q_heads // tp, max(kv_heads // tp, 1)


def entries_of(query: PlanQuery) -> list[PlanEntry]:
    """Every decision that a plan for this query holds, in the order in which solutions are compared."""
    moe = query.model.moe is not None
    return [
        PlanEntry("attention", phase="decode"),
        PlanEntry("attention", phase="prefill"),
        PlanEntry("kv"),
        PlanEntry("graph"),
        *([PlanEntry("moe")] if moe else []),
        *(PlanEntry("ops", op=name) for name in OP_NAMES if moe or name != "route"),
        PlanEntry("linear"),
        *(PlanEntry("linear", shape=shape) for shape in _linear_shapes(query)),
        PlanEntry("comm"),
        PlanEntry("platform"),
        PlanEntry("models"),
    ]


def _linear_shapes(query: PlanQuery) -> list[tuple[int, int]]:
    """The weights that have a choice of their own: named by the config, or measured where it leaves the choice open."""
    linear = query.backends.get("linear", "auto")
    names = list(linear) if isinstance(linear, Mapping) else []
    if linear == "auto" or isinstance(linear, Mapping):
        names += [label.partition(".")[2] for label in query.calibration_by_batch if label.startswith("linear.")]
    return [shape for name in dict.fromkeys(names) if (shape := weight_shape(name)) is not None]


def weight_shape(text: str) -> tuple[int, int] | None:
    """``"4096x1024"`` -> (4096, 1024), :data:`ANY_KEY` -> None. Raises :class:`ConfigError` for anything else."""
    if text == ANY_KEY:
        return None
    n, _, k = text.partition("x")
    if not (n.isdecimal() and k.isdecimal()):
        raise ConfigError(
            f"backends.linear has the key {text!r}",
            field="backends.linear",
            value=text,
            remedy=f"use a weight's shape such as 4096x1024, or {ANY_KEY} for all others",
        )
    return int(n), int(k)


def need_of(entry: PlanEntry, query: PlanQuery, joint: Joint) -> Need:
    """What this entry asks for; the roles' rules are those of the table in :class:`minisgl_core.plugin_api.Caps`."""
    device, dtype, capture = query.device, query.dtype, joint.graph
    if entry.role == "attention":
        q_heads, kv_heads = rank_heads(query)
        return Need(
            device=device,
            dtype=dtype,
            kv_dtype=query.pool_dtype,
            head_dim=query.model.head_dim,
            gqa_ratio=q_heads // kv_heads,
            page_size=joint.page_size,
            kv_layout=joint.kv_layout,
            phase=entry.phase,
            capture=capture and entry.phase == "decode",
            features=frozenset({"window"}) if short_windows(query) else frozenset(),
        )
    if entry.role == "kv" or entry.op == STORING_OP:
        return Need(
            device=device,
            dtype=dtype,
            kv_dtype=query.pool_dtype,
            head_dim=query.model.head_dim,
            page_size=joint.page_size,
            kv_layout=joint.kv_layout,
            capture=capture,
            op=entry.op,
        )
    if entry.role == "graph":
        return Need(device=device, capture=capture, no_capture=query.graph and not capture)
    if entry.role == "comm":
        return Need(device=device, dtype=dtype, capture=capture and query.tp_size > 1)
    if entry.role == "platform":
        return Need(device=device)
    if entry.role == "models":
        return Need(architecture=query.model.architecture)
    weight_format = "plain" if entry.role == "linear" else None
    return Need(device=device, dtype=dtype, capture=capture, op=entry.op, format=weight_format)


def short_windows(query: PlanQuery) -> list[int]:
    """The sliding windows that a sequence of this engine can outgrow, in tokens."""
    return [window for window in query.model.windows if window is not None and window < query.seq_limit]
