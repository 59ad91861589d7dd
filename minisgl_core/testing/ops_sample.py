"""Checks of the operation ``sample``.

Greedy rows must be a true argmax. Random rows must follow the core's noise or, for a backend that does not declare
``per_row_seed``, its distribution.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np
import torch

from minisgl_core.plugin_api import SampleArgs, SamplingMode

from . import ops_reference as reference
from .check_run import CheckRun, Draw, Tensors
from .compare import Mismatch, expect
from .device_fixture import dtype_named
from .ops import OpsCheck

if TYPE_CHECKING:
    from .device_fixture import DeviceFixture

__all__ = ["SampleCheck"]

NEAR: Final = 2e-3
"""Scores that differ by less are a tie in float32."""
EDGE: Final = 1e-5
"""A cumulative probability this close to top-p may be on either side."""

PLANS: Final[tuple[tuple[float, int, float, float], ...]] = (
    (0.0, 0, 1.0, 0.0),
    (1.0, 0, 1.0, 0.0),
    (0.7, 0, 1.0, 0.0),
    (1.0, 3, 1.0, 0.0),
    (1.3, 1, 1.0, 0.0),
    (1.0, 0, 0.6, 0.0),
    (1.5, 0, 0.9, 0.0),
    (1.0, 0, 1e-9, 0.0),
    (1.0, 0, 1.0, 0.3),
    (0.9, 8, 0.8, 0.05),
    (0.0, 5, 0.5, 0.1),
    (1.0, 2**30, 1.0, 0.0),
    (1e-5, 0, 1.0, 0.0),
)
"""(temperature, top-k, top-p, min-p), assigned to the rows in turn."""
UNFILTERED: Final = tuple(plan for plan in PLANS if plan[1:] == (0, 1.0, 0.0))

COLUMNS: Final = ("temperature", "top_p", "min_p", "top_k", "seed_lo", "seed_hi", "positions")


@dataclass(frozen=True, kw_only=True, repr=False)
class SampleCheck(OpsCheck):
    """``rows``: rows of every kind in one batch, where ``x_scale`` is the spread of the logits. ``frequencies``: how
    often each of four tokens is drawn. ``per_row_seed``: the noise must be the core's, token for token.
    """

    op: str = "sample"
    scenario: Literal["rows", "frequencies"] = "rows"
    mode: SamplingMode = "greedy"
    per_row_seed: bool = True

    def check_run(self, backend: Any, fixture: DeviceFixture) -> CheckRun:
        return _Rows(self, backend) if self.scenario == "rows" else _Frequencies(self, backend)


class _Rows(CheckRun):
    """Parameters are strided columns, as in the engine's table. The logits of the last row are NaN."""

    def __init__(self, check: SampleCheck, backend: Any) -> None:
        self._c, self._backend = check, backend
        self._plans = {"greedy": PLANS[:1], "random": UNFILTERED, "filtered": PLANS}[check.mode]

    def draw(self, draw: Draw) -> Tensors:
        c = self._c
        logits = draw.normal(c.tokens, c.width, dtype=dtype_named(c.dtype), scale=c.x_scale)
        _tie(logits)
        logits[-1, 0] = torch.nan
        floats = torch.zeros(c.tokens, 3)
        ints = torch.zeros(c.tokens, 4, dtype=torch.int32)
        for row in range(c.tokens):
            temperature, top_k, top_p, min_p = self._plans[row % len(self._plans)]
            floats[row] = torch.tensor([temperature, top_p, min_p])
            ints[row, 0] = top_k
        floats, ints = floats.to(draw.device), ints.to(draw.device)
        ints[:, 1:3] = draw.integers(-(2**31), 2**31 - 1, c.tokens, 2)
        ints[:, 3] = draw.integers(0, 100_000, c.tokens)
        return {"logits": logits, "floats": floats, "ints": ints}

    def call(self, inputs: Tensors) -> tuple[torch.Tensor, ...]:
        return (self._backend.sample(inputs["logits"], _args(inputs), self._c.mode),)

    def judge(self, inputs: Tensors, outputs: Sequence[torch.Tensor]) -> float:
        expect(outputs[0].dtype == torch.int32, f"the ids are {outputs[0].dtype}, expected int32")
        expect(outputs[0].shape == (self._c.tokens,), f"the ids have shape {tuple(outputs[0].shape)}")
        logits, args = inputs["logits"][:-1], SampleArgs(*(column[:-1] for column in _args(inputs)))
        ids = outputs[0].tolist()
        expect(ids[-1] == -1, f"the row whose logits hold NaN gives {ids[-1]}, expected -1")
        filtered = self._c.mode == "filtered"
        tight = reference.sample_scores(logits, args, filtered=filtered, slack=-EDGE)
        loose = reference.sample_scores(logits, args, filtered=filtered, slack=EDGE)
        for row, token in enumerate(ids[:-1]):
            expect(0 <= token < self._c.width, f"row {row} gives {token}, outside the vocabulary")
            self._judge_row(row, token, args, logits[row], (tight[row], loose[row]))
        return 0.0

    def _judge_row(
        self, row: int, token: int, args: SampleArgs, logits: torch.Tensor, scores: tuple[np.ndarray, np.ndarray]
    ) -> None:
        parameters = {name: getattr(args, name)[row].item() for name in args._fields}
        if not parameters["temperature"] > 0:
            want = int(np.argmax(logits.to(torch.float64).cpu().numpy()))
            expect(token == want, f"greedy row {row} gives {token}, its maximum is first at {want}; {parameters}")
            return
        if not self._c.per_row_seed:
            if np.isneginf(scores[1][token]):
                raise Mismatch(f"row {row} gives {token}, which its filters exclude; {parameters}")
            return
        wanted = [int(np.argmax(own)) for own in scores]
        near = any(own[token] >= own.max() - NEAR for own in scores)
        expect(token in wanted or near, f"row {row} gives {token}, expected {wanted[0]}; {parameters}")


