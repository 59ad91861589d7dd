"""Whole engines against references: equal tokens in float32, logits within a bound in bfloat16, NaN in the pool."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

from support.driver import greedy
from support.gpu.backends import AttentionPair, attention_pairs
from support.gpu.check import Context, Failed, expect
from support.gpu.collect import context_of
from support.gpu.models import forced_model, real_geometry
from support.gpu.near_tie import Comparison, compare_to_the_end
from support.gpu.serving import answers, serve
from support.gpu.teacher_forced import Script, follow, judge, make_script
from support.make_checkpoints import answer_of, ensure_checkpoint, load_model, reference

pytestmark = pytest.mark.gpu
FAMILIES = ("q3", "q25", "s93", "mistral-window", "moe", "moe2")
VARIANTS = ("qwen2-window", "llama-bias", "llama-llama3", "llama-yarn", "q3-16q2kv", "q3-untied", "moe-mixed")
NEAR_TIE = 1e-2
"""Two logits that differ by less may swap in float32."""
PAGES = (1, 16, 64, 256)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Pairs of attention backends; for ``bf16`` with each model and its page sizes."""
    context, test = context_of(metafunc.config), metafunc.function.__name__
    if "pair" not in metafunc.fixturenames:
        return
    pairs = attention_pairs(context)
    if test == "test_bf16":
        metafunc.parametrize(("pair", "model", "pages"), [
            pytest.param(pair, model, pages, id=f"{pair.name}/{model}", marks=pytest.mark.check(
                seconds=6.0 * (1 + len(pages)), session=f"bf16/{pair.name}", needs=pair.needs,
                quick=pair.main or model == "dense",
            ))
            for pair, model in product(pairs, ("dense", "ratio5", "moe"))
            for pages in [PAGES if model == "dense" or not context.quick else (16,)]
        ])  # fmt: skip
        return
    metafunc.parametrize("pair", [
        pytest.param(pair, id=pair.name, marks=pytest.mark.check(session=f"bf16/{pair.name}", needs=pair.needs))
        for pair in (pairs[:1] if test == "test_few_rows" else pairs)
    ])  # fmt: skip


@pytest.mark.check(seconds=12.0)
@pytest.mark.parametrize("name", [
    *(pytest.param(name, marks=pytest.mark.check(session="fp32/families", cases=(16, 24) if "window" in name else ()))
      for name in FAMILIES),
    *(pytest.param(name, marks=pytest.mark.check(session="fp32/variants", quick=False)) for name in VARIANTS),
    pytest.param("qwen3-0.6b-widths", marks=pytest.mark.check(seconds=60.0)),
])  # fmt: skip
def test_fp32(name: str, context: Context) -> None:
    """A model answers as in transformers: twice, the second time from the prefix cache."""
    if name.endswith("-widths"):
        model = real_geometry(context)
        compare_with(answer_of(load_model(model)), model, context)
    else:
        compare_with(reference(name), ensure_checkpoint(name), context)


def compare_with(expected: Any, model: Any, context: Context) -> None:
    steps, total = len(expected.continuations[0]), Comparison()
    with serve(context, model) as llm:

        def answer(fed: Mapping[int, int]) -> list[list[int]]:
            prompts = [[*expected.prompts[i], *expected.continuations[i][:count]] for i, count in fed.items()]
            return answers(llm, prompts, [greedy(steps - count) for count in fed.values()])

        for turn in ("first", "cached"):
            found = compare_to_the_end(expected.continuations, answer, partial(near_tie, expected))
            total += found
            for fault in found.faults:
                text = (
                    f"{turn} answer to the prompt of {len(expected.prompts[fault.answer])} tokens: token "
                    f"{fault.position} is {fault.got}, expected {fault.wanted}\n"
                    f"expected {expected.continuations[fault.answer]}\n"
                    f"margins  {[f'{m:.2g}' for m in expected.margins[fault.answer]]}"
                )
                raise Failed(text, pytrace=False)
    expect(total.compared > 0, "no token was compared")
    context.note(**total.figures, smallest_margin=float(np.min(expected.margins)))


def near_tie(expected: Any, index: int, position: int, token: int) -> bool:
    logits = expected.logits[index][position]
    return bool(logits.max() - logits[token] <= NEAR_TIE)


def test_bf16(pair: AttentionPair, model: str, pages: Sequence[int], context: Context) -> None:
    """Teacher-forced logits at every page size with graphs, and at one without."""
    folder = forced_model(context, model)
    script = make_script(context, model, folder)
    worst = 0.0
    for page_size, graphs in [*((size, True) for size in pages), (16, False)]:
        logits, tokens, _ = follow(context, folder, script, pair.backends, page_size=page_size, graphs=graphs)
        figures = judged(script, logits, tokens, f"page size {page_size}", graphs)
        worst = max(worst, figures["worst_error"])
        context.note(**{**figures, "worst_error": worst})


def judged(script: Script, logits: torch.Tensor, tokens: torch.Tensor, where: str, graphs: bool) -> dict[str, float]:
    """:func:`judge`, with the settings in its message."""
    try:
        return judge(script, logits, tokens)
    except Failed as failed:
        raise Failed(f"{where}, graphs {'on' if graphs else 'off'}: {failed}", pytrace=False) from None


@pytest.mark.check(seconds=20.0)
def test_few_rows(pair: AttentionPair, context: Context) -> None:
    """Teacher-forced logits at the widths of Qwen3-0.6B, for several rows and for one. Kernels of few rows run,
    and products with fused prologues and epilogues.
    """
    folder = forced_model(context, "widths")
    script = make_script(context, "widths", folder)
    alone = replace(
        script, prompts=script.prompts[-1:], continuations=script.continuations[-1:], wanted=script.wanted[-1:]
    )
    worst = 0.0
    for (rows, part), graphs in product((("several rows", script), ("one row", alone)), (True, False)):
        logits, tokens, engine = follow(context, folder, part, pair.backends, graphs=graphs)
        figures = judged(part, logits, tokens, rows, graphs)
        worst = max(worst, figures["worst_error"])
        fused = {op for choice in engine.plan.choices("linear") for op in engine.plan.fused(choice)}
        context.note(**{**figures, "worst_error": worst, "may_fuse": " ".join(sorted(fused)) or "nothing"})


@pytest.mark.check(seconds=12.0, cases=(65,))
def test_poison(pair: AttentionPair, context: Context) -> None:
    """NaN in every page that no row owns, and in fresh pages where no backend needs finite tails."""
    folder = forced_model(context, "dense")
    script = make_script(context, "dense", folder)
    for page_size, graphs in product((16, 64), (True, False)):
        settings: dict[str, Any] = {"page_size": page_size, "graphs": graphs}
        clean, _, _ = follow(context, folder, script, pair.backends, **settings)
        logits, tokens, engine = follow(context, folder, script, pair.backends, **settings, poison=True)
        where = f"page size {page_size}, graphs {'on' if graphs else 'off'}"
        expect(not logits.isnan().any(), f"{where}: NaN came out of pages that no row owns or has written")
        context.note(**judge(script, logits, tokens))
        span = float(clean.amax() - clean.amin())
        change = float((logits - clean).abs().max()) / span
        expect(change < 1e-3, f"{where}: the poison changed logits by {change:.3g} of their range")
        context.note(change=change, finite_tail=any(c.finite_tail for c in engine.plan.choices("attention")))
