"""One call of a backend as data in, data out: run eagerly, captured, and often."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, Self

import torch

from .case import Case, Finding, box_of
from .compare import Mismatch, fresh, unchanged

if TYPE_CHECKING:
    from collections.abc import Sequence

    from minisgl_core.plugin_api import Caps

    from .rig import Rig
    from .subject import Subject

__all__ = ["Draw", "Trial", "TrialCase", "check_growth", "spread"]

Tensors = dict[str, torch.Tensor]

REPLAYS = 3
CALLS = 3
"""On rewritten inputs"""
GROWTH_STEPS = 4


class Draw:
    """Random tensors on the device; the same numbers on every device."""

    def __init__(self, rig: Rig, seed: int) -> None:
        self.device, self._random = rig.device, rig.generator(seed)

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> torch.Tensor:
        """Standard normal, times ``scale``, rounded to ``dtype``."""
        return (torch.randn(shape, generator=self._random) * scale).to(self.device, dtype)

    def integers(self, low: int, high: int, *shape: int) -> torch.Tensor:
        """int32 in [low, high)"""
        return torch.randint(low, high, shape, generator=self._random).to(self.device, torch.int32)

    def order(self, count: int) -> torch.Tensor:
        """A permutation of ``range(count)``, int64."""
        return torch.randperm(count, generator=self._random).to(self.device)


class Trial:
    """What a case does to its backend. Results that :attr:`is_new` must not share memory with anything."""

    is_new = True
    may_overwrite: frozenset[str] = frozenset()
    """Inputs that the contract lets a backend overwrite."""

    def draw(self, draw: Draw) -> Tensors:
        """New inputs, of the same shapes each time."""
        raise NotImplementedError

    def call(self, inputs: Tensors) -> tuple[torch.Tensor, ...]:
        """Device work only, so that it can be captured."""
        raise NotImplementedError

    def judge(self, inputs: Tensors, outputs: Sequence[torch.Tensor]) -> float:
        """The worst error; raises :class:`Mismatch`."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True, repr=False)
class TrialCase(Case):
    """A case that is one :class:`Trial`. ``how``: eager, replay (captured), rewritten (again and again on the same
    tensors, which hold something else each time), in_turn (several backends side by side), or growth (memory after
    warm-up).
    """

    how: Literal["eager", "replay", "rewritten", "in_turn", "growth"] = "eager"
    dtype: str = "float32"
    seed: int = 0

    def trial(self, backend: Any, rig: Rig) -> Trial:
        """The call that this case makes."""
        raise NotImplementedError

    def build(self, subject: Subject, rig: Rig, box: Caps | None) -> Any:
        """The backend, told what the core would tell it."""
        raise NotImplementedError

    def siblings(self) -> tuple[Self, ...]:
        """What the other backends of ``in_turn`` are built for: the same shapes with other contents, and other
        shapes where a setup speaks of shapes.
        """
        return (replace(self, seed=self.seed + 100),)

    def run(self, subject: Subject, rig: Rig) -> Finding:
        if self.how == "in_turn":
            return Finding({self.dtype: self._in_turn(subject, rig)})
        backend = self.build(subject, rig, box_of(subject, self, rig))
        trial = self.trial(backend, rig)
        run = {"eager": _eager, "replay": _replay, "rewritten": _rewritten, "growth": _growth}[self.how]
        worst = run(trial, rig, self.seed)
        rig.platform.synchronize()
        backend.close()
        return Finding({self.dtype: worst})

    def _in_turn(self, subject: Subject, rig: Rig) -> float:
        """Several backends live beside each other. All are called whenever one has come to life, and the first once
        more when the others are closed.
        """
        alive: list[tuple[Any, Trial, Draw]] = []
        worst = 0.0
        for case in (self, *self.siblings()):
            backend = case.build(subject, rig, box_of(subject, case, rig))
            alive.append((backend, case.trial(backend, rig), Draw(rig, case.seed)))
            for place, (_, trial, draw) in enumerate(alive):
                what = f"a call of instance {place} of {len(alive)}"
                worst = max(worst, _judged(trial, trial.draw(draw), what))
        rig.platform.synchronize()
        for backend, _, _ in alive[1:]:
            backend.close()
        backend, trial, draw = alive[0]
        worst = max(worst, _judged(trial, trial.draw(draw), "a call of instance 0, after the others were closed"))
        rig.platform.synchronize()
        backend.close()
        return worst


