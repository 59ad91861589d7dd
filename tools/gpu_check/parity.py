"""Whole engines against transformers: equal tokens in float32, logits within a bound in bfloat16, NaN in the pool."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from minisgl_core.installation import Environment, check_requires
from minisgl_core.plugin_api import Phase
from minisgl_core.registry import DeviceFacts, Registry
from minisgl_core.registry.matching import match
from minisgl_core.registry.query import Requirement

from .checks import Check, Failed, Here, expect
from .conformance import backends_here, needs_of
from .forcing import Comparison, compare_to_the_end

if TYPE_CHECKING:
    import torch

    from .forced import Script

__all__ = ["AttentionPair", "attention_pairs", "checks"]

FAMILIES: Final = ("q3", "q25", "s93", "mistral-window", "moe", "moe2")
VARIANTS: Final = ("qwen2-window", "llama-bias", "llama-llama3", "llama-yarn", "q3-16q2kv", "q3-untied", "moe-mixed")
NEAR_TIE: Final = 1e-2
"""Two logits nearer than this may change places in float32."""
PAGES: Final = (1, 16, 64, 256)
MODELS: Final = ("dense", "ratio5", "moe")


@dataclass(frozen=True)
class AttentionPair:
    """A backend for prefill and one for decode; ``main`` ones together have each backend in each of its phases."""

    prefill: str
    decode: str
    main: bool
    needs: tuple[str, ...]
    """What must be installed for them"""

    @property
    def name(self) -> str:
        """Such as ``fa+cuda_decode``."""
        return f"{self.prefill}+{self.decode}"

    @property
    def backends(self) -> dict[str, str]:
        """As a config has it."""
        return {"prefill": self.prefill, "decode": self.decode}


def checks(quick: bool, pairs: Sequence[AttentionPair]) -> list[Check]:
    """float32 by model family, bfloat16 and poison by pair of attention backends."""
    found = [
        Check(
            f"fp32/{name}",
            partial(same_tokens, name),
            12.0,
            session="fp32/families",
            cases=(16, 24) if "window" in name else (),
        )
        for name in FAMILIES
    ]
    found += [
        Check(f"fp32/{name}", partial(same_tokens, name), 12.0, session="fp32/variants", quick=False)
        for name in VARIANTS
    ]
    found.append(Check("fp32/qwen3-0.6b-widths", same_tokens_at_real_widths, 60.0))
    for pair in pairs:
        session = f"bf16/{pair.name}"
        for model in MODELS:
            pages = PAGES if model == "dense" or not quick else (16,)
            run = partial(within_bounds, pair.backends, model, pages)
            cost, also_quick = 6.0 * (1 + len(pages)), pair.main or model == "dense"
            name = f"bf16/{pair.name}/{model}"
            found.append(Check(name, run, cost, session=session, quick=also_quick, needs=pair.needs))
        if pair is pairs[0]:
            run = partial(within_bounds_for_few_rows, pair.backends)
            found.append(Check(f"bf16/{pair.name}/few-rows", run, 20.0, session=session, needs=pair.needs))
        run = partial(unharmed_by_nan, pair.backends)
        found.append(Check(f"poison/{pair.name}", run, 12.0, session=session, cases=(65,), needs=pair.needs))
    return found


def attention_pairs(
    device: DeviceFacts, registry: Registry, environment: Environment | None
) -> Iterator[AttentionPair]:
    """Every pairing that the caps allow in bfloat16 and ``environment`` has the libraries for (None: a machine that may
    have any), on a GPU without stand-ins.
    """
    names: dict[Phase, dict[str, tuple[str, ...]]] = {}
    phases: tuple[Phase, Phase] = ("prefill", "decode")
    for phase in phases:
        required = Requirement(device=device, dtype="bfloat16", kv_dtype="bfloat16", head_dim=128, phase=phase)
        names[phase] = {}
        for item in backends_here(registry, "attention", device):
            if (
                match(item.spec, required)[0] is not None
                and not check_requires(item.spec, environment)
                and not (item.spec.stand_in and device.kind == "cuda")
            ):
                names[phase].setdefault(item.spec.name, needs_of(item))
    first = next(iter(names["prefill"]), "")
    for (prefill, needs), (decode, more) in product(names["prefill"].items(), names["decode"].items()):
        partner = decode if decode in names["prefill"] else first
        yield AttentionPair(prefill, decode, prefill == partner, tuple(dict.fromkeys((*needs, *more))))


# float32.


def same_tokens(name: str, here: Here) -> dict[str, Any]:
    """A tiny checkpoint answers as in transformers: twice, the second time from the prefix cache."""
    from .models import tests_checkpoints, tiny_checkpoint

    return _compare(here, tiny_checkpoint(name), tests_checkpoints().reference(name))


def same_tokens_at_real_widths(here: Here) -> dict[str, Any]:
    """The layers of Qwen3-0.6B, random."""
    from .models import real_geometry, tests_checkpoints

    tools, model = tests_checkpoints(), real_geometry(here)
    return _compare(here, model, tools.answer_of(tools.load_model(model)))


def _compare(here: Here, model: Any, reference: Any) -> dict[str, Any]:
    from .serving import answers, greedy, serve

    steps, total = len(reference.continuations[0]), Comparison()
    with serve(here, model) as llm:

        def answer(fed: Mapping[int, int]) -> list[list[int]]:
            prompts = [[*reference.prompts[i], *reference.continuations[i][:count]] for i, count in fed.items()]
            return answers(llm, prompts, [greedy(steps - count) for count in fed.values()])

        for turn in ("first", "cached"):
            found = compare_to_the_end(reference.continuations, answer, partial(_near_tie, reference))
            total += found
            for fault in found.faults:
                raise Failed(
                    f"{turn} answer to the prompt of {len(reference.prompts[fault.answer])} tokens: token "
                    f"{fault.position} is {fault.got}, expected {fault.wanted}\n"
                    f"expected {reference.continuations[fault.answer]}\n"
                    f"margins  {[f'{m:.2g}' for m in reference.margins[fault.answer]]}"
                )
    expect(total.compared > 0, "no token was compared")
    return {**total.figures, "smallest_margin": float(np.min(reference.margins))}


def _near_tie(reference: Any, index: int, position: int, token: int) -> bool:
    logits = reference.logits[index][position]
    return bool(logits.max() - logits[token] <= NEAR_TIE)


# bfloat16.


def within_bounds(pair: dict[str, str], model: str, pages: Sequence[int], here: Here) -> dict[str, Any]:
    """Teacher-forced logits at every page size with graphs, and at one without."""
    from .forced import follow, make_script
    from .models import forced_model

    folder = forced_model(here, model)
    script = make_script(here, model, folder)
    worst = 0.0
    for page_size, graphs in [*((size, True) for size in pages), (16, False)]:
        logits, tokens, _ = follow(here, folder, script, pair, page_size=page_size, graphs=graphs)
        figures = _judged(script, logits, tokens, f"page size {page_size}", graphs)
        worst = max(worst, figures["worst_error"])
        here.note(**{**figures, "worst_error": worst})
    return {}


def _judged(script: Script, logits: torch.Tensor, tokens: torch.Tensor, where: str, graphs: bool) -> dict[str, float]:
    """:func:`gpu_check.forced.judge`, whose complaint says where it was."""
    from .forced import judge

    try:
        return judge(script, logits, tokens)
    except Failed as failed:
        raise Failed(f"{where}, graphs {'on' if graphs else 'off'}: {failed}") from None


def within_bounds_for_few_rows(pair: dict[str, str], here: Here) -> dict[str, Any]:
    """Teacher-forced logits at the widths of Qwen3-0.6B, for several rows and for one alone, as kernels of few rows and
    products that take in their neighbours see them.
    """
    from .forced import follow, make_script
    from .models import forced_model

    folder = forced_model(here, "widths")
    script = make_script(here, "widths", folder)
    alone = replace(
        script, prompts=script.prompts[-1:], continuations=script.continuations[-1:], wanted=script.wanted[-1:]
    )
    worst = 0.0
    for (rows, part), graphs in product((("several rows", script), ("one row", alone)), (True, False)):
        logits, tokens, engine = follow(here, folder, part, pair, graphs=graphs)
        figures = _judged(part, logits, tokens, rows, graphs)
        worst = max(worst, figures["worst_error"])
        fused = {op for choice in engine.plan.choices("linear") for op in engine.plan.fused(choice)}
        here.note(**{**figures, "worst_error": worst, "may_fuse": " ".join(sorted(fused)) or "nothing"})
    return {}


def unharmed_by_nan(pair: dict[str, str], here: Here) -> dict[str, Any]:
    """NaN in every page that a row does not own, and in fresh pages where no backend needs finite tails."""
    from .forced import follow, judge, make_script
    from .models import forced_model

    folder = forced_model(here, "dense")
    script = make_script(here, "dense", folder)
    for page_size in (16, 64):
        for graphs in (True, False):
            clean, _, _ = follow(here, folder, script, pair, page_size=page_size, graphs=graphs)
            logits, tokens, engine = follow(here, folder, script, pair, page_size=page_size, graphs=graphs, poison=True)
            where = f"page size {page_size}, graphs {'on' if graphs else 'off'}"
            expect(not logits.isnan().any(), f"{where}: NaN came out of pages that no row owns or has written")
            here.note(**judge(script, logits, tokens))
            span = float(clean.amax() - clean.amin())
            change = float((logits - clean).abs().max()) / span
            expect(change < 1e-3, f"{where}: the poison changed logits by {change:.3g} of their range")
            here.note(change=change, finite_tail=any(c.finite_tail for c in engine.plan.choices("attention")))
    return {}
