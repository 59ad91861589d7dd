"""One call of a backend with given inputs: run eagerly, captured, and often."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, Self

import torch

from .check import Check, Result, caps_of
from .compare import Mismatch, fresh, unchanged
from .endurance import Step, check_endurance, sizes_in_turn

if TYPE_CHECKING:
    from collections.abc import Sequence

    from minisgl_core.plugin_api import Caps

    from .backend_under_test import BackendUnderTest
    from .device_fixture import DeviceFixture

__all__ = ["CallCheck", "CheckRun", "Draw", "check_growth", "spread"]

Tensors = dict[str, torch.Tensor]

REPLAYS = 3
CALLS = 3
"""Calls on rewritten inputs."""
GROWTH_STEPS = 4


class Draw:
    """Random tensors on the device, with the same numbers on every device."""

    def __init__(self, fixture: DeviceFixture, seed: int) -> None:
        self.device, self._random = fixture.device, fixture.generator(seed)

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> torch.Tensor:
        """Standard normal, times ``scale``, rounded to ``dtype``."""
        return (torch.randn(shape, generator=self._random) * scale).to(self.device, dtype)

    def integers(self, low: int, high: int, *shape: int) -> torch.Tensor:
        """int32 in [low, high)"""
        return torch.randint(low, high, shape, generator=self._random).to(self.device, torch.int32)

    def order(self, count: int) -> torch.Tensor:
        """A permutation of ``range(count)``, int64."""
        return torch.randperm(count, generator=self._random).to(self.device)


class CheckRun:
    """The call that a check makes. Results that :attr:`is_new` must not share memory with anything."""

    is_new = True
    may_overwrite: frozenset[str] = frozenset()
    """Inputs that the contract allows a backend to overwrite."""

    is_repeatable = True
    """True if the outputs depend only on the inputs."""

    def resize(self, rows: int) -> None:
        """Set the number of rows of inputs drawn from now on; no effect where it is fixed."""

    def draw(self, draw: Draw) -> Tensors:
        """New inputs, of the same shapes each time."""
        raise NotImplementedError

    def call(self, inputs: Tensors) -> tuple[torch.Tensor, ...]:
        """The call: device work only, so that it can be captured."""
        raise NotImplementedError

    def judge(self, inputs: Tensors, outputs: Sequence[torch.Tensor]) -> float:
        """The worst error; raises :class:`Mismatch`."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True, repr=False)
class CallCheck(Check):
    """A check that is one :class:`CheckRun`.

    ``how``: eager; replay (captured); rewritten (repeated on the same tensors with other contents each time); in_turn
    (several instances); growth (memory after warm-up); endurance (many calls of changing sizes).
    """

    how: Literal["eager", "replay", "rewritten", "in_turn", "growth", "endurance"] = "eager"
    dtype: str = "float32"
    seed: int = 0

    def check_run(self, backend: Any, fixture: DeviceFixture) -> CheckRun:
        """The call of this check."""
        raise NotImplementedError

    def build(self, under_test: BackendUnderTest, fixture: DeviceFixture, caps: Caps | None) -> Any:
        """Build the backend with the setup that the core would pass."""
        raise NotImplementedError

    def siblings(self) -> tuple[Self, ...]:
        """The checks for the other instances of ``in_turn``: the same shapes with other contents, and other shapes
        where a setup has shapes.
        """
        return (replace(self, seed=self.seed + 100),)

    def run(self, under_test: BackendUnderTest, fixture: DeviceFixture) -> Result:
        if self.how == "in_turn":
            return Result({self.dtype: self._in_turn(under_test, fixture)})
        backend = self.build(under_test, fixture, caps_of(under_test, self, fixture))
        check_run = self.check_run(backend, fixture)
        note = ""
        if self.how == "endurance":
            worst, note = _endurance(check_run, fixture, self.seed)
        else:
            run = {"eager": _eager, "replay": _replay, "rewritten": _rewritten, "growth": _growth}[self.how]
            worst = run(check_run, fixture, self.seed)
        fixture.platform.synchronize()
        backend.close()
        return Result({self.dtype: worst}, note)

    def _in_turn(self, under_test: BackendUnderTest, fixture: DeviceFixture) -> float:
        """Several instances exist at once. All are called each time one has been created, and the first once more after
        the others are closed.
        """
        alive: list[tuple[Any, CheckRun, Draw]] = []
        worst = 0.0
        for check in (self, *self.siblings()):
            backend = check.build(under_test, fixture, caps_of(under_test, check, fixture))
            alive.append((backend, check.check_run(backend, fixture), Draw(fixture, check.seed)))
            for place, (_, check_run, draw) in enumerate(alive):
                what = f"a call of instance {place} of {len(alive)}"
                worst = max(worst, _judged(check_run, check_run.draw(draw), what))
        fixture.platform.synchronize()
        for backend, _, _ in alive[1:]:
            backend.close()
        backend, check_run, draw = alive[0]
        worst = max(
            worst, _judged(check_run, check_run.draw(draw), "a call of instance 0, after the others were closed")
        )
        fixture.platform.synchronize()
        backend.close()
        return worst


def spread(rows: torch.Tensor, pad: int = 8) -> torch.Tensor:
    """The same (T, N) values as a view of wider rows whose gaps contain NaN."""
    wide = torch.full((rows.shape[0], rows.shape[1] + pad), torch.nan, dtype=rows.dtype, device=rows.device)
    wide[:, : rows.shape[1]] = rows
    return wide[:, : rows.shape[1]]


