"""Replicas of one model behind Ray Serve: ``serve run app:build model=Qwen/Qwen3-0.6B replicas=2``.

Each replica is a whole server with an engine of its own, so its answers, streams and errors are those of ``minisgl
serve``. Ray Serve sends each request to the less loaded of two replicas, starts more when requests queue up, and
replaces one that dies.
"""

from __future__ import annotations

import asyncio
from typing import Any

from pydantic import BaseModel, ConfigDict, Field
from ray import serve
from ray.serve.config import AutoscalingConfig

from minisgl_core.server.app import create_app
from minisgl_core.server.state import ServerOptions, ServerState


class Arguments(BaseModel):
    """What ``serve run`` takes as ``name=value``."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())

    model: str = Field("demo", description="folder, .gguf file or name on the hub")
    model_name: str = Field("", description="what clients call it; empty = as `model`")
    replicas: int = Field(2, ge=1, description="fewest replicas")
    max_replicas: int = Field(4, ge=1, description="most replicas")
    concurrent: int = Field(64, ge=1, description="requests of one replica at which Ray Serve adds another")
    num_gpus: float = Field(0, ge=0, description="GPUs of each replica; as many as tensor-parallel ranks")
    num_cpus: float = Field(1, ge=0, description="cores that Ray sets aside for each replica")
    max_running_req: int = Field(256, ge=1, description="most requests in one batch of a replica")


def build(given: dict[str, Any]) -> serve.Application:
    """The application that ``serve run`` deploys. ``given``: values of :class:`Arguments`."""
    args = Arguments.model_validate(given)
    options = ServerOptions(model_name=args.model_name or args.model)
    state = ServerState(options)
    scaling = AutoscalingConfig(
        min_replicas=args.replicas,
        max_replicas=max(args.replicas, args.max_replicas),
        target_ongoing_requests=args.concurrent,
    )

    @serve.deployment(
        autoscaling_config=scaling,
        # The engine's own queue decides what waits. Above this Ray Serve prefers another replica.
        max_ongoing_requests=4 * args.concurrent,
        ray_actor_options={"num_cpus": args.num_cpus, "num_gpus": args.num_gpus},
        health_check_period_s=5,
        health_check_timeout_s=30,
        graceful_shutdown_timeout_s=60,
    )
    @serve.ingress(lambda: create_app(state))
    class Replica:
        """One engine and its HTTP routes."""

        def __init__(self) -> None:
            from minisgl_core import AsyncLLM

            ranks = max(1, round(args.num_gpus))
            state.llm = AsyncLLM(args.model, tp_size=ranks, max_running_req=args.max_running_req)

        async def check_health(self) -> None:
            """Ray Serve replaces the replica if this raises: after a failed step no request can be answered."""
            await asyncio.wait_for(state.need_model().ping(), 20)

        def __del__(self) -> None:
            if state.llm is not None:
                state.llm.shutdown()

    deployed: Any = Replica
    return deployed.options(name="minisgl").bind()
