"""The plan: which backend does what. Plain JSON, the same on every rank."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Final, NamedTuple, cast

from minisgl_core.errors import BackendError
from minisgl_core.plugin_api import FUSABLE_OPS, GraphLevel, Phase, Role
from minisgl_core.plugin_api.hooks import CORE

__all__ = ["STORING_OP", "Bucket", "Choice", "Plan", "PlanEntry"]

STORING_OP: Final = "qk_norm_rope_store"
"""The operation that writes the pool, so that its dtype and layout matter to it."""
_FORMAT: Final = 1


def _plain(data: dict[str, Any]) -> dict[str, Any]:
    """With lists in place of tuples, as JSON has it."""
    found: dict[str, Any] = json.loads(json.dumps(data))
    return found


class PlanEntry(NamedTuple):
    """One decision of a plan: a role, narrowed where the role is resolved piece by piece."""

    role: Role
    phase: Phase | None = None
    op: str | None = None
    shape: tuple[int, int] | None = None
    """(N, K) of a matrix product"""

    @property
    def part(self) -> str:
        """Such as ``decode``, ``sample`` or ``4096x1024``; empty where the role is resolved as a whole."""
        return self.phase or self.op or (f"{self.shape[0]}x{self.shape[1]}" if self.shape else "")

    @property
    def label(self) -> str:
        """Such as ``attention.decode``, ``ops.sample``, ``linear.4096x1024`` or ``kv``."""
        return f"{self.role}.{self.part}" if self.part else self.role


@dataclass(frozen=True, slots=True)
class Choice:
    """One backend, as chosen: all that is needed to build it in another process."""

    role: Role
    name: str
    variant: str
    distribution: str
    version: str
    factory: str
    options_model: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    ops: tuple[str, ...] = ()
    """Operations that it offers (role ``ops``), or can take into its products (role ``linear``)."""
    grammars: tuple[str, ...] = ()
    """The kinds of grammar that it compiles (role ``grammar``)."""
    page_size: int | None = None
    """Page size of its kernels, a divisor of the pool's; None where pages do not matter to it."""
    host_plan: bool = False
    finite_tail: bool = False
    tolerance: float = 0.0
    """The error that the backend states, as in ``Caps``"""
    graph: GraphLevel = "never"

    @property
    def label(self) -> str:
        """Such as ``fa/fa3@minisgl-fa``."""
        variant = f"/{self.variant}" if self.variant else ""
        return f"{self.name}{variant}@{self.distribution}"

    def to_json(self) -> dict[str, Any]:
        """As plain JSON data."""
        return _plain(asdict(replace(self, options=dict(self.options))))

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Choice:
        """The inverse of :meth:`to_json`."""
        return cls(**{**data, "ops": tuple(data["ops"]), "grammars": tuple(data["grammars"])})


@dataclass(frozen=True, slots=True)
class Bucket:
    """Where a choice applies: a plan entry and a range of rows. ``batch`` is inclusive, None = every size."""

    entry: PlanEntry
    choice: Choice
    batch: tuple[int, int] | None = None

    @property
    def label(self) -> str:
        """Such as ``attention.decode``, or ``attention.decode[1-8]`` for some sizes only."""
        return f"{self.entry.label}[{self.batch[0]}-{self.batch[1]}]" if self.batch else self.entry.label

    def to_json(self) -> dict[str, Any]:
        """As plain JSON data."""
        return _plain({**self.entry._asdict(), "batch": self.batch, "choice": self.choice.to_json()})

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Bucket:
        """The inverse of :meth:`to_json`."""
        entry = PlanEntry(data["role"], data["phase"], data["op"], _pair(data["shape"]))
        return cls(entry, Choice.from_json(data["choice"]), _pair(data["batch"]))


def _narrowness(bucket: Bucket) -> tuple[bool, float]:
    low, high = bucket.batch or (0, math.inf)
    return bucket.entry.shape is not None, low - high


def _pair(data: Iterable[int] | None) -> tuple[int, int] | None:
    return None if data is None else cast("tuple[int, int]", tuple(data))


