"""Builds the backends of one rank: the Setup record of each, and those that the plan cuts by phase or by operation."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch

from minisgl_core.layers import split_evenly
from minisgl_core.plugin_api import (
    OP_NAMES,
    AttentionSetup,
    CommSetup,
    GraphSetup,
    KVSetup,
    LayerFacts,
    LinearSetup,
    MoESetup,
    OpsSetup,
)
from minisgl_core.progress import progress_counter
from minisgl_core.registry import build, fuses

from .config import SAMPLING_MODES
from .dispatch import NO_LIMIT, Route
from .linear_router import LinearRoute, LinearRouter

if TYPE_CHECKING:
    from minisgl_core.modelconfig import ModelConfig
    from minisgl_core.plugin_api import (
        AttentionBackend,
        Communicator,
        GraphHost,
        KVKernels,
        LayerOps,
        LinearBackend,
        MoEExecutor,
        Phase,
        Platform,
    )
    from minisgl_core.registry import Choice, Plan

    from .config import EngineConfig
    from .observer import Observer

__all__ = ["BackendFactory", "ResolvedOps", "capture_sizes"]

PHASES: tuple[Phase, ...] = ("prefill", "decode")


class ResolvedOps:
    """The layer operations, each bound to the backend that the plan names for it."""

    def __init__(self, methods: dict[str, Any], backends: list[Any]) -> None:
        self._backends = backends
        for name, method in methods.items():
            setattr(self, name, method)

    def close(self) -> None:
        for backend in self._backends:
            backend.close()


@dataclass(frozen=True, slots=True)
class BackendFactory:
    """Makes the Setup records of one rank, and builds the plan's backends with them; an observer may wrap each."""

    config: EngineConfig
    plan: Plan
    model: ModelConfig
    dtype: torch.dtype
    max_seq_len: int
    platform: Platform
    observer: Observer | None = None

    @property
    def q_heads(self) -> int:
        """This rank's."""
        return self.model.num_q_heads // self.config.tp_info.size

    @property
    def kv_heads(self) -> int:
        """This rank's."""
        return max(1, self.model.num_kv_heads // self.config.tp_info.size)

    # Setup records.

    def moe_setup(self) -> MoESetup:
        moe = self.model.moe
        assert moe is not None
        return MoESetup(
            self.platform.device,
            self.dtype,
            moe.num_experts,
            moe.top_k,
            self.model.hidden_size,
            split_evenly("expert width", moe.intermediate_size, self.config.tp_info.size),
            self.model.num_layers,
            self.config.max_prefill_tokens,
            self.platform,
        )

    def attention_setup(self, page_size: int) -> AttentionSetup:
        m = self.model
        windows = m.windows or (None,) * m.num_layers
        layers = tuple(
            LayerFacts(1.0 / math.sqrt(m.head_dim), w if w is not None and w < self.max_seq_len else None)
            for w in windows
        )
        return AttentionSetup(
            device=self.platform.device,
            dtype=self.dtype,
            kv_dtype=self.dtype,
            kv_layout=self.plan.kv_layout,
            page_size=page_size,
            q_heads=self.q_heads,
            kv_heads=self.kv_heads,
            head_dim=m.head_dim,
            layers=layers,
            max_batch=self.config.max_running_req,
            max_tokens=self.config.max_prefill_tokens,
            max_seq_len=self.max_seq_len,
            batches_in_flight=2,
            platform=self.platform,
        )

    def linear_setup(self) -> LinearSetup:
        return LinearSetup(self.platform.device, self.dtype, self.config.max_prefill_tokens, self.platform)

    def kv_setup(self) -> KVSetup:
        page, head_dim = self.plan.page_size, self.model.head_dim
        return KVSetup(self.platform.device, self.dtype, self.dtype, page, self.kv_heads, head_dim, self.platform)

    def graph_setup(self, host: GraphHost, sizes: tuple[int, ...]) -> GraphSetup:
        config = self.config
        modes = tuple(mode for mode in SAMPLING_MODES if mode in config.cuda_graph_modes)
        progress = progress_counter if config.progress and config.tp_info.is_primary else None
        return GraphSetup(self.platform, self.platform.device, host, sizes, modes, self.max_seq_len, progress)

    # Backends.

    def _build(self, choice: Choice, setup: object) -> Any:
        backend = build(choice, setup)
        return backend if self.observer is None else self.observer.wrap(choice.role, backend, choice.label)

    def build_comm(self) -> Communicator:
        rank, size = self.config.tp_info.rank, self.config.tp_info.size
        config = self.config
        setup = CommSetup(self.platform.device, rank, size, config.init_method, config.distributed_timeout_s)
        return cast("Communicator", self._build(self.plan.choice("comm"), setup))

    def build_kv(self) -> KVKernels:
        return cast("KVKernels", self._build(self.plan.choice("kv"), self.kv_setup()))

    def build_moe(self) -> MoEExecutor | None:
        """None for a model without experts."""
        if self.model.moe is None:
            return None
        return cast("MoEExecutor", self._build(self.plan.choice("moe"), self.moe_setup()))

    def build_attention(self) -> dict[Phase, list[Route]]:
        """By phase, the plan's backends with the numbers of rows that they serve. Equal choices are built once."""
        built: dict[Any, AttentionBackend] = {}
        routes: dict[Phase, list[Route]] = {phase: [] for phase in PHASES}
        with _close_on_failure(built):
            for phase in PHASES:
                for limit, choice in self.plan.by_batch("attention", phase=phase):
                    page_size = choice.page_size or self.plan.page_size
                    key = (*_identity(choice), page_size)
                    if key not in built:
                        built[key] = self._build(choice, self.attention_setup(page_size))
                    routes[phase].append(Route(built[key], page_size, choice.host_plan, limit or NO_LIMIT))
        return routes

    def build_linear(self) -> tuple[LinearBackend, frozenset[str]]:
        """The plan's linear backend, or those for each weight's shape and number of rows where the plan says so; and
        the operations that some of them may fuse into their products.
        """
        built: dict[Any, LinearBackend] = {}

        def routes(shape: tuple[int, int] | None) -> list[LinearRoute]:
            found = []
            for limit, choice in self.plan.by_batch("linear", shape=shape):
                if _identity(choice) not in built:
                    built[_identity(choice)] = self._build(choice, self.linear_setup())
                backend = built[_identity(choice)]
                fused = self.plan.fused(choice) if fuses(backend) else frozenset[str]()
                found.append(LinearRoute(backend, limit or NO_LIMIT, fused))
            return found

        with _close_on_failure(built):
            default = routes(None)
            by_shape = {shape: routes(shape) for shape in self.plan.shapes("linear")}
        fused = frozenset[str]().union(*(route.fused for some in (default, *by_shape.values()) for route in some))
        return (default[0].backend if len(built) == 1 else LinearRouter(default, by_shape)), fused

    def build_ops(self, kv: KVKernels, comm: Communicator) -> LayerOps:
        """Every operation from the backend that the plan names for it."""
        m = self.model
        setup = OpsSetup(
            self.platform.device,
            self.dtype,
            self.q_heads,
            self.kv_heads,
            m.head_dim,
            m.hidden_size,
            m.vocab_size,
            self.config.max_prefill_tokens,
            self.config.max_running_req,
            kv,
            comm,
            self.platform,
        )
        built: dict[Any, Any] = {}
        methods = {}
        with _close_on_failure(built):
            for op in OP_NAMES:
                if op == "route" and m.moe is None:
                    continue  # the plan has no entry for what the model never calls
                choice = self.plan.choice("ops", op=op)
                key = _identity(choice)
                if key not in built:
                    built[key] = self._build(choice, setup)
                methods[op] = getattr(built[key], op)
        return ResolvedOps(methods, list(built.values()))  # type: ignore[return-value]


@contextmanager
def _close_on_failure(built: Mapping[Any, Any]) -> Iterator[None]:
    """Close what was built if a later backend fails."""
    try:
        yield
    except BaseException:
        for backend in built.values():
            backend.close()
        raise


def _identity(choice: Choice) -> tuple[str, str, str]:
    return choice.distribution, choice.name, choice.variant


def capture_sizes(config: EngineConfig, plan: Plan) -> tuple[int, ...]:
    """Batch sizes to record: 1, 2, 4, then multiples of 8, up to the largest requested."""
    if not plan.graph or plan.choice("graph").graph == "never" or not config.cuda_graph_modes:
        return ()
    largest = config.max_running_req if config.graph_max_bs is None else config.graph_max_bs
    largest = min(largest, config.max_running_req)
    sizes = [n for n in (1, 2, 4, *range(8, largest + 1, 8)) if n <= largest]
    return tuple(sizes if largest in sizes or not largest else [*sizes, largest])
