"""What an engine is told, once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, cast

import torch

from minisgl_core.capsule.steps import RECORDED_ROLES, StepChoice
from minisgl_core.distributed import DistributedInfo
from minisgl_core.errors import ConfigError, nearest
from minisgl_core.plugin_api import Role, SamplingMode

__all__ = ["SAMPLING_MODES", "EngineConfig"]

SAMPLING_MODES: Final[tuple[SamplingMode, ...]] = ("greedy", "random", "filtered")
"""From the cheapest to the dearest."""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Frozen configuration of one rank's engine. Lengths are in tokens; None means "decide from model and device"."""

    model_path: str
    tp_info: DistributedInfo = field(default=DistributedInfo(0, 1))
    dtype: torch.dtype | None = None
    """Compute dtype; None = the checkpoint's."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    max_running_req: int = 256
    max_seq_len_override: int | None = None
    """Longest prompt plus output of one Req; None = the model's own limit."""
    max_prefill_tokens: int = 8192
    """Most new tokens of one prefill pass; longer prompts are cut into chunks."""
    page_size: int | Literal["auto"] = "auto"
    num_page_override: int | None = None
    memory_ratio: float = 0.9
    """Share of the memory that is free after loading that the engine may use: KV pool, graphs and passes together. On a
    CPU half of this, for the pool alone.
    """
    cache: Literal["radix", "naive"] = "radix"
    cuda_graph_max_bs: int | None = None
    """Largest batch size to record graphs for; 0 = none; None = the device's default (none on a CPU)."""
    cuda_graph_modes: tuple[SamplingMode, ...] = SAMPLING_MODES
    """Ways of sampling to record graphs for; a batch that samples in another way runs eagerly."""
    seed: int = 0
    """Unseeded requests use this plus their uid."""
    distributed_port: int | None = None
    distributed_timeout_s: float = 120.0
    backends: Mapping[str, Any] = field(default_factory=dict)
    """Role to backend name, ordered list of names, or {prefill=..., decode=...} for attention."""
    backend_options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """``"ROLE:NAME"`` to that backend's own options."""
    allow_plugins: tuple[str, ...] | None = None
    deny_plugins: tuple[str, ...] = ()
    calibrated: bool = True
    """Where the choice is left to ``auto``: go by what ``minisgl calibrate`` measured here for this model's shapes."""
    plan: Mapping[str, Any] | None = None
    """A resolved plan as JSON data; None = resolve here."""
    dummy_weights: bool = False
    """Random weights N(0, 0.02) instead of the checkpoint's, for benchmarks."""
    record: str | None = None
    """Folder for capsules of chosen steps; recording forces eager steps. None = do not record."""
    record_role: Literal["attention", "moe"] = "attention"
    """What the capsules hold. Experts' need the weights of all experts once more, in host memory."""
    record_steps: str = "first:8"
    """``first:N``, ``every:N``, or the numbers of steps such as ``0,5,7``"""
    record_max_mb: int = 256
    """Steps whose capsule would be larger are skipped."""
    shadow: Mapping[str, Any] = field(default_factory=dict)
    """``{ROLE: NAME, "every": N}``: compare a second backend on every N-th eager step. ROLE: attention or moe."""
    progress: bool = True

    def __post_init__(self) -> None:
        rank, size = self.tp_info
        if not 0 <= rank < size:
            raise ConfigError(
                f"`tp_info` is rank {rank} of {size}",
                field="tp_info",
                value=self.tp_info,
                remedy="ranks count from 0 to size - 1",
            )
        if size > 1 and self.distributed_port is None:
            raise ConfigError(
                f"`distributed_port` is missing for {size} ranks",
                field="distributed_port",
                remedy="give all ranks the same free port",
            )
        for name in ("max_running_req", "max_prefill_tokens", "record_max_mb"):
            self._at_least(name, getattr(self, name), 1)
        for name, low in (("max_seq_len_override", 2), ("num_page_override", 1), ("cuda_graph_max_bs", 0)):
            if getattr(self, name) is not None:
                self._at_least(name, getattr(self, name), low)
        if self.page_size != "auto":
            self._at_least("page_size", self.page_size, 1)
        if not isinstance(cast("object", self.seed), int):
            raise ConfigError(f"`seed` is {self.seed!r}", field="seed", value=self.seed, remedy="give an integer")
        is_number = isinstance(cast("object", self.memory_ratio), int | float)
        if not is_number or not 0 < self.memory_ratio <= 1:
            raise ConfigError(
                f"`memory_ratio` is {self.memory_ratio}",
                field="memory_ratio",
                value=self.memory_ratio,
                remedy="give a share above 0 and at most 1",
            )
        if self.cache not in ("radix", "naive"):
            raise ConfigError(
                f"`cache` is {self.cache!r}", field="cache", value=self.cache, remedy="use radix or naive"
            )
        if self.device not in ("auto", "cpu", "cuda"):
            raise ConfigError(
                f"`device` is {self.device!r}", field="device", value=self.device, remedy="use auto, cpu or cuda"
            )
        for mode in self.cuda_graph_modes:
            if mode not in SAMPLING_MODES:
                raise ConfigError(
                    f"`cuda_graph_modes` holds {mode!r}",
                    field="cuda_graph_modes",
                    value=self.cuda_graph_modes,
                    remedy=f"give some of {', '.join(SAMPLING_MODES)}",
                )
        if self.record_role not in RECORDED_ROLES:
            raise ConfigError(
                f"`record_role` is {self.record_role!r}",
                field="record_role",
                value=self.record_role,
                remedy=f"use {' or '.join(RECORDED_ROLES)}",
            )
        StepChoice.parse(self.record_steps)
        if self.shadow:
            self._check_shadow()

    def _check_shadow(self) -> None:
        known = (*RECORDED_ROLES, "every")
        for key in self.shadow:
            if key not in known:
                raise ConfigError(
                    f"unknown key {key!r} in `shadow`",
                    field=f"shadow.{key}",
                    value=self.shadow[key],
                    remedy=nearest(key, known) or f"it has {', '.join(known)}",
                )
        if all(role in self.shadow for role in RECORDED_ROLES):
            raise ConfigError(
                f"`shadow` names a backend for each of {' and '.join(RECORDED_ROLES)}",
                field="shadow",
                value=dict(self.shadow),
                remedy="compare one at a time",
            )
        name = self.shadow.get(self.shadow_role)
        if not isinstance(name, str) or name in ("", "auto"):
            raise ConfigError(
                f"`shadow.{self.shadow_role}` is {name!r}",
                field=f"shadow.{self.shadow_role}",
                value=name,
                remedy="name the backend to compare",
            )
        self._at_least("shadow.every", self.shadow_every, 1)

    @property
    def init_method(self) -> str:
        """Where the ranks of this engine meet."""
        return f"tcp://127.0.0.1:{self.distributed_port}"

    @property
    def shadow_role(self) -> Role:
        """The role of the backend that is compared."""
        return next((role for role in RECORDED_ROLES if role in self.shadow), RECORDED_ROLES[0])

    @property
    def shadow_every(self) -> int:
        """Every so many eager steps are compared."""
        every = self.shadow.get("every", 1)
        return int(every) if isinstance(every, str) and every.isdecimal() else every

    @property
    def graph_max_bs(self) -> int | None:
        """:attr:`cuda_graph_max_bs` in force: a recorded step must be eager."""
        return 0 if self.record else self.cuda_graph_max_bs

    @staticmethod
    def _at_least(name: str, value: object, low: int) -> None:
        if not isinstance(value, int) or isinstance(value, bool) or value < low:
            raise ConfigError(
                f"`{name}` is {value!r}", field=name, value=value, remedy=f"give an integer of at least {low}"
            )
