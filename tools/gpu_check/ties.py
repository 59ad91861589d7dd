"""When two engines choose different tokens after the same ones: a near-tie, or a fault?"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from minisgl_core.builtin.ops import ComposedOps
from minisgl_core.core import Batch, Req, SamplingParams
from minisgl_core.engine import Engine, EngineConfig
from minisgl_core.engine.sampler import pack_params
from minisgl_core.plugin_api import SampleArgs, SamplingMode

from .checks import Here
from .serving import settings_for

__all__ = ["TieJudge", "is_tie", "pick"]

LONGEST: Final = 1024


def pick(logits: torch.Tensor, params: SamplingParams, position: int) -> int:
    """The token that the core's own sampling takes from logits (V,), for a request with these parameters and a seed."""
    row = torch.from_numpy(pack_params(params, params.seed or 0).copy())[None]
    floats = row.view(torch.float32)
    args = SampleArgs(
        temperature=floats[:, 0],
        top_p=floats[:, 2],
        min_p=floats[:, 3],
        top_k=row[:, 1],
        seed_lo=row[:, 4],
        seed_hi=row[:, 5],
        positions=torch.tensor([position], dtype=torch.int32),
    )
    mode: SamplingMode = "greedy" if params.is_greedy else "filtered"
    setup: Any = None  # sampling needs none
    return int(ComposedOps(setup).sample(logits[None], args, mode))


def is_tie(
    logits: torch.Tensor, params: SamplingParams, position: int, tokens: tuple[int, int], tolerance: float
) -> bool:
    """Do logits moved by ``tolerance`` of their range, for one of two tokens and against the other, give either one?"""
    step = tolerance * float(logits.max() - logits.min())
    first, second = tokens
    for favoured, other in ((first, second), (second, first)):
        moved = logits.clone()
        moved[favoured] += step
        moved[other] -= step
        if pick(moved, params, position) != favoured:
            return False
    return True


class TieJudge:
    """Computes the logits after any tokens, in float32 and in one pass. Use it as a context manager."""

    def __init__(self, here: Here, model: Path) -> None:
        settings = settings_for(
            here,
            page_size=1,
            pool_tokens=LONGEST,
            max_running_req=1,
            max_seq_len_override=LONGEST,
            cuda_graph_max_bs=0,
        )
        self._engine = Engine(EngineConfig(str(model), dtype=torch.float32, **settings))

    def logits(self, tokens: Sequence[int]) -> torch.Tensor:
        """(V,) float32 on the host"""
        engine = self._engine
        engine.state.set_slots(0, 0, np.arange(LONGEST, dtype=np.int32))
        req = Req(torch.tensor(tokens, dtype=torch.int32), 0, 0, 1, 0, SamplingParams(max_tokens=1))
        batch = Batch(reqs=[req], phase="prefill")
        return engine.forward_batch(batch, engine.sampler.prepare(batch)).logits[0].float().cpu().clone()

    def __enter__(self) -> TieJudge:
        return self

    def __exit__(self, *_: object) -> None:
        self._engine.shutdown()
