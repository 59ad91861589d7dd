"""What each backend is told, and the building of backends that the plan cuts by phase or by operation."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

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
from .products import LinearRoute, ResolvedLinear

if TYPE_CHECKING:
    from minisgl_core.modelconfig import ModelConfig
    from minisgl_core.plugin_api import (
        AttentionBackend,
        Communicator,
        GraphHost,
        KVKernels,
        LayerOps,
        LinearBackend,
        Phase,
        Platform,
    )
    from minisgl_core.registry import Choice, Plan

    from .config import EngineConfig

__all__ = ["ResolvedOps", "Setups", "capture_sizes"]

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


class Setups:
    """Makes the frozen Setup records of one rank."""

    def __init__(
        self,
        config: EngineConfig,
        plan: Plan,
        model: ModelConfig,
        dtype: torch.dtype,
        max_seq_len: int,
        platform: Platform,
    ) -> None:
        self._config, self._plan, self._model, self._dtype = config, plan, model, dtype
        self._max_seq_len, self._platform, self._device = max_seq_len, platform, platform.device
        size = config.tp_info.size
        self.q_heads = model.num_q_heads // size
        self.kv_heads = max(1, model.num_kv_heads // size)

    def comm(self) -> CommSetup:
        rank, size = self._config.tp_info
        return CommSetup(self._device, rank, size, self._config.init_method, self._config.distributed_timeout_s)

    def kv(self) -> KVSetup:
        page = self._plan.page_size
        return KVSetup(
            self._device, self._dtype, self._dtype, page, self.kv_heads, self._model.head_dim, self._platform
        )

    def linear(self) -> LinearSetup:
        return LinearSetup(self._device, self._dtype, self._config.max_prefill_tokens, self._platform)

    def moe(self) -> MoESetup:
        moe = self._model.moe
        assert moe is not None
        return MoESetup(
            self._device,
            self._dtype,
            moe.num_experts,
            moe.top_k,
            self._model.hidden_size,
            split_evenly("expert width", moe.intermediate_size, self._config.tp_info.size),
            self._model.num_layers,
            self._config.max_prefill_tokens,
            self._platform,
        )

    def attention(self, page_size: int) -> AttentionSetup:
        m = self._model
        windows = m.windows or (None,) * m.num_layers
        layers = tuple(
            LayerFacts(1.0 / math.sqrt(m.head_dim), w if w is not None and w < self._max_seq_len else None)
            for w in windows
        )
        return AttentionSetup(
            device=self._device,
            dtype=self._dtype,
            kv_dtype=self._dtype,
            kv_layout=self._plan.kv_layout,
            page_size=page_size,
            q_heads=self.q_heads,
            kv_heads=self.kv_heads,
            head_dim=m.head_dim,
            layers=layers,
            max_batch=self._config.max_running_req,
            max_tokens=self._config.max_prefill_tokens,
            max_seq_len=self._max_seq_len,
            batches_in_flight=2,
            platform=self._platform,
        )

    def graph(self, host: GraphHost, sizes: tuple[int, ...]) -> GraphSetup:
        quiet = not (self._config.progress and self._config.tp_info.is_primary)
        modes = tuple(mode for mode in SAMPLING_MODES if mode in self._config.cuda_graph_modes)
        return GraphSetup(
            self._platform, self._device, host, sizes, modes, self._max_seq_len, None if quiet else progress_counter
        )

    def build_attention(self) -> dict[Phase, list[Route]]:
        """By phase, the plan's backends with the numbers of rows that they serve. Equal choices are built once."""
        built: dict[Any, AttentionBackend] = {}
        routes: dict[Phase, list[Route]] = {phase: [] for phase in PHASES}
        with _all_or_none(built):
            for phase in PHASES:
                for limit, choice in self._plan.by_batch("attention", phase=phase):
                    page_size = choice.page_size or self._plan.page_size
                    key = (*_identity(choice), page_size)
                    if key not in built:
                        built[key] = build(choice, self.attention(page_size))
                    routes[phase].append(
                        Route(built[key], page_size, choice.host_plan, limit or NO_LIMIT, choice.label)
                    )
        return routes

    def build_linear(self) -> tuple[LinearBackend, frozenset[str]]:
        """The plan's linear backend, or those for each weight's shape and number of rows where the plan says so; and
        the operations that some of them may take into their products.
        """
        built: dict[Any, LinearBackend] = {}

        def routes(shape: tuple[int, int] | None) -> list[LinearRoute]:
            found = []
            for limit, choice in self._plan.by_batch("linear", shape=shape):
                if _identity(choice) not in built:
                    built[_identity(choice)] = build(choice, self.linear())
                backend = built[_identity(choice)]
                fused = self._plan.fused(choice) if fuses(backend) else frozenset[str]()
                found.append(LinearRoute(backend, limit or NO_LIMIT, fused))
            return found

        with _all_or_none(built):
            default = routes(None)
            by_shape = {shape: routes(shape) for shape in self._plan.shapes("linear")}
        fused = frozenset[str]().union(*(route.fused for some in (default, *by_shape.values()) for route in some))
        return (default[0].backend if len(built) == 1 else ResolvedLinear(default, by_shape)), fused

    def build_ops(self, kv: KVKernels, comm: Communicator) -> LayerOps:
        """Every operation from the backend that the plan names for it."""
        m = self._model
        setup = OpsSetup(
            self._device,
            self._dtype,
            self.q_heads,
            self.kv_heads,
            m.head_dim,
            m.hidden_size,
            m.vocab_size,
            self._config.max_prefill_tokens,
            self._config.max_running_req,
            kv,
            comm,
            self._platform,
        )
        built: dict[Any, Any] = {}
        methods = {}
        with _all_or_none(built):
            for op in OP_NAMES:
                if op == "route" and m.moe is None:
                    continue  # the plan has no entry for what the model never calls
                choice = self._plan.choice("ops", op=op)
                key = _identity(choice)
                if key not in built:
                    built[key] = build(choice, setup)
                methods[op] = getattr(built[key], op)
        return ResolvedOps(methods, list(built.values()))  # type: ignore[return-value]


@contextmanager
def _all_or_none(built: Mapping[Any, Any]) -> Iterator[None]:
    """What was built before the next one failed is closed."""
    try:
        yield
    except BaseException:
        for backend in built.values():
            backend.close()
        raise


def _identity(choice: Choice) -> tuple[str, str, str]:
    return choice.distribution, choice.name, choice.variant


def capture_sizes(config: EngineConfig, plan: Plan) -> tuple[int, ...]:
    """Batch sizes to record: 1, 2, 4, then multiples of 8, up to the largest asked for."""
    if not plan.graph or plan.choice("graph").graph == "never" or not config.cuda_graph_modes:
        return ()
    largest = config.max_running_req if config.graph_max_bs is None else config.graph_max_bs
    largest = min(largest, config.max_running_req)
    sizes = [n for n in (1, 2, 4, *range(8, largest + 1, 8)) if n <= largest]
    return tuple(sizes if largest in sizes or not largest else [*sizes, largest])
