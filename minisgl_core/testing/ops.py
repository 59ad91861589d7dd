"""Checks of the role ``ops``, one operation each. Shapes as in ``plugin_api.ops``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Final, Self

import torch

from minisgl_core.plugin_api import Caps, OpsSetup, RopeStoreArgs
from minisgl_core.registry.query import Requirement

from . import ops_reference as reference
from .check_run import CallCheck, CheckRun, Draw, Tensors
from .compare import TOLERANCE, close, expect, same
from .device_fixture import dtype_named

if TYPE_CHECKING:
    from .backend_under_test import BackendUnderTest
    from .device_fixture import DeviceFixture

__all__ = ["OpsCheck"]

NORM_TOLERANCE: Final = {"float32": 2e-5, "float16": 2e-3, "bfloat16": 1e-2}
"""Two roundings of the model's dtype, with a margin."""
MAX_POSITION: Final = 5000


@dataclass(frozen=True, kw_only=True, repr=False)
class OpsCheck(CallCheck):
    """One call of operation ``op`` (``sample`` has a separate check). Fields that do not apply to it are ignored."""

    op: str = "rms_norm"
    tokens: int = 17
    width: int = 576
    """Hidden width, expert width, number of experts, or vocabulary size."""
    eps: float = 1e-6
    x_scale: float = 1.0
    q_heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    rotary_dim: int = 64
    norms: bool = True
    page_size: int = 16
    kv_dtype: str = ""
    """Empty means ``dtype``."""
    slots: int = 0
    """Least number of slots of the pool."""
    top_k: int = 2
    renormalize: bool = False

    def siblings(self) -> tuple[Self, ...]:
        fewer = replace(self, tokens=self.tokens - 1, q_heads=self.q_heads + 2, kv_heads=self.kv_heads + 1)
        return (*super().siblings(), fewer)

    def requirement(self, fixture: DeviceFixture) -> Requirement:
        storing = self.op == "qk_norm_rope_store"
        return Requirement(
            device=fixture.facts,
            dtype=self.dtype,
            kv_dtype=(self.kv_dtype or self.dtype) if storing else None,
            head_dim=self.head_dim if storing else None,
            page_size=self.page_size if storing else None,
            kv_layout="NHD" if storing else None,
            capture=self.how == "replay",
            op=self.op,
        )

    def build(self, under_test: BackendUnderTest, fixture: DeviceFixture, caps: Caps | None) -> Any:
        setup = OpsSetup(
            device=fixture.device,
            dtype=dtype_named(self.dtype),
            q_heads=self.q_heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            hidden_size=self.width,
            vocab_size=self.width,
            max_tokens=self.tokens,
            max_batch=self.tokens,
            kv=_PlainKV(),
            comm=_OneRank(),
            platform=fixture.platform,
        )
        return under_test.build(setup, caps)

    def check_run(self, backend: Any, fixture: DeviceFixture) -> CheckRun:
        makers: dict[str, Any] = {
            "rms_norm": _Norm,
            "add_rms_norm": _AddNorm,
            "allreduce_add_rms_norm": _AddNorm,
            "qk_norm_rope_store": _RopeStore,
            "act_and_mul": _ActAndMul,
            "route": _Route,
        }
        check_run: CheckRun = makers[self.op](self, backend, fixture)
        return check_run


class _PlainKV:
    """The part of a KV backend that a composed operation needs."""

    def store(
        self, k_cache: torch.Tensor, v_cache: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out_loc: torch.Tensor
    ) -> None:
        slots = out_loc.long()
        k_cache.view(-1, *k.shape[1:])[slots] = k.to(k_cache.dtype)
        v_cache.view(-1, *v.shape[1:])[slots] = v.to(v_cache.dtype)

    def index(self, table: torch.Tensor, ids: torch.Tensor, start: int, rows: int) -> torch.Tensor:
        raise NotImplementedError("no layer operation looks rows up")

    def match_len(self, a: Any, b: Any) -> int:
        raise NotImplementedError("no layer operation compares token ids")

    def close(self) -> None:
        """Nothing to free."""


class _OneRank:
    """The communicator of a single rank."""

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def check_equal(self, what: str, digest: str) -> None:
        """Nothing: there is one rank."""

    def barrier(self) -> None:
        """Nothing: there is one rank."""

    def close(self) -> None:
        """Nothing to free."""


