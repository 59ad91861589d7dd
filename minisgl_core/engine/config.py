"""What an engine is told, once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

import torch

from minisgl_core.capsule.steps import RECORDED_ROLES, StepChoice
from minisgl_core.core.sampling_params import SEEDS
from minisgl_core.distributed import DistributedInfo
from minisgl_core.errors import ConfigError, nearest
from minisgl_core.plugin_api import Role, SamplingMode

from .checks import check_choice, check_flag, check_integer, check_kind, check_mapping, check_names, check_number

__all__ = ["SAMPLING_MODES", "EngineConfig"]

SAMPLING_MODES: Final[tuple[SamplingMode, ...]] = ("greedy", "random", "filtered")
"""From the cheapest to the dearest."""
LONGEST_TIMEOUT_S: Final = 1e9
"""What clocks of the libraries below can count"""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Frozen configuration of one rank's engine. Lengths are in tokens; None means "decide from model and device"."""

    model_path: str | Path
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
    queue: Literal["fifo", "priority"] = "fifo"
    """Order in which waiting requests are admitted: as they arrive, or by their ``priority`` first."""
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
    record: str | Path | None = None
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
        self._check_ranks()
        check_kind("model_path", self.model_path, (str, Path), "give a folder or file")
        for name in ("max_running_req", "max_prefill_tokens", "record_max_mb"):
            check_integer(name, getattr(self, name), 1)
        for name, low in (("max_seq_len_override", 2), ("num_page_override", 1), ("cuda_graph_max_bs", 0)):
            if getattr(self, name) is not None:
                check_integer(name, getattr(self, name), low)
        if self.page_size != "auto":
            check_integer("page_size", self.page_size, 1)
        check_integer("seed", self.seed, SEEDS.start, SEEDS.stop - 1)
        check_number("memory_ratio", self.memory_ratio, 1, "give a share above 0 and at most 1")
        check_choice("cache", self.cache, ("radix", "naive"))
        check_choice("queue", self.queue, ("fifo", "priority"))
        check_choice("device", self.device, ("auto", "cpu", "cuda"))
        for name in ("calibrated", "dummy_weights", "progress"):
            check_flag(name, getattr(self, name))
        self._check_graph_modes()
        self._check_plugins()
        self._check_recording()
        self._check_shadow()

    def _check_ranks(self) -> None:
        check_kind("tp_info", self.tp_info, DistributedInfo, "give a DistributedInfo(rank, size)")
        rank, size = self.tp_info
        check_integer("tp_info.size", size, 1)
        check_integer("tp_info.rank", rank, 0, size - 1)
        if self.distributed_port is not None:
            check_integer("distributed_port", self.distributed_port, 1, 65535)
        elif size > 1:
            raise ConfigError(
                f"`distributed_port` is missing for {size} ranks",
                field="distributed_port",
                remedy="give all ranks the same free port",
            )
        remedy = f"give seconds above 0 and at most {LONGEST_TIMEOUT_S:g}"
        check_number("distributed_timeout_s", self.distributed_timeout_s, LONGEST_TIMEOUT_S, remedy)

    def _check_graph_modes(self) -> None:
        check_names("cuda_graph_modes", self.cuda_graph_modes)
        for mode in self.cuda_graph_modes:
            if mode not in SAMPLING_MODES:
                raise ConfigError(
                    f"`cuda_graph_modes` holds {mode!r}",
                    field="cuda_graph_modes",
                    value=self.cuda_graph_modes,
                    remedy=f"give some of {', '.join(SAMPLING_MODES)}",
                )

    def _check_plugins(self) -> None:
        check_mapping("backends", self.backends, 'give {"attention": "NAME"}')
        check_mapping("backend_options", self.backend_options, 'give {"ROLE:NAME": {...}}')
        for key, options in self.backend_options.items():
            check_mapping(f"backend_options[{key!r}]", options, "give the options by name")
        if self.allow_plugins is not None:
            check_names("allow_plugins", self.allow_plugins)
        check_names("deny_plugins", self.deny_plugins)
        if self.plan is not None:
            check_mapping("plan", self.plan, "give a plan as JSON data, or None")

    def _check_recording(self) -> None:
        if self.record is not None:
            check_kind("record", self.record, (str, Path), "give a folder, or None")
        check_choice("record_role", self.record_role, RECORDED_ROLES)
        check_kind("record_steps", self.record_steps, str, "use such as first:8, every:100 or 0,5,7")
        StepChoice.parse(self.record_steps)

    def _check_shadow(self) -> None:
        check_mapping("shadow", self.shadow, 'give {"attention": "NAME"}')
        if not self.shadow:
            return
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
        check_integer("shadow.every", self.shadow_every, 1)

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
