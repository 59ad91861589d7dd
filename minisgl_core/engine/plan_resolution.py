"""Resolves the plan of an engine: which backend serves each role."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch

from minisgl_core.builtin.devices import detect_device
from minisgl_core.calibration.choose import apply
from minisgl_core.errors import ConfigError
from minisgl_core.registry import (
    DeviceFacts,
    Plan,
    PlanQuery,
    discover,
    resolve_plan,
    wants_graph,
)
from minisgl_core.tokenizer import read_chat_template

if TYPE_CHECKING:
    from minisgl_core.modelconfig import ModelConfig

    from .config import EngineConfig

__all__ = ["DTYPES", "choose_dtype", "context_limit", "make_plan", "plan_query"]

logger = logging.getLogger(__name__)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def choose_dtype(config: EngineConfig, model: ModelConfig, device: DeviceFacts) -> str:
    """The compute dtype: the requested one, else what the checkpoint is computed in on this device."""
    if config.dtype is None:
        return model.dtype_on(device.kind)
    if config.dtype not in DTYPES.values():
        raise ConfigError(
            f"`dtype` is {config.dtype}", field="dtype", value=config.dtype, remedy=f"use one of {', '.join(DTYPES)}"
        )
    return str(config.dtype).removeprefix("torch.")


def context_limit(config: EngineConfig, model: ModelConfig) -> int:
    """Longest sequence, prompt and output together, in tokens."""
    return config.max_seq_len_override or model.max_position_embeddings


def plan_query(config: EngineConfig, model: ModelConfig, device: DeviceFacts) -> PlanQuery:
    """The query of plan resolution for this engine."""
    name = choose_dtype(config, model, device)
    return PlanQuery(
        model=model,
        device=device,
        dtype=name,
        kv_dtype=name,
        page_size=config.page_size,
        tp_size=config.tp_info.size,
        max_seq_len=context_limit(config, model),
        graph=wants_graph(config.graph_max_bs, device),
        backends=config.backends,
        options=config.backend_options,
        allow=config.allow_plugins,
        deny=config.deny_plugins,
        max_running_req=config.max_running_req,
        chat_template=read_chat_template(config.model_path),
    )


def make_plan(config: EngineConfig, model: ModelConfig) -> Plan:
    """The given plan, or the resolved one. Raises ``BackendError`` with the reasons if there is none."""
    if config.plan is not None:
        return Plan.from_json(config.plan)
    query = plan_query(config, model, detect_device(config.device))
    registry = discover(allow=query.allow, deny=query.deny)
    if config.calibrated:
        query, measured = apply(query, model, registry)
        for line in measured.ignored:
            logger.warning("calibration: %s; `minisgl calibrate` measures again", line)
        if measured.calibration is not None:
            logger.info("auto follows %s measurements of `minisgl calibrate`", len(measured.calibration.points))
    return resolve_plan(query, registry)
