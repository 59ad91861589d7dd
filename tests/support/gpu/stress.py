"""Many random requests at once: each must be answered as if it were alone."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from random import Random
from typing import Any, Final

from minisgl_core.core import SamplingParams
from minisgl_core.llm import LLM

from ..make_checkpoints import ensure_checkpoint
from .check import Context, expect
from .near_tie import Comparison, Fault, NearTieJudge, compare_to_the_end, is_near_tie
from .serving import answers, serve

__all__ = ["EXACT", "HALF", "MODEL", "Request", "compare", "serve_and_compare", "solo_answers", "workload"]

MODEL: Final = "q3-bf16"
"""Its weights are exact in bfloat16, so that both dtypes compute the same model."""
EXACT: Final = 1e-4
"""float32 logits of batches of different sizes differ by less than this share of their range."""
HALF: Final = 3e-2
"""Logits in bfloat16, as for teacher forcing."""


@dataclass(frozen=True)
class Request:
    """A prompt and its parameters"""

    prompt: tuple[int, ...]
    params: SamplingParams

    def after(self, fed: Sequence[int]) -> Request:
        """The rest of the request behind the tokens ``fed``. A seed's noise depends on the position alone."""
        if not fed:
            return self
        left = (self.params.max_tokens or 0) - len(fed)
        return Request((*self.prompt, *fed), replace(self.params, max_tokens=left))


def workload(context: Context, growing: bool = False) -> list[Request]:
    """Greedy and seeded requests of random lengths; every fourth may meet a stop token, some prompts begin alike.

    ``growing``: short prompts and long answers instead, which outgrow a pool that holds them at first.
    """
    if growing:
        count, longest, outputs = (8, 12, (40, 56)) if context.tiny else (48, 16, (64, 112))
    else:
        sizes = (12, 20, (1, 8)) if context.tiny else (256, 128, (1, 32)) if context.quick else (256, 512, (1, 128))
        count, longest, outputs = sizes
    draw = Random(62)
    stems = [tuple(draw.randrange(3, 500) for _ in range(longest // 2)) for _ in range(4)]
    return [_request(draw, stems, index, longest, outputs) for index in range(count)]


def _request(
    draw: Random, stems: Sequence[tuple[int, ...]], index: int, longest: int, outputs: tuple[int, int]
) -> Request:
    length = draw.randint(1, longest)
    own = tuple(draw.randrange(3, 500) for _ in range(length))
    prompt = (stems[index % len(stems)] + own)[:length] if index % 3 == 0 else own
    hot = {"temperature": draw.choice((1.0, 4.0)), "seed": draw.randrange(2**40)}
    kinds: tuple[dict[str, Any], ...] = ({}, {}, hot, {**hot, "top_k": 20, "top_p": 0.9}, {**hot, "min_p": 0.05})
    stop = [draw.randrange(3, 500) for _ in range(20)] if index % 4 == 0 else []
    params = SamplingParams(
        max_tokens=draw.randint(*outputs), ignore_eos=True, stop_token_ids=stop, **kinds[index % len(kinds)]
    )
    return Request(prompt, params)


def solo_answers(context: Context, requests: Sequence[Request], name: str) -> list[list[int]]:
    """The answer to each request alone: no graphs, overlap or prefix cache, page size 1. Made once per run and name."""

    def make(folder: Path) -> None:
        plain: dict[str, Any] = {"page_size": 1, "cache": "naive", "cuda_graph_max_bs": 0, "max_running_req": 1}
        with serve(context, ensure_checkpoint(MODEL), overlap=False, pool_tokens=1024, **plain) as llm:
            alone = [answers(llm, [request.prompt], request.params)[0] for request in requests]
        (folder / "tokens.json").write_text(json.dumps(alone))

    found: list[list[int]] = json.loads((context.once(f"alone-{name}", make) / "tokens.json").read_text())
    return found


def serve_and_compare(
    context: Context, tolerance: float, runs: Sequence[Mapping[str, Any]], growing: bool = False
) -> int:
    """Serve the workload under the settings of each run, and compare; the number of preemptions."""
    requests, model = workload(context, growing), ensure_checkpoint(MODEL)
    alone = solo_answers(context, requests, "growing" if growing else "all")
    found, preemptions = Comparison(), 0
    for settings in runs:
        defaults = {"pool_tokens": 64 * 1024, "max_running_req": 8 if context.tiny else 64}
        with serve(context, model, **{**defaults, **settings}) as llm:

            def answer(some: Sequence[Request], llm: LLM = llm) -> list[list[int]]:
                return answers(llm, [request.prompt for request in some], [request.params for request in some])

            found += compare(context, model, requests, alone, tolerance, answer)
            preemptions += llm.scheduler.stats.preemptions
        context.note(requests=len(requests), **found.figures, preemptions=preemptions)
    return preemptions


def compare(
    context: Context,
    model: Path,
    requests: Sequence[Request],
    alone: Sequence[Sequence[int]],
    tolerance: float,
    answer: Callable[[Sequence[Request]], Sequence[Sequence[int]]],
) -> Comparison:
    """Compare every token that ``answer`` returns with the solo answers, also behind near-ties; fail for a fault."""
    with ExitStack() as stack:
        judge = cache(lambda: stack.enter_context(NearTieJudge(context, model)))  # an engine, made where it is needed

        def near_tie(index: int, position: int, token: int) -> bool:
            request, wanted = requests[index], alone[index]
            before = [*request.prompt, *wanted[:position]]
            pair = (token, wanted[position])
            return is_near_tie(judge().logits(before), request.params, len(before), pair, tolerance)

        found = compare_to_the_end(
            alone, lambda fed: answer([requests[i].after(alone[i][:count]) for i, count in fed.items()]), near_tie
        )
    faults = [_described(fault, requests[fault.answer], len(alone[fault.answer])) for fault in found.faults]
    expect(not faults, "\n".join([f"{len(faults)} of {len(requests)} requests are answered wrongly:", *faults[:8]]))
    return found


def _described(fault: Fault, request: Request, expected: int) -> str:
    where = f"request {fault.answer} (prompt of {len(request.prompt)}, {request.params.temperature=}): "
    if fault.got is None:
        return f"{where}{fault.position} tokens instead of {expected}, equal as far as they go"
    if fault.wanted is None:
        return f"{where}more than {expected} tokens, equal as far as those go"
    return f"{where}token {fault.position} is {fault.got} instead of {fault.wanted}, and not by a near-tie"