class _OpRun(CheckRun):
    def __init__(self, check: OpsCheck, backend: Any, fixture: DeviceFixture) -> None:
        self.c, self.backend, self.fixture = check, backend, fixture
        self.dtype = dtype_named(check.dtype)

    def resize(self, rows: int) -> None:
        self.c = replace(self.c, tokens=rows)

    def norm_weight(self, draw: Draw, width: int) -> torch.Tensor:
        """Norm weights around one, so that the result keeps the scale of x."""
        return (draw.normal(width).abs() * 0.5 + 0.5).to(self.dtype)


class _Norm(_OpRun):
    def draw(self, draw: Draw) -> Tensors:
        x = draw.normal(self.c.tokens, self.c.width, dtype=self.dtype, scale=self.c.x_scale)
        return {"x": x, "weight": self.norm_weight(draw, self.c.width)}

    def call(self, inputs: Tensors) -> tuple[torch.Tensor, ...]:
        return (self.backend.rms_norm(inputs["x"], inputs["weight"], self.c.eps),)

    def judge(self, inputs: Tensors, outputs: Sequence[torch.Tensor]) -> float:
        want = reference.rms_norm(inputs["x"], inputs["weight"], self.c.eps)
        expect(outputs[0].dtype == self.dtype, f"the result is {outputs[0].dtype}")
        return close(outputs[0], want, self.c.op, scale=0.05, tolerance=NORM_TOLERANCE[self.c.dtype])


class _AddNorm(_OpRun):
    is_new = False
    may_overwrite = frozenset({"x", "residual"})

    def draw(self, draw: Draw) -> Tensors:
        shape, scale = (self.c.tokens, self.c.width), self.c.x_scale
        x, residual = (draw.normal(*shape, dtype=self.dtype, scale=scale) for _ in range(2))
        return {"x": x, "residual": residual, "weight": self.norm_weight(draw, self.c.width)}

    def call(self, inputs: Tensors) -> tuple[torch.Tensor, ...]:
        run = getattr(self.backend, self.c.op)
        normed, residual = run(inputs["x"], inputs["residual"], inputs["weight"], self.c.eps)
        return normed, residual

    def judge(self, inputs: Tensors, outputs: Sequence[torch.Tensor]) -> float:
        total = inputs["x"].to(torch.float64) + inputs["residual"].to(torch.float64)
        limit = NORM_TOLERANCE[self.c.dtype]
        worst = close(outputs[1], total, "the new residual", scale=0.05 * self.c.x_scale, tolerance=limit)
        want = reference.rms_norm(total, inputs["weight"], self.c.eps)
        return max(worst, close(outputs[0], want, "the normalised sum", scale=0.05, tolerance=limit))


class _ActAndMul(_OpRun):
    def draw(self, draw: Draw) -> Tensors:
        x = draw.normal(self.c.tokens, 2 * self.c.width, dtype=self.dtype, scale=3.0)
        x[0, :2] = torch.tensor([-90.0, 90.0]).to(x)  # where exp would overflow
        return {"x": x}

    def call(self, inputs: Tensors) -> tuple[torch.Tensor, ...]:
        return (self.backend.act_and_mul(inputs["x"]),)

    def judge(self, inputs: Tensors, outputs: Sequence[torch.Tensor]) -> float:
        want = reference.silu_mul(inputs["x"])
        return close(outputs[0], want, "silu(gate) * up", scale=0.2)