def spread(rows: torch.Tensor, pad: int = 8) -> torch.Tensor:
    """The same (T, N) values as a view of wider rows, whose gaps hold NaN."""
    wide = torch.full((rows.shape[0], rows.shape[1] + pad), torch.nan, dtype=rows.dtype, device=rows.device)
    wide[:, : rows.shape[1]] = rows
    return wide[:, : rows.shape[1]]


def check_growth(rig: Rig, step: Callable[[], object]) -> None:
    """After some steps of warm-up, more of them leave no memory behind."""

    def steps(count: int) -> None:
        for _ in range(count):
            step()

    steps(1)
    with rig.memory_watch() as in_use:
        steps(2)  # what is only replaced is counted from here on
        before = in_use()
        steps(GROWTH_STEPS)
        grown = in_use() - before
    if grown > 0:
        raise Mismatch(f"{GROWTH_STEPS} steps after warm-up left {grown} bytes of tensors behind")


def _eager(trial: Trial, rig: Rig, seed: int) -> float:
    draw = Draw(rig, seed)
    inputs = trial.draw(draw)
    given = _copies(inputs)
    outputs = trial.call(inputs)
    worst = trial.judge(given, outputs)
    for name, value in inputs.items():
        if name not in trial.may_overwrite:
            unchanged(value, given[name], name)
    if trial.is_new:
        _check_new(trial, inputs, outputs, draw)
    return worst


def _check_new(trial: Trial, inputs: Tensors, outputs: tuple[torch.Tensor, ...], draw: Draw) -> None:
    kept = [out.clone() for out in outputs]
    later = trial.call(trial.draw(draw))
    for number, (out, copy, second) in enumerate(zip(outputs, kept, later, strict=True)):
        fresh(out, {k: v for k, v in inputs.items() if k not in trial.may_overwrite}, f"result {number}")
        fresh(second, {"an earlier result": out}, f"result {number}")
        unchanged(out, copy, "an earlier result")


def _judged(trial: Trial, inputs: Tensors, what: str) -> float:
    """One call; ``what`` names it in a complaint."""
    given = _copies(inputs)
    return _judge(trial, given, trial.call(inputs), what)


def _judge(trial: Trial, inputs: Tensors, outputs: Sequence[torch.Tensor], what: str) -> float:
    try:
        return trial.judge(inputs, outputs)
    except Mismatch as found:
        raise Mismatch(f"{what}: {found}") from None


def _rewritten(trial: Trial, rig: Rig, seed: int) -> float:
    draw = Draw(rig, seed)
    inputs = trial.draw(draw)
    worst = 0.0
    for number in range(CALLS):
        worst = max(worst, _judged(trial, inputs, f"call {number} on the same tensors, rewritten"))
        _rewrite(inputs, trial.draw(draw))
    return worst


def _rewrite(inputs: Tensors, values: Tensors) -> None:
    for name, value in values.items():
        inputs[name].copy_(value)


def _replay(trial: Trial, rig: Rig, seed: int) -> float:
    """Inputs at fixed addresses; a call with them before the capture must leave nothing behind that it relies on."""
    draw = Draw(rig, seed)
    inputs = trial.draw(draw)

    def step() -> tuple[torch.Tensor, ...]:
        copies = _copies({name: inputs[name] for name in trial.may_overwrite if name in inputs})
        return trial.call({**inputs, **copies})

    step()
    captured = rig.capture(step)
    worst = 0.0
    for number in range(REPLAYS):
        _rewrite(inputs, trial.draw(draw))
        captured.replay()
        worst = max(worst, _judge(trial, inputs, captured.outputs, f"replay {number}"))
    captured.close()
    return worst


def _growth(trial: Trial, rig: Rig, seed: int) -> float:
    inputs = trial.draw(Draw(rig, seed))
    check_growth(rig, lambda: trial.call(inputs))
    return 0.0


def _copies(inputs: Mapping[str, torch.Tensor]) -> Tensors:
    """Clones that keep the strides, gaps of strided rows included."""
    return {name: _copy(value) for name, value in inputs.items()}


def _copy(value: torch.Tensor) -> torch.Tensor:
    if value.is_contiguous():
        return value.clone()
    base = torch.as_strided(value, (_extent(value),), (1,), value.storage_offset())
    return torch.as_strided(base.clone(), value.shape, value.stride())


def _extent(value: torch.Tensor) -> int:
    """Elements from the first to the last one of a view."""
    return 1 + sum((size - 1) * step for size, step in zip(value.shape, value.stride(), strict=True))
