"""What a plugin says about itself: plain, frozen records that import nothing heavy.

A plugin's hooks return lists of :class:`BackendSpec`. Nothing in a spec is executed until the backend is chosen:
``factory``, ``probe`` and ``options`` are ``"package.module:Name"`` strings.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

__all__ = [
    "ANY",
    "API_VERSIONS",
    "HOST_ROLES",
    "ROLES",
    "AnyValue",
    "BackendSpec",
    "CannotRun",
    "Caps",
    "GraphLevel",
    "MultipleOf",
    "OneOf",
    "Phase",
    "PluginInfo",
    "Reason",
    "Role",
]

Role = Literal["attention", "graph", "kv", "moe", "ops", "linear", "comm", "platform", "models", "grammar", "parser"]
Phase = Literal["prefill", "decode"]
GraphLevel = Literal["never", "decode"]

ROLES: Final[tuple[Role, ...]] = (
    *("attention", "kv", "graph", "moe", "ops", "linear", "comm", "platform", "models"),
    *("grammar", "parser"),
)
"""All roles, in the order in which solutions are compared."""

HOST_ROLES: Final[frozenset[Role]] = frozenset({"grammar", "parser"})
"""Roles that work on text, in one process alone: they have no device."""

API_VERSIONS: Final[Mapping[str, str]] = {**dict.fromkeys(ROLES, "1.0"), "linear": "1.2", "moe": "1.1"}
"""The version of each role's protocol that this core serves."""


class AnyValue:
    """The type of :data:`ANY`."""

    def __repr__(self) -> str:
        return "ANY"

    def __reduce__(self) -> str:
        return "ANY"


ANY: Final = AnyValue()
"""Declares that a capability has no limit. It must be written: what is not declared is unsupported."""


@dataclass(frozen=True, slots=True)
class OneOf:
    """Supported values, listed."""

    values: tuple[int, ...]

    def __init__(self, *values: int) -> None:
        object.__setattr__(self, "values", tuple(values))


@dataclass(frozen=True, slots=True)
class MultipleOf:
    """Supported values: every positive multiple of ``base``."""

    base: int


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a backend cannot serve a query: which field, what was wanted, what is supported, what would help."""

    code: str
    field: str
    wanted: str
    supported: str
    fix: str = ""

    def __str__(self) -> str:
        verbs = ("needs", "found") if self.code == "requires" else ("wanted", "supported")
        text = f"{self.field}: {verbs[0]} {self.wanted}, {verbs[1]} {self.supported}"
        return f"{text} ({self.fix})" if self.fix else text


class CannotRun(Exception):
    """Raised by a factory, a probe, or a backend that plans a batch, to refuse with a :class:`Reason`.

    Anything else that they raise is the plugin's bug.
    """

    def __init__(self, reason: Reason) -> None:
        self.reason = reason
        super().__init__(str(reason))


Names = tuple[str, ...] | AnyValue
Ints = OneOf | MultipleOf | AnyValue | None


@dataclass(frozen=True, slots=True)
class Caps:
    """One capability set; a backend can do what fits any of its sets.

    Fields that a role never asks about may stay empty. Asked are: ``devices`` and ``sm`` of every role but models,
    grammar and parser;
    ``dtypes`` of attention, kv, moe, ops, linear, comm; ``kv_dtypes``, ``head_dims``, ``page_sizes``, ``kv_layouts`` of
    attention, kv and the op qk_norm_rope_store; ``gqa_ratios``, ``phases``, ``features`` of attention; ``ops`` of ops
    and parser; ``templates`` of parser;
    ``formats`` of linear (``plain`` = unquantised); ``architectures`` of models; ``graph``, if graphs are requested, of
    the graph runner and of all that runs inside a captured decode step (comm only with several ranks).

    ``ops`` of linear is not asked: it lists the operations that it can take into its products (``FUSABLE_OPS``).

    ``sm`` is an inclusive range of compute capabilities such as ``(90, 90)``; it is only asked on CUDA devices.
    ``gqa_ratios`` are query heads per kv head on one rank. ``page_sizes`` are those of the kernels: one fits if it
    divides the pool's. ``features`` is an open set of names (``window``, ``softcap``): a needed feature that is not
    listed is a reason to refuse, so features invented later stay denied to old plugins.
    """

    devices: Names = ()
    sm: tuple[int, int] | AnyValue = (0, -1)
    dtypes: Names = ()
    kv_dtypes: Names = ()
    head_dims: Ints = None
    gqa_ratios: Ints = None
    page_sizes: Ints = None
    kv_layouts: tuple[str, ...] = ()
    phases: tuple[Phase, ...] = ()
    graph: GraphLevel = "never"
    features: frozenset[str] | AnyValue = frozenset()
    ops: tuple[str, ...] = ()
    formats: tuple[str, ...] = ()
    architectures: tuple[str, ...] = ()
    grammars: tuple[str, ...] = ()
    """Grammar: the kinds of :class:`Grammar` that it compiles. A request for another kind is refused by name."""
    templates: Names = ()
    """Parser: texts that all occur in the chat templates of its models. ``auto`` chooses it for these alone."""
    host_plan: bool = False
    """Attention: ``prepare_for_replay`` is called before each replay of a captured decode step."""
    finite_tail: bool = False
    per_row_seed: bool = False
    tolerance: float = 0.0
    """Largest |y - y64| / (|x| |W|^T) against float64 of the weights or cache *as they are stored*, rounding of
    activations included; 0 = no loss but the rounding of the dtype. ``auto`` never chooses what loses more.
    """


@dataclass(frozen=True, slots=True)
class BackendSpec:
    """One backend that a plugin offers.

    ``requires`` items: a PEP 508 string, ``"import:module"``, ``"exec:program"``, or a tuple meaning any of them.
    Several specs of one plugin may share a name with distinct ``variant``; the name then means the first that fits.
    ``probe`` is a function called as ``probe(facts)`` in a throw-away process once the backend is chosen: it returns,
    or raises :class:`CannotRun`; facts are plain data: role, name, variant, device {kind, sm, name}, dtype, kv_dtype,
    q_heads, kv_heads (one rank's), head_dim, page_size (the pool's), kv_layout.
    ``check`` is a quick question of the same kind, called as ``check()`` in this process whenever the backend would be
    chosen, by ``minisgl explain`` too; nothing is remembered. Its module imports nothing heavy.
    ``tier``: lower is preferred where neither config nor calibration decides, in every role. A distribution that is not
    in the core's index comes behind those that are, whatever its tier.
    """

    role: Role
    name: str
    factory: str
    variant: str = ""
    probe: str | None = None
    requires: tuple[str | tuple[str, ...], ...] = ()
    caps: tuple[Caps, ...] = ()
    options: str | None = None
    tier: int = 50
    stand_in: bool = False
    """True for implementations that exist to check or replace hardware: never chosen by ``auto`` on a CUDA device."""
    summary: str = ""
    check: str | None = None


@dataclass(frozen=True, slots=True)
class PluginInfo:
    """A plugin module's ``MINISGL_PLUGIN``: its name and the range of each role's API that it was written for."""

    name: str
    api: Mapping[str, str] = field(default_factory=dict)
