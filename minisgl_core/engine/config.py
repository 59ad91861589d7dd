"""The settings of one rank's engine, checked once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import NoneType
from typing import Any, Final, Literal

import torch

from minisgl_core.core.sampling_params import SEEDS
from minisgl_core.distributed import DistributedInfo
from minisgl_core.errors import ConfigError
from minisgl_core.plugin_api import SamplingMode
from minisgl_core.plugin_api.devices import DEVICE_CHOICES

from .checks import check_choice, check_flag, check_integer, check_kind, check_mapping, check_names, check_number
from .observer import ObserverFactory

__all__ = ["SAMPLING_MODES", "EngineConfig"]

SAMPLING_MODES: Final[tuple[SamplingMode, ...]] = ("greedy", "random", "filtered")
"""From the cheapest to the most expensive."""
LONGEST_TIMEOUT_S: Final = 1e9
"""The longest time that the clocks of the libraries below can count"""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Frozen configuration of one rank's engine. Lengths are in tokens; None means "decide from model and device"."""

    model_path: str | Path
    tp_info: DistributedInfo = field(default=DistributedInfo(0, 1))
    dtype: torch.dtype | None = None
    """Compute dtype; None = the checkpoint's."""
    device: str = "auto"
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
    """Sampling modes to record graphs for; a batch of another mode runs eagerly."""
    seed: int = 0
    """Unseeded requests use this plus their uid."""
    launcher: Literal["processes", "torchrun"] = "processes"
    """Who starts the ranks above 0: the engine, as child processes, or torchrun, on one machine or several."""
    distributed_host: str = "127.0.0.1"
    """Address of rank 0's machine, at which the ranks meet."""
    distributed_port: int | None = None
    distributed_timeout_s: float = 120.0
    backends: Mapping[str, Any] = field(default_factory=dict)
    """Role to backend name, ordered list of names, or {prefill=..., decode=...} for attention."""
    backend_options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """``"ROLE:NAME"`` to that backend's own options."""
    allow_plugins: tuple[str, ...] | None = None
    deny_plugins: tuple[str, ...] = ()
    grammar_timeout_s: float = 5.0
    """Longest time that one grammar may take to compile."""
    grammar_memory_gb: float = 2.0
    """Most memory that one grammar may take while it is compiled, in GiB."""
    calibrated: bool = True
    """Let ``auto`` use what ``minisgl calibrate`` measured here for this model's shapes."""
    plan: Mapping[str, Any] | None = None
    """A resolved plan as JSON data; None = resolve here."""
    dummy_weights: bool = False
    """Random weights N(0, 0.02) instead of the checkpoint's, for benchmarks."""
    observer: ObserverFactory | None = None
    """Makes a tool that looks into the engine's steps; None = the steps are not observed."""
    progress: bool = True

    def __post_init__(self) -> None:
        self._check_ranks()
        check_kind("model_path", self.model_path, (str, Path), "give a folder or file")
        for name in ("max_running_req", "max_prefill_tokens"):
            check_integer(name, getattr(self, name), 1)
        for name, low in (("max_seq_len_override", 2), ("num_page_override", 1), ("cuda_graph_max_bs", 0)):
            if getattr(self, name) is not None:
                check_integer(name, getattr(self, name), low)
        if self.page_size != "auto":
            check_integer("page_size", self.page_size, 1)
        check_integer("seed", self.seed, SEEDS.start, SEEDS.stop - 1)
        check_number("memory_ratio", self.memory_ratio, 1, "give a share above 0 and at most 1")
        for name, unit in (("grammar_timeout_s", "seconds"), ("grammar_memory_gb", "GiB")):
            check_number(name, getattr(self, name), LONGEST_TIMEOUT_S, f"give {unit} above 0")
        check_choice("cache", self.cache, ("radix", "naive"))
        check_choice("launcher", self.launcher, ("processes", "torchrun"))
        check_choice("queue", self.queue, ("fifo", "priority"))
        check_choice("device", self.device, DEVICE_CHOICES)
        for name in ("calibrated", "dummy_weights", "progress"):
            check_flag(name, getattr(self, name))
        self._check_graph_modes()
        self._check_plugins()
        check_kind("observer", self.observer, (ObserverFactory, NoneType), "give an ObserverFactory, or None")

    def _check_ranks(self) -> None:
        check_kind("tp_info", self.tp_info, DistributedInfo, "give a DistributedInfo(rank, size)")
        rank, size = self.tp_info.rank, self.tp_info.size
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

    @property
    def init_method(self) -> str:
        """Where the ranks of this engine meet."""
        host = f"[{self.distributed_host}]" if ":" in self.distributed_host else self.distributed_host
        return f"tcp://{host}:{self.distributed_port}"

    @property
    def graph_max_bs(self) -> int | None:
        """:attr:`cuda_graph_max_bs` in force: 0 where the observer needs every step eager."""
        return 0 if self.observer is not None and self.observer.forces_eager else self.cuda_graph_max_bs