@dataclass(frozen=True, slots=True)
class Plan:
    """The resolved choice of backends of one engine."""

    page_size: int
    kv_layout: str
    graph: bool
    """Are decode steps captured?"""
    dtype: str
    kv_dtype: str
    tp_size: int
    device: str
    """Such as ``cpu`` or ``cuda sm90``."""
    architecture: str
    core_version: str
    buckets: tuple[Bucket, ...]
    fallbacks: tuple[str, ...] = ()
    """Where a later name of an ordered list was taken, and why."""

    def choice(
        self,
        role: Role,
        *,
        phase: Phase | None = None,
        op: str | None = None,
        shape: tuple[int, int] | None = None,
        batch: int | None = None,
    ) -> Choice:
        """The backend of the narrowest bucket that covers an entry. Raises :class:`BackendError` if there is none."""
        fitting = [
            bucket
            for bucket in self.buckets
            if bucket.entry.role == role
            and bucket.entry.phase in (None, phase)
            and bucket.entry.op in (None, op)
            and bucket.entry.shape in (None, shape)
            and (bucket.batch is None or (batch is not None and bucket.batch[0] <= batch <= bucket.batch[1]))
        ]
        if not fitting:
            raise BackendError(
                f"the plan has no backend for {PlanEntry(role, phase, op, shape).label}",
                field=role,
                value=op or phase,
                remedy=f"it has {', '.join(sorted({bucket.entry.label for bucket in self.buckets}))}",
            )
        return max(fitting, key=_narrowness).choice

    @property
    def pool_writer(self) -> Choice:
        """The backend that writes K and V of a pass: the core's own operation leaves it to ``kv.store``."""
        storing = self.choice("ops", op=STORING_OP)
        return self.choice("kv") if storing.distribution == CORE else storing

    def by_batch(
        self, role: Role, *, phase: Phase | None = None, shape: tuple[int, int] | None = None
    ) -> list[tuple[int | None, Choice]]:
        """A plan entry's choices as (largest number of rows, choice), ascending; the last has no largest number.

        Raises :class:`BackendError` for a number of rows without a choice, below the largest that is named.
        """
        ranges = [bucket.batch for bucket in self.buckets if bucket.entry.role == role and bucket.batch is not None]
        starts = sorted({1, *(low for low, _ in ranges), *(high + 1 for _, high in ranges)})
        found: list[tuple[int | None, Choice]] = []
        for start, following in zip(starts, [*starts[1:], None], strict=True):
            try:
                choice = self.choice(role, phase=phase, shape=shape, batch=start)
            except BackendError:
                if following is not None or not found:
                    raise
                break  # only ranges: the last of them also serves what lies above
            if found and found[-1][1] == choice:
                found.pop()
            found.append((None if following is None else following - 1, choice))
        found[-1] = (None, found[-1][1])
        return found

    def shapes(self, role: Role) -> list[tuple[int, int]]:
        """The weight shapes for which a role has choices of their own."""
        return list(dict.fromkeys(b.entry.shape for b in self.buckets if b.entry.role == role and b.entry.shape))

    def choices(self, role: Role) -> tuple[Choice, ...]:
        """The distinct backends of a role, in the plan's order."""
        found = [bucket.choice for bucket in self.buckets if bucket.entry.role == role]
        return tuple({json.dumps(choice.to_json()): choice for choice in found}.values())

    def fused(self, linear: Choice) -> frozenset[str]:
        """Operations that this linear backend may take into its products: those that it offers and the plan gives to
        its own distribution. A norm behind an all-reduce stays with it.
        """
        return frozenset(op for op, why_not in self.fusions(linear).items() if not why_not)

    def fusions(self, linear: Choice) -> dict[str, str]:
        """What this linear backend offers to take into its products, and why it may not; "" if it may."""
        return {op: self._why_not_fused(op, linear) for op in FUSABLE_OPS if op in linear.ops}

    def _why_not_fused(self, op: str, linear: Choice) -> str:
        norm = op == "add_rms_norm"
        if norm and self.tp_size > 1:
            return "with several ranks the norm stays with its all-reduce"
        # what layers call is the norm behind an all-reduce, which one rank does not need
        for name in (op, "allreduce_add_rms_norm") if norm else (op,):
            owner = self.choice("ops", op=name)
            if owner.distribution != linear.distribution:
                return f"ops.{name} is {owner.label}, of another distribution"
        return ""

    def to_json(self) -> dict[str, Any]:
        """As plain JSON data."""
        own = {field.name: getattr(self, field.name) for field in fields(self)}
        return {"format": _FORMAT, **_plain({**own, "buckets": [bucket.to_json() for bucket in self.buckets]})}

    @classmethod
    def from_json(cls, data: Mapping[str, Any] | str) -> Plan:
        """The inverse of :meth:`to_json`; also takes the text."""
        given = dict(json.loads(data) if isinstance(data, str) else data)
        found = given.pop("format", None)
        if found != _FORMAT:
            raise BackendError(
                f"a plan of format {found!r} cannot be read, this core reads format {_FORMAT}",
                field="plan",
                value=found,
                remedy="let this version resolve it again",
            )
        buckets = tuple(Bucket.from_json(bucket) for bucket in given.pop("buckets"))
        return cls(**{**given, "buckets": buckets, "fallbacks": tuple(given["fallbacks"])})

    def digest(self) -> str:
        """A short text that is equal on two ranks only if their plans are."""
        text = json.dumps(self.to_json(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def summary(self) -> dict[str, str]:
        """Bucket label -> backend label, for logs and metric labels."""
        return {bucket.label: bucket.choice.label for bucket in self.buckets}