def check_growth(fixture: DeviceFixture, step: Callable[[], object]) -> None:
    """After warm-up steps, further steps must not use more memory."""

    def steps(count: int) -> None:
        for _ in range(count):
            step()

    # The first step allocates workspaces and compiles.
    steps(1)
    with fixture.memory_watch() as in_use:
        steps(2)  # memory that was only replaced is counted from here on
        before = in_use()
        steps(GROWTH_STEPS)
        grown = in_use() - before
    if grown > 0:
        raise Mismatch(f"{GROWTH_STEPS} steps after warm-up left {grown} bytes of tensors behind")


def _eager(check_run: CheckRun, fixture: DeviceFixture, seed: int) -> float:
    draw = Draw(fixture, seed)
    inputs = check_run.draw(draw)
    # The judge needs the inputs as they were, because a backend may overwrite some of them.
    given = _copies(inputs)
    outputs = check_run.call(inputs)
    worst = check_run.judge(given, outputs)
    for name, value in inputs.items():
        if name not in check_run.may_overwrite:
            unchanged(value, given[name], name)
    if check_run.is_new:
        _check_new(check_run, inputs, outputs, draw)
    return worst


def _check_new(check_run: CheckRun, inputs: Tensors, outputs: tuple[torch.Tensor, ...], draw: Draw) -> None:
    # A second call reveals results that share memory with those of the first.
    kept = [out.clone() for out in outputs]
    later = check_run.call(check_run.draw(draw))
    for number, (out, copy, second) in enumerate(zip(outputs, kept, later, strict=True)):
        fresh(out, {k: v for k, v in inputs.items() if k not in check_run.may_overwrite}, f"result {number}")
        fresh(second, {"an earlier result": out}, f"result {number}")
        unchanged(out, copy, "an earlier result")


def _judged(check_run: CheckRun, inputs: Tensors, what: str) -> float:
    """Judge one call; ``what`` names it in an error."""
    given = _copies(inputs)
    return _judge(check_run, given, check_run.call(inputs), what)


def _judge(check_run: CheckRun, inputs: Tensors, outputs: Sequence[torch.Tensor], what: str) -> float:
    try:
        return check_run.judge(inputs, outputs)
    except Mismatch as found:
        raise Mismatch(f"{what}: {found}") from None


def _rewritten(check_run: CheckRun, fixture: DeviceFixture, seed: int) -> float:
    draw = Draw(fixture, seed)
    inputs = check_run.draw(draw)
    worst = 0.0
    for number in range(CALLS):
        worst = max(worst, _judged(check_run, inputs, f"call {number} on the same tensors, rewritten"))
        _rewrite(inputs, check_run.draw(draw))
    return worst


def _rewrite(inputs: Tensors, values: Tensors) -> None:
    for name, value in values.items():
        inputs[name].copy_(value)


def _replay(check_run: CheckRun, fixture: DeviceFixture, seed: int) -> float:
    """Capture a call on inputs with fixed addresses, and replay it on other values."""
    draw = Draw(fixture, seed)
    inputs = check_run.draw(draw)

    def step() -> tuple[torch.Tensor, ...]:
        # Inputs that may be overwritten are copied inside the step, so that each replay starts from the new values.
        copies = _copies({name: inputs[name] for name in check_run.may_overwrite if name in inputs})
        return check_run.call({**inputs, **copies})

    # An eager call on the same tensors: whatever the backend caches for them must not end up in the graph.
    step()
    captured = fixture.capture(step)
    worst = 0.0
    for number in range(REPLAYS):
        _rewrite(inputs, check_run.draw(draw))
        captured.replay()
        worst = max(worst, _judge(check_run, inputs, captured.outputs, f"replay {number}"))
    captured.close()
    return worst


def _growth(check_run: CheckRun, fixture: DeviceFixture, seed: int) -> float:
    inputs = check_run.draw(Draw(fixture, seed))
    check_growth(fixture, lambda: check_run.call(inputs))
    return 0.0


def _endurance(check_run: CheckRun, fixture: DeviceFixture, seed: int) -> tuple[float, str]:
    draw, sizes = Draw(fixture, seed), sizes_in_turn(fixture)
    constant = check_run.draw(draw)

    def fresh(number: int) -> float:
        check_run.resize(sizes[number])
        inputs = check_run.draw(draw)
        given = _copies(inputs)
        return check_run.judge(given, check_run.call(inputs))

    def repeated() -> tuple[torch.Tensor, ...]:
        return check_run.call(_copies(constant))

    return check_endurance(fixture, Step(fresh, repeated if check_run.is_repeatable else None))


def _copies(inputs: Mapping[str, torch.Tensor]) -> Tensors:
    """Clones that keep the strides, including the gaps of strided rows."""
    return {name: _copy(value) for name, value in inputs.items()}


def _copy(value: torch.Tensor) -> torch.Tensor:
    if value.is_contiguous():
        return value.clone()
    base = torch.as_strided(value, (_extent(value),), (1,), value.storage_offset())
    return torch.as_strided(base.clone(), value.shape, value.stride())


def _extent(value: torch.Tensor) -> int:
    """Number of elements from the first to the last one of a view."""
    return 1 + sum((size - 1) * step for size, step in zip(value.shape, value.stride(), strict=True))
