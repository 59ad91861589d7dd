"""What each backend is told, and the building of backends that the plan cuts by phase or by operation."""

from __future__ import annotations

import math
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
from minisgl_core.registry import build

from .progress import progress_bar

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
        SamplingMode,
    )
    from minisgl_core.registry import Plan

    from .config import EngineConfig

__all__ = ["ResolvedLinear", "ResolvedOps", "Setups", "capture_sizes"]

PHASES: tuple[Phase, ...] = ("prefill", "decode")
MODES: tuple[SamplingMode, ...] = ("greedy", "random", "filtered")


class ResolvedOps:
    """The layer operations, each bound to the backend that the plan names for it."""

    def __init__(self, methods: dict[str, Any], backends: list[Any]) -> None:
        self._backends = backends
        for name, method in methods.items():
            setattr(self, name, method)

    def close(self) -> None:
        for backend in self._backends:
            backend.close()


class ResolvedLinear:
    """Linear layers whose backend depends on the (N, K) of their weight."""

    def __init__(self, default: LinearBackend, by_shape: dict[tuple[int, int], LinearBackend]) -> None:
        self._default, self._by_shape = default, by_shape

    def prepare_weights(self, weight: torch.Tensor) -> tuple[LinearBackend, Any]:
        """(N, K) -> the backend of that shape and its prepared weights."""
        backend = self._by_shape.get((weight.shape[0], weight.shape[1]), self._default)
        return backend, backend.prepare_weights(weight)

    def weight_of(self, weights: tuple[LinearBackend, Any]) -> torch.Tensor:
        """(N, K)"""
        return weights[0].weight_of(weights[1])

    def forward(
        self, x: torch.Tensor, weights: tuple[LinearBackend, Any], bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """x (M, K) -> new (M, N)"""
        return weights[0].forward(x, weights[1], bias)

    def close(self) -> None:
        """Free all of them."""
        for backend in (self._default, *self._by_shape.values()):
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
        address = f"tcp://127.0.0.1:{self._config.distributed_port}"
        return CommSetup(self._device, rank, size, address, self._config.distributed_timeout_s)

    def kv(self) -> KVSetup:
        page = self._plan.page_size
        return KVSetup(
            self._device, self._dtype, self._dtype, page, self.kv_heads, self._model.head_dim, self._platform
        )

    def linear(self) -> LinearSetup:
        return LinearSetup(self._device, self._dtype, self._config.max_prefill_tokens)

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
        return GraphSetup(
            self._platform, self._device, host, sizes, MODES, self._max_seq_len, None if quiet else progress_bar
        )

    def build_attention(self) -> dict[Phase, AttentionBackend]:
        """One object per distinct choice: a backend that serves both phases is built once."""
        built: dict[Any, AttentionBackend] = {}
        backends: dict[Phase, AttentionBackend] = {}
        for phase in PHASES:
            choice = self._plan.choice("attention", phase=phase)
            key = (choice.distribution, choice.name, choice.variant)
            if key not in built:
                built[key] = build(choice, self.attention(self.kernel_page_sizes()[phase]))
            backends[phase] = built[key]
        return backends

    def kernel_page_sizes(self) -> dict[Phase, int]:
        """Each phase's kernel page size: the pool's own, or a divisor of it."""
        return {p: self._plan.choice("attention", phase=p).page_size or self._plan.page_size for p in PHASES}

    def host_plan_phases(self) -> frozenset[Phase]:
        """The phases whose backend needs host work for every step."""
        return frozenset(p for p in PHASES if p in self._plan.choice("attention", phase=p).host_plan)

    def build_linear(self) -> LinearBackend:
        """The plan's linear backend, or one per weight shape where the plan says so."""
        default = build(self._plan.choice("linear"), self.linear())
        shapes = [b.slot.shape for b in self._plan.buckets if b.slot.role == "linear" and b.slot.shape is not None]
        if not shapes:
            return default  # type: ignore[no-any-return]
        by_shape = {shape: build(self._plan.choice("linear", shape=shape), self.linear()) for shape in shapes}
        return ResolvedLinear(default, by_shape)

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
        )
        built: dict[Any, Any] = {}
        methods = {}
        for op in OP_NAMES:
            if op == "route" and m.moe is None:
                continue  # the plan has no entry for what the model never calls
            choice = self._plan.choice("ops", op=op)
            key = (choice.distribution, choice.name, choice.variant)
            if key not in built:
                built[key] = build(choice, setup)
            methods[op] = getattr(built[key], op)
        return ResolvedOps(methods, list(built.values()))  # type: ignore[return-value]


def capture_sizes(config: EngineConfig, plan: Plan) -> tuple[int, ...]:
    """Batch sizes to record: 1, 2, 4, then multiples of 8, up to the largest asked for."""
    if plan.choice("graph").graph == "never":
        return ()
    largest = config.max_running_req if config.cuda_graph_max_bs is None else config.cuda_graph_max_bs
    largest = min(largest, config.max_running_req)
    sizes = [n for n in (1, 2, 4, *range(8, largest + 1, 8)) if n <= largest]
    return tuple(sizes if largest in sizes or not largest else [*sizes, largest])
