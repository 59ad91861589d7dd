"""The workloads of benchmarks: token ids in, a fixed number of tokens out, end-of-sequence ignored."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from random import Random
from typing import Final

from minisgl_core.errors import UsageError, nearest

__all__ = ["WORKLOADS", "Workload", "make_workload"]

LARGEST_ID: Final = 10_000


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests that all arrive at once, in this order."""

    mode: str
    prompts: tuple[tuple[int, ...], ...]
    outputs: tuple[int, ...]
    temperature: float
    shared: int = 0
    """Tokens at the start of every prompt that are in the prefix cache before the work begins."""
    seed: int = 0
    """The seed of its random tokens."""

    @property
    def prefix(self) -> tuple[int, ...]:
        """The shared tokens."""
        return self.prompts[0][: self.shared]

    @property
    def tokens_in(self) -> int:
        return sum(map(len, self.prompts))

    @property
    def tokens_out(self) -> int:
        return sum(self.outputs)

    @property
    def longest(self) -> int:
        """Length of the longest sequence, prompt and output."""
        return max(len(p) + n for p, n in zip(self.prompts, self.outputs, strict=True))

    def facts(self) -> dict[str, int]:
        """The parameters that its figures depend on, as JSON data."""
        return {
            "seed": self.seed,
            "requests": len(self.prompts),
            "tokens_in": self.tokens_in,
            "tokens_out": self.tokens_out,
        }

    def shortened(self, by: int) -> Workload:
        """A smaller workload of the same kind: outputs ``by`` times shorter, or fewer requests if each has one output
        token.
        """
        if max(self.outputs) == 1:
            return replace(self, prompts=self.prompts[::by], outputs=self.outputs[::by])
        return replace(self, outputs=tuple(-(-n // by) for n in self.outputs))

    def warm_up(self, by: int) -> Workload:
        """``shortened``, with prompts ``by`` times shorter as well unless they share a prefix.

        The batch sizes are the same at a fraction of the cost, since most of a large model's time is spent on prompts.
        """
        short = self.shortened(by)
        if self.shared or max(self.outputs) == 1:
            return short
        return replace(short, prompts=tuple(prompt[: -(-len(prompt) // by)] for prompt in short.prompts))

    def redrawn(self, run: int) -> Workload:
        """The same workload for another run: everything after a shared prefix is drawn again."""
        if not self.shared:
            return self
        r = Random(f"{self.seed}:{run}")
        tails = (_ids(r, len(prompt) - self.shared) for prompt in self.prompts)
        return replace(self, prompts=tuple(self.prefix + tail for tail in tails))

    def within(self, vocab_size: int) -> Workload:
        """The same workload for a model with a smaller vocabulary than the benchmark's."""
        if vocab_size > LARGEST_ID:
            return self
        prompts = tuple(tuple(token % vocab_size for token in prompt) for prompt in self.prompts)
        return replace(self, prompts=prompts)


def _ids(r: Random, count: int) -> tuple[int, ...]:
    return tuple(r.randint(0, LARGEST_ID) for _ in range(count))


def _offline(r: Random, requests: int) -> Workload:
    """Prompts, then outputs, of 100 to 1024 tokens each."""
    prompts = tuple(_ids(r, r.randint(100, 1024)) for _ in range(requests))
    return Workload("offline", prompts, tuple(r.randint(100, 1024) for _ in range(requests)), 0.6)


def _latency(r: Random, requests: int) -> Workload:
    """One request: a batch of one."""
    return Workload("latency", (_ids(r, 128),), (512,), 0.6)


def _prefill(r: Random, requests: int) -> Workload:
    return Workload("prefill", tuple(_ids(r, 1024) for _ in range(requests)), (1,) * requests, 0.6)


def _shared_prefix(r: Random, requests: int) -> Workload:
    prefix = _ids(r, 2048)
    prompts = tuple(prefix + _ids(r, r.randint(16, 128)) for _ in range(requests))
    return Workload("shared-prefix", prompts, (64,) * requests, 0.6, shared=len(prefix))


WORKLOADS: Final[Mapping[str, tuple[Callable[[Random, int], Workload], int]]] = {
    "offline": (_offline, 256),
    "latency": (_latency, 1),
    "prefill": (_prefill, 64),
    "shared-prefix": (_shared_prefix, 64),
}
"""Mode -> (function that draws it, number of requests)."""


def make_workload(mode: str, seed: int = 0, requests: int | None = None) -> Workload:
    """The workload of a mode. Raises :class:`UsageError` for an unknown mode."""
    if mode not in WORKLOADS:
        hint = nearest(mode, WORKLOADS) or f"the modes are {', '.join(WORKLOADS)}"
        raise UsageError(f"unknown benchmark mode {mode!r}", field="mode", value=mode, remedy=hint)
    draw, usual = WORKLOADS[mode]
    return replace(draw(Random(seed), requests or usual), seed=seed)
