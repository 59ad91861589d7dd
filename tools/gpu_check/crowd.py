"""256 random requests at once, under every setting: each is answered as if it were alone."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any, Final

from minisgl_core.core import SamplingParams

from .checks import Check, Here, expect
from .forcing import Comparison, Fault, compare_to_the_end
from .parity import AttentionPair

if TYPE_CHECKING:
    from minisgl_core.llm import LLM

__all__ = ["Wish", "checks", "compare", "solo_answers", "workload"]

MODEL: Final = "q3-bf16"
"""Its weights are exact in bfloat16, so that both dtypes compute the same model."""
EXACT: Final = 1e-4
"""float32 logits of batches of different sizes differ by less than this share of their range."""
HALF: Final = 3e-2
"""Logits in bfloat16, as for teacher forcing."""
SETTINGS: Final[Mapping[str, Mapping[str, Any]]] = {
    "default": {},
    "no-graphs": {"cuda_graph_max_bs": 0},
    "no-overlap": {"overlap": False},
    "neither": {"cuda_graph_max_bs": 0, "overlap": False},
    "page-1": {"page_size": 1},
    "page-64": {"page_size": 64},
    "page-256": {"page_size": 256},
    "chunks-of-32": {"max_prefill_tokens": 32},
    "no-prefix-cache": {"cache": "naive"},
}
CASES: Final[Mapping[str, tuple[int, ...]]] = {
    "default": (43, 46, 62, 65),
    "no-graphs": (65,),
    "no-overlap": (62,),
    "chunks-of-32": (27, 64),
}
LIMIT_S: Final = 400.0
"""Whoever comes first answers all requests alone, and the others wait for it."""
TIMES: Final = {"default": 3}
"""Runs in a row, to give races a chance; one for all others and with ``--quick``."""


@dataclass(frozen=True)
class Wish:
    """One request."""

    prompt: tuple[int, ...]
    params: SamplingParams

    def after(self, fed: Sequence[int]) -> Wish:
        """The rest of it, once ``fed`` has been answered: noise goes by position, so a seeded one goes on as well."""
        if not fed:
            return self
        left = (self.params.max_tokens or 0) - len(fed)
        return Wish((*self.prompt, *fed), replace(self.params, max_tokens=left))


def checks(quick: bool, pairs: Sequence[AttentionPair]) -> list[Check]:
    """float32 under each setting and with blocking launches; bfloat16 for each pair of attention backends."""
    cost = 6.0 if quick else 20.0
    found = [
        Check(
            f"crowd/{name}",
            partial(as_alone, name),
            cost * (1 if quick else TIMES.get(name, 1)) + (20.0 if name == "default" else 0.0),
            session="crowd",
            limit_s=LIMIT_S,
            cases=CASES.get(name, ()),
        )
        for name in SETTINGS
    ]
    found.append(Check("crowd/small-pool", in_a_small_pool, 1.5 * cost, session="crowd/small-pool", cases=(63,)))
    blocking = {"CUDA_LAUNCH_BLOCKING": "1"}
    found.append(
        Check(
            "crowd/launch-blocking", partial(as_alone, "default"), 2 * cost, env=blocking, cases=(62,), limit_s=LIMIT_S
        )
    )
    return found + [
        Check(
            f"crowd/{pair.name}",
            partial(as_alone_in_half, pair.backends),
            2 * cost,
            session="crowd/bf16",
            quick=pair.main,
            cases=(62, 64),
            limit_s=LIMIT_S,
            needs=pair.needs,
        )
        for pair in pairs
    ]


def workload(here: Here, growing: bool = False) -> list[Wish]:
    """Greedy and seeded requests of random lengths; every fourth may meet a stop token, some prompts begin alike.

    ``growing``: short prompts and long answers instead, which outgrow a pool that had room for them at first.
    """
    if growing:
        count, longest, outputs = (8, 12, (40, 56)) if here.tiny else (48, 16, (64, 112))
    else:
        sizes = (12, 20, (1, 8)) if here.tiny else (256, 128, (1, 32)) if here.quick else (256, 512, (1, 128))
        count, longest, outputs = sizes
    draw = Random(62)
    stems = [tuple(draw.randrange(3, 500) for _ in range(longest // 2)) for _ in range(4)]
    return [_wish(draw, stems, index, longest, outputs) for index in range(count)]


def _wish(draw: Random, stems: Sequence[tuple[int, ...]], index: int, longest: int, outputs: tuple[int, int]) -> Wish:
    length = draw.randint(1, longest)
    own = tuple(draw.randrange(3, 500) for _ in range(length))
    prompt = (stems[index % len(stems)] + own)[:length] if index % 3 == 0 else own
    hot = {"temperature": draw.choice((1.0, 4.0)), "seed": draw.randrange(2**40)}
    kinds: tuple[dict[str, Any], ...] = ({}, {}, hot, {**hot, "top_k": 20, "top_p": 0.9}, {**hot, "min_p": 0.05})
    stop = [draw.randrange(3, 500) for _ in range(20)] if index % 4 == 0 else []
    params = SamplingParams(
        max_tokens=draw.randint(*outputs), ignore_eos=True, stop_token_ids=stop, **kinds[index % len(kinds)]
    )
    return Wish(prompt, params)


def solo_answers(here: Here, wishes: Sequence[Wish], name: str) -> list[list[int]]:
    """What each is answered alone: no graphs, no overlap, no prefix cache, page size 1. Made once per run and name."""
    from .models import tiny_checkpoint
    from .serving import answers, serve

    def make(folder: Path) -> None:
        plain: dict[str, Any] = {"page_size": 1, "cache": "naive", "cuda_graph_max_bs": 0, "max_running_req": 1}
        with serve(here, tiny_checkpoint(MODEL), overlap=False, pool_tokens=1024, **plain) as llm:
            alone = [answers(llm, [wish.prompt], wish.params)[0] for wish in wishes]
        (folder / "tokens.json").write_text(json.dumps(alone))

    found: list[list[int]] = json.loads((here.once(f"alone-{name}", make) / "tokens.json").read_text())
    return found


def as_alone(name: str, here: Here) -> dict[str, Any]:
    """float32 with attention:torch: equal tokens, but for near-ties."""
    times = 1 if here.quick else TIMES.get(name, 1)
    return _serve_and_compare(here, EXACT, [{"dtype": "float32", **SETTINGS[name]}] * times)


def in_a_small_pool(here: Here) -> dict[str, Any]:
    """As :func:`as_alone`, with requests that drive each other out of the pool."""
    running = 4 if here.tiny else 16
    settings = {"dtype": "float32", "max_running_req": running, "pool_tokens": 32 * running}
    figures = _serve_and_compare(here, EXACT, [settings], growing=True)
    expect(figures["preemptions"] > 0, "the pool was not small enough: no request was preempted")
    return figures


def as_alone_in_half(pair: dict[str, str], here: Here) -> dict[str, Any]:
    """bfloat16 with one pair of attention backends, with overlap and without."""
    common = {"dtype": "bfloat16", "backends": {"attention": pair}}
    return _serve_and_compare(here, HALF, [common, {**common, "overlap": False}])


def _serve_and_compare(
    here: Here, tolerance: float, runs: Sequence[Mapping[str, Any]], growing: bool = False
) -> dict[str, Any]:
    from .models import tiny_checkpoint
    from .serving import answers, serve

    wishes, model = workload(here, growing), tiny_checkpoint(MODEL)
    alone = solo_answers(here, wishes, "growing" if growing else "all")
    found, preemptions = Comparison(), 0
    for settings in runs:
        room = {"pool_tokens": 64 * 1024, "max_running_req": 8 if here.tiny else 64}
        with serve(here, model, **{**room, **settings}) as llm:

            def answer(some: Sequence[Wish], llm: LLM = llm) -> list[list[int]]:
                return answers(llm, [wish.prompt for wish in some], [wish.params for wish in some])

            found += compare(here, model, wishes, alone, tolerance, answer)
            preemptions += llm.scheduler.stats.preemptions
        here.note(requests=len(wishes), **found.figures, preemptions=preemptions)
    return {"preemptions": preemptions}


def compare(
    here: Here,
    model: Path,
    wishes: Sequence[Wish],
    alone: Sequence[Sequence[int]],
    tolerance: float,
    answer: Callable[[Sequence[Wish]], Sequence[Sequence[int]]],
) -> Comparison:
    """Every token that ``answer`` gives with the solo answers, past near-ties too; raises :class:`Failed`."""
    from .ties import TieJudge, is_tie

    with ExitStack() as stack:
        judge = cache(lambda: stack.enter_context(TieJudge(here, model)))  # an engine, made where it is needed

        def near_tie(index: int, position: int, token: int) -> bool:
            wish, wanted = wishes[index], alone[index]
            before = [*wish.prompt, *wanted[:position]]
            pair = (token, wanted[position])
            return is_tie(judge().logits(before), wish.params, len(before), pair, tolerance)

        found = compare_to_the_end(
            alone, lambda fed: answer([wishes[i].after(alone[i][:count]) for i, count in fed.items()]), near_tie
        )
    faults = [_described(fault, wishes[fault.answer], len(alone[fault.answer])) for fault in found.faults]
    expect(not faults, "\n".join([f"{len(faults)} of {len(wishes)} requests are answered wrongly:", *faults[:8]]))
    return found


def _described(fault: Fault, wish: Wish, expected: int) -> str:
    where = f"request {fault.answer} (prompt of {len(wish.prompt)}, {wish.params.temperature=}): "
    if fault.got is None:
        return f"{where}{fault.position} tokens instead of {expected}, equal as far as they go"
    if fault.wanted is None:
        return f"{where}more than {expected} tokens, equal as far as those go"
    return f"{where}token {fault.position} is {fault.got} instead of {fault.wanted}, and not by a near-tie"