class _RopeStore(_OpRun):
    """Other slots and layers of the pool must not change; the last tokens are padding on one slot of the dummy page."""

    is_new = False
    may_overwrite = frozenset({"qkv"})
    PADDING: ClassVar[int] = 2

    def __init__(self, check: OpsCheck, backend: Any, fixture: DeviceFixture) -> None:
        super().__init__(check, backend, fixture)
        self.pages = max(2 * check.tokens, check.slots) // check.page_size + 3
        shape = (2, 2, self.pages + 1, check.page_size, check.kv_heads, check.head_dim)
        self._before = Draw(fixture, check.seed + 1).normal(*shape).to(dtype_named(check.kv_dtype or check.dtype))
        self._pool = self._before.clone()

    @property
    def _live(self) -> int:
        return self.c.tokens - (self.PADDING if self.c.tokens > 2 * self.PADDING else 0)

    def draw(self, draw: Draw) -> Tensors:
        c = self.c
        self._pool.copy_(self._before)
        angles = draw.normal(MAX_POSITION, c.rotary_dim // 2, scale=3.0)
        slots = self.pages * c.page_size
        out_loc = torch.cat((torch.full((1,), slots - 1, device=draw.device), draw.order(slots - 1)))[: c.tokens]
        out_loc[self._live :] = slots
        positions = draw.integers(0, MAX_POSITION, c.tokens)
        positions[0] = MAX_POSITION - 1
        inputs = {
            "qkv": draw.normal(c.tokens, (c.q_heads + 2 * c.kv_heads) * c.head_dim, dtype=self.dtype, scale=c.x_scale),
            "positions": positions,
            "cos_sin": torch.cat((angles.cos(), angles.sin()), dim=-1),
            "out_loc": out_loc.to(torch.int32),
        }
        if c.norms:
            for name in ("q_weight", "k_weight"):
                inputs[name] = self.norm_weight(draw, c.head_dim)
        return inputs

    def call(self, inputs: Tensors) -> tuple[torch.Tensor, ...]:
        q, k, v = self.backend.qk_norm_rope_store(
            inputs["qkv"],
            RopeStoreArgs(
                inputs.get("q_weight"),
                inputs.get("k_weight"),
                self.c.eps,
                inputs["cos_sin"],
                self._pool[0, 1],
                self._pool[1, 1],
            ),
            inputs["positions"],
            inputs["out_loc"],
        )
        return q, k, v

    def judge(self, inputs: Tensors, outputs: Sequence[torch.Tensor]) -> float:
        c = self.c
        heads = inputs["qkv"].view(c.tokens, c.q_heads + 2 * c.kv_heads, c.head_dim)
        q, k, v = heads.split((c.q_heads, c.kv_heads, c.kv_heads), dim=1)
        wide_q, wide_k = q.to(torch.float64), k.to(torch.float64)
        if c.norms:
            wide_q = reference.rms_norm(q, inputs["q_weight"], c.eps)
            wide_k = reference.rms_norm(k, inputs["k_weight"], c.eps)
        want_q = reference.rope(wide_q, inputs["cos_sin"], inputs["positions"])
        want_k = reference.rope(wide_k, inputs["cos_sin"], inputs["positions"])
        worst = max(close(outputs[0], want_q, "q"), close(outputs[1], want_k, "k"))
        same(outputs[2], v, "v")
        return max(worst, self._judge_pool(inputs["out_loc"], want_k, v))

    def _judge_pool(self, out_loc: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> float:
        slots = out_loc[: self._live].long()
        # A pool of a wider dtype holds values rounded to the model's dtype.
        limit = max(TOLERANCE[self.c.dtype], TOLERANCE[self.c.kv_dtype or self.c.dtype])
        worst = close(self._pool[0, 1].flatten(0, 1)[slots], k[: self._live], "k in the pool", tolerance=limit)
        stored = self._pool[1, 1].flatten(0, 1)[slots]
        same(stored, v[: self._live].to(stored.dtype), "v in the pool")
        rest, want = self._pool.clone(), self._before.clone()
        for pool in (rest, want):
            pool[:, 1].flatten(1, 2)[:, slots] = 0
            pool[:, 1, -1] = 0  # the dummy page
        same(rest, want, "the rest of the pool")
        return worst


class _Route(_OpRun):
    def draw(self, draw: Draw) -> Tensors:
        c = self.c
        # Eighths are exact in every dtype and differ: no ties.
        rows = [(draw.order(c.width) - c.width // 2) * 0.125 for _ in range(c.tokens)]
        return {"logits": torch.stack(rows).to(self.dtype)}

    def call(self, inputs: Tensors) -> tuple[torch.Tensor, ...]:
        ids, weights = self.backend.route(inputs["logits"], self.c.top_k, self.c.renormalize)
        return ids, weights

    def judge(self, inputs: Tensors, outputs: Sequence[torch.Tensor]) -> float:
        ids, weights = outputs
        expect(ids.dtype == torch.int32, f"the ids are {ids.dtype}, expected int32")
        expect(weights.dtype == torch.float32, f"the weights are {weights.dtype}, expected float32")
        probs = inputs["logits"].to(torch.float64).softmax(-1)
        best = inputs["logits"].to(torch.float64).sort(-1, descending=True).indices[:, : self.c.top_k]
        same(ids, best.to(torch.int32), "the experts' ids, largest first")
        want = probs.gather(-1, best)
        if self.c.renormalize:
            want = want / want.sum(-1, keepdim=True)
        return close(weights, want, "the experts' weights", scale=1e-3, tolerance=1e-4)
