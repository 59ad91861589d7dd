"""Teacher forcing: an engine is fed fixed tokens, and the logits of each step are compared with a float64 reference.

Shapes: B prompts, S steps, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, Final

import numpy as np
import torch

from minisgl_core.core import Batch, Req, SamplingParams
from minisgl_core.engine import Engine, EngineConfig

from .check import Context, Failed, expect
from .serving import settings_for

__all__ = ["MARGIN", "Script", "follow", "judge", "make_script", "owned_slots"]

MARGIN: Final = 3e-2
"""Largest error of a logit, as a share of its row's range."""


@dataclass(frozen=True)
class Script:
    """The fed tokens, and a float64 model's logits ``wanted`` (B, S, V): row s precedes a continuation's token s."""

    prompts: list[list[int]]
    continuations: list[list[int]]
    wanted: torch.Tensor
    chunk: int
    """Tokens of a longer prompt that come in a pass of their own, before the rest"""

    @property
    def longest(self) -> int:
        """Tokens of the longest row at the end."""
        return max(map(len, self.prompts)) + len(self.continuations[0])


def make_script(context: Context, name: str, model: Path) -> Script:
    """Random prompts and continuations, and the reference's logits on them; made once per run."""
    lengths, steps, chunk = ((5, 17, 30), 4, 12) if context.tiny else ((5, 131, 300, 64, 257), 12, 100)
    draw = Random(7)
    rows = [[draw.randrange(512) for _ in range(length + steps)] for length in lengths]

    def make(folder: Path) -> None:
        torch.save(_reference(model, rows, lengths, steps), folder / "logits.pt")

    wanted = torch.load(context.once(f"script-{name}", make) / "logits.pt", weights_only=True)
    prompts = [row[:length] for row, length in zip(rows, lengths, strict=True)]
    continuations = [row[length:] for row, length in zip(rows, lengths, strict=True)]
    return Script(prompts, continuations, wanted, chunk)


@torch.inference_mode()
def _reference(model: Path, rows: list[list[int]], lengths: tuple[int, ...], steps: int) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    # "eager" experts: the grouped products of newer versions know no float64
    chosen: dict[str, Any] = {"attn_implementation": "eager", "experts_implementation": "eager"}
    reference: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64, **chosen)
    found = []
    for row, length in zip(rows, lengths, strict=True):
        logits = reference(torch.tensor([row[:-1]]), use_cache=False).logits[0]
        found.append(logits[length - 1 : length - 1 + steps].double())
    return torch.stack(found)


