"""The question that a plan answers: facts of model, device and config, and what each plan entry requires of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

from minisgl_core.errors import ConfigError
from minisgl_core.plan import STORING_OP, PlanEntry
from minisgl_core.plugin_api import HOST_ROLES, OP_NAMES, PARSER_PARTS, Phase
from minisgl_core.plugin_api.devices import DeviceFacts
from minisgl_core.plugin_api.spec_validation import REQUIRED

if TYPE_CHECKING:
    from minisgl_core.modelconfig import ModelConfig

__all__ = [
    "ANY_KEY",
    "Joint",
    "PlanQuery",
    "Requirement",
    "entries_of",
    "requirement_of",
    "short_windows",
    "weight_shape",
]

ANY_KEY: Final = "*"
"""In a role's table: everything that has no key of its own."""

BackendChoice = str | Sequence[str] | Mapping[str, Any]


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

    model: ModelConfig
    device: DeviceFacts
    dtype: str
    kv_dtype: str = "auto"
    page_size: int | Literal["auto"] = "auto"
    tp_size: int = 1
    max_seq_len: int = 0
    graph: bool = False
    """Are graphs requested?"""
    max_running_req: int = 256
    backends: Mapping[str, BackendChoice] = field(default_factory=dict)
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    allow: Sequence[str] | None = None
    """Distributions to load, no others but the core; None = all."""
    deny: Sequence[str] = ()
    calibration: Mapping[str, Mapping[str, float]] | None = None
    calibration_by_batch: Mapping[str, Sequence[tuple[int | None, Mapping[str, float]]]] = field(default_factory=dict)
    chat_template: str = ""
    """The text of the model's chat template; several are joined."""
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
class Requirement:
    """What a plan entry requires of a capability set. None (or an empty set) means that it requires nothing there."""

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
    template: str | None = None
    """The text of a chat template that must be one of its own."""


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
        PlanEntry("grammar"),
        *(PlanEntry("parser", op=part) for part in PARSER_PARTS),
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


def requirement_of(entry: PlanEntry, query: PlanQuery, joint: Joint) -> Requirement:
    """What a plan entry requires at these joint values; the operation that writes the pool also what ``kv`` does."""
    q_heads, kv_heads = query.model.rank_heads(query.tp_size)
    known = {
        "dtype": query.dtype,
        "kv_dtype": query.pool_dtype,
        "head_dim": query.model.head_dim,
        "gqa_ratio": q_heads // kv_heads,
        "page_size": joint.page_size,
        "kv_layout": joint.kv_layout,
        "phase": entry.phase,
        "op": entry.op,
        "format": "plain",
        "architecture": query.model.architecture,
    }
    role, graph_role = entry.role, entry.role == "graph"
    fields = (*REQUIRED.get(role, ()), *(REQUIRED["kv"] if entry.op == STORING_OP else ()))
    windows = role == "attention" and bool(short_windows(query))
    values: dict[str, Any] = {name: known[name] for name in fields}
    return Requirement(
        device=None if role == "models" or role in HOST_ROLES else query.device,
        capture=joint.graph and _is_captured(entry, query),
        no_capture=graph_role and query.graph and not joint.graph,
        features=frozenset({"window"}) if windows else frozenset(),
        **values,
    )


def _is_captured(entry: PlanEntry, query: PlanQuery) -> bool:
    """Is it a part of decode steps, which are what is captured?"""
    if entry.role == "comm":
        return query.tp_size > 1
    return entry.phase != "prefill" and entry.role not in ("platform", "models", *HOST_ROLES)


def short_windows(query: PlanQuery) -> list[int]:
    """The sliding windows that a sequence of this engine can outgrow, in tokens."""
    return [window for window in query.model.windows if window is not None and window < query.seq_limit]