class _Frequencies(CheckRun):
    """Many rows of the same four logits with different seeds, tested against the softmax by chi-squared."""

    LOGITS: Final = (1.0, 0.0, -1.0, 2.0)
    LIMIT: Final = 21.11
    """Chi-squared with 3 degrees of freedom exceeds this with probability 1/10,000."""

    def __init__(self, check: SampleCheck, backend: Any) -> None:
        self._c, self._backend = check, backend

    def draw(self, draw: Draw) -> Tensors:
        c = self._c
        logits = torch.tensor(self.LOGITS).to(draw.device, dtype_named(c.dtype)).expand(c.tokens, -1).contiguous()
        floats = torch.tensor([0.7, 1.0, 0.0]).to(draw.device).expand(c.tokens, -1).contiguous()
        ints = torch.zeros(c.tokens, 4, dtype=torch.int32, device=draw.device)
        ints[:, 1] = torch.arange(c.tokens)
        return {"logits": logits, "floats": floats, "ints": ints}

    def call(self, inputs: Tensors) -> tuple[torch.Tensor, ...]:
        return (self._backend.sample(inputs["logits"], _args(inputs), self._c.mode),)

    def judge(self, inputs: Tensors, outputs: Sequence[torch.Tensor]) -> float:
        counts = np.bincount(outputs[0].cpu().numpy(), minlength=len(self.LOGITS))
        weights = np.exp(np.array(self.LOGITS) / 0.7)
        want = weights / weights.sum() * self._c.tokens
        distance = float(((counts - want) ** 2 / want).sum())
        shown = f"{counts.tolist()}, expected about {want.round().astype(int).tolist()}"
        expect(distance < self.LIMIT, f"of {self._c.tokens} draws the four tokens got {shown}")
        return 0.0


def _args(inputs: Tensors) -> SampleArgs:
    columns = [*inputs["floats"].unbind(1), *inputs["ints"].unbind(1)]
    return SampleArgs(**dict(zip(COLUMNS, columns, strict=True)))


def _tie(logits: torch.Tensor) -> None:
    """The maximum of every row occurs three times: the lowest id must win if nothing is random."""
    top = logits.max(-1).values
    width = logits.shape[1]
    for place in (width // 3, width // 2, width - 1):
        logits[:, place] = top