def owned_slots(row: int, script: Script, page_size: int) -> np.ndarray:
    """The slots of a row: every other page, so that each is next to a page that no row owns."""
    pages = -(-script.longest // page_size)
    first = np.arange(pages) * 2 + 2 * pages * row
    slots: np.ndarray = (first[:, None] * page_size + np.arange(page_size)).reshape(-1)[: pages * page_size]
    return slots.astype(np.int32)


def follow(
    context: Context,
    model: Path,
    script: Script,
    attention: dict[str, str],
    *,
    page_size: int = 16,
    graphs: bool = True,
    poison: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, Engine]:
    """(logits (B, S, V), sampled tokens (B, S), the engine, shut down) of a bfloat16 engine that is fed the script.

    ``poison``: every page that no row owns holds NaN, and so do the rows' own pages before they are written, unless a
    backend declares ``finite_tail``.
    """
    pages = 2 * len(script.prompts) * -(-script.longest // page_size)
    config = settings_for(
        context,
        page_size=page_size,
        num_page_override=pages,
        max_running_req=8,
        max_seq_len_override=-(-script.longest // page_size) * page_size,
        cuda_graph_max_bs=8 if graphs else 0,
        backends={"attention": attention},
    )
    engine = Engine(EngineConfig(str(model), dtype=torch.bfloat16, **config))
    try:
        if poison:
            _poison(engine, script)
        logits, tokens = _feed(engine, script)
    finally:
        engine.shutdown()
    return logits, tokens, engine


def _poison(engine: Engine, script: Script) -> None:
    finite = any(choice.finite_tail for choice in engine.plan.choices("attention"))
    size = engine.page_size
    owned = np.concatenate([owned_slots(row, script, size) for row in range(len(script.prompts))])
    pages = torch.from_numpy(np.unique(owned // size)).to(engine.device)
    for pair in engine.kv_cache.caches():
        for cache in pair:
            cache.fill_(torch.nan)
            if finite:
                cache[pages] = 0.0


def _feed(engine: Engine, script: Script) -> tuple[torch.Tensor, torch.Tensor]:
    steps = len(script.continuations[0])
    reqs = []
    for row, prompt in enumerate(script.prompts):
        engine.state.set_slots(row, 0, owned_slots(row, script, engine.page_size)[: engine.max_seq_len])
        params = SamplingParams(max_tokens=steps, ignore_eos=True)
        reqs.append(Req(torch.tensor(prompt, dtype=torch.int32), row, 0, steps, row, params))
    for req in reqs:
        req.device_len = min(script.chunk, req.device_len)
    _pass(engine, [req for req in reqs if req.device_len < req.num_tokens], "prefill", None)
    for req in reqs:
        req.device_len = req.num_tokens
    logits, tokens = [], []
    for step in range(steps):
        fed = [row[step - 1] for row in script.continuations] if step else None
        out = _pass(engine, list(reqs), "decode" if step else "prefill", fed)
        logits.append(out.logits.double().cpu())
        tokens.append(out.next_tokens_cpu.clone())
        for req, tokens_of_row in zip(reqs, script.continuations, strict=True):
            req.append_token(tokens_of_row[step])
    return torch.stack(logits, dim=1), torch.stack(tokens, dim=1)


def _pass(engine: Engine, reqs: list[Req], phase: Any, fed: list[int] | None) -> Any:
    batch = Batch(reqs=reqs, phase=phase)
    engine.graph_runner.pad_batch(batch)
    if fed is not None:
        batch.input_ids = torch.tensor(fed, dtype=torch.int32)
    mode = engine.sampler.prepare(batch)
    batch.mode = mode
    if phase == "decode" and engine.plan.graph:
        expect(engine.graph_runner.can_replay(batch), f"no graph for a decode batch of {len(reqs)}")
    out = engine.forward_batch(batch, mode)
    out.wait()
    return out


def judge(script: Script, logits: torch.Tensor, tokens: torch.Tensor) -> dict[str, float]:
    """Figures. Fails for logits off by more than :data:`MARGIN` of their row's range, and for another token where the
    reference's two best are further apart than that.
    """
    wanted = script.wanted
    span = wanted.amax(-1) - wanted.amin(-1)
    errors = (logits - wanted).abs().amax(-1) / span
    errors = torch.where(errors.isnan(), torch.inf, errors)
    worst = int(errors.argmax())
    row, step = divmod(worst, errors.shape[1])
    if not float(errors.max()) < MARGIN:
        text = (
            f"row {row} (prompt of {len(script.prompts[row])}), step {step}: logits are off by {errors[row, step]:.3g} "
            f"of their range, {MARGIN} is allowed; worst of each row: {[f'{e:.3g}' for e in errors.amax(-1).tolist()]}"
        )
        raise Failed(text, pytrace=False)
    best = wanted.topk(2, dim=-1)
    clear = (best.values[..., 0] - best.values[..., 1]) > MARGIN * span
    other = (clear & (tokens.long() != best.indices[..., 0])).nonzero().tolist()
    expect(not other, f"other tokens than the reference's, with a clear margin, at (row, step) {other[:8]}")
    return {
        "worst_error": float(errors.max()),
        "mean_error": float(errors.mean()),
        "clear": float(clear.double().mean()),
    }
