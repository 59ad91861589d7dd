"""Whole engines on the GPU plugins' own attention code over fake libraries: equal to attention:torch, graphs or not."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from minisgl_core.core import Batch, Req, SamplingParams
from minisgl_core.engine import Engine, EngineConfig
from minisgl_core.engine.plan_resolution import make_plan
from minisgl_core.modelconfig import read_model_config
from minisgl_cpu_sim.fakes import inject, with_attention
from minisgl_fa.plugin import minisgl_attention_backends as fa_backends
from minisgl_flashinfer.plugin import minisgl_attention_backends as flashinfer_backends
from support.model_configs import write_tiny_config

VOCAB, PROMPTS, CHUNK, STEPS, LONGEST = 64, (5, 17, 30), 12, 6, 64
SPECS = {"fa": fa_backends()[0], "flashinfer": flashinfer_backends()[0], "torch": None}
PAIRS = [(prefill, decode) for prefill in SPECS for decode in SPECS if (prefill, decode) != ("torch", "torch")]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Mistral without weights, whose window hides something of the longer rows."""
    folder = tmp_path_factory.mktemp("tiny")
    return write_tiny_config(
        folder,
        architectures=["MistralForCausalLM"],
        model_type="mistral",
        num_attention_heads=6,
        max_position_embeddings=LONGEST,
        sliding_window=20,
    )


def _engine(model: Path, prefill: str, decode: str, page_size: int, largest: int, strict: bool) -> Engine:
    settings: dict[str, Any] = {
        "dtype": torch.float32,
        "device": "cpu",
        "max_running_req": 4,
        "num_page_override": 4 * LONGEST // page_size,
        "max_seq_len_override": LONGEST,
        "page_size": page_size,
        "cuda_graph_max_bs": largest,
        "dummy_weights": True,
        "seed": 1,
        "progress": False,
        "backends": {"attention": "torch", "kv": "torch"},
        "backend_options": {"graph:emulated": {"strict": True}} if strict else {},
    }
    config = EngineConfig(str(model), **settings)
    chosen = {phase: SPECS[name] for phase, name in (("prefill", prefill), ("decode", decode)) if SPECS[name]}
    plan = with_attention(make_plan(config, read_model_config(str(model))).to_json(), chosen)  # type: ignore[arg-type]
    return Engine(EngineConfig(str(model), plan=plan, **settings))


def _generate(engine: Engine) -> tuple[list[list[int]], torch.Tensor]:
    """Three prompts, the first chunk of each and then the rest of it over that prefix, then decode in changing company;
    (their tokens, the last step's logits)."""
    reqs = []
    for uid, length in enumerate(PROMPTS):
        engine.state.set_slots(uid, 0, np.arange(uid * LONGEST, uid * LONGEST + LONGEST, dtype=np.int32))
        ids = (torch.arange(length, dtype=torch.int32) * 7 + uid) % VOCAB
        reqs.append(Req(ids, uid, 0, STEPS, uid, SamplingParams(max_tokens=STEPS)))
    for req in reqs:
        req.device_len = min(CHUNK, req.device_len)
    chunked = [req for req in reqs if req.device_len < req.num_tokens]
    engine.forward_batch(_batch(engine, chunked, "prefill"), "greedy")
    assert [req.cached_len for req in reqs] == [0, CHUNK, CHUNK]
    for req in reqs:
        req.device_len = req.num_tokens
    for step in range(STEPS):
        present = reqs if step in (0, 1, 4) else reqs[:2]
        batch = _batch(engine, list(present), "decode" if step else "prefill")
        batch.mode = engine.sampler.prepare(batch)
        assert engine.graph_runner.can_replay(batch) == (step > 0 and engine.plan.graph)
        out = engine.forward_batch(batch, batch.mode)
        out.wait()
        for req, token in zip(present, out.next_tokens_cpu.tolist(), strict=True):
            req.append_token(token)
    return [req.tokens.tolist() for req in reqs], out.logits.clone()


def _batch(engine: Engine, reqs: list[Req], phase: Any) -> Batch:
    batch = Batch(reqs=reqs, phase=phase)
    engine.graph_runner.pad_batch(batch)
    return batch


def _run(*args: Any) -> tuple[list[list[int]], torch.Tensor]:
    torch.set_num_threads(1)
    engine = _engine(*args)
    try:
        return _generate(engine)
    finally:
        engine.shutdown()


@cache
def _expected(model: Path) -> tuple[list[list[int]], torch.Tensor]:
    return _run(model, "torch", "torch", 16, 0, False)


def _check(model: Path, monkeypatch: pytest.MonkeyPatch, pair: tuple[str, str], *rest: Any) -> None:
    inject(monkeypatch)
    tokens, logits = _run(model, *pair, *rest)
    want, want_logits = _expected(model)
    assert tokens == want
    torch.testing.assert_close(logits, want_logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("largest", [0, 4], ids=["eager", "graphs"])
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("pair", PAIRS, ids="+".join)
def test_every_pairing_equals_torch(
    model: Path, monkeypatch: pytest.MonkeyPatch, pair: tuple[str, str], page_size: int, largest: int
) -> None:
    _check(model, monkeypatch, pair, page_size, largest, False)


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("pair", [("fa", "fa"), ("flashinfer", "flashinfer")], ids="+".join)
def test_replays_are_clean_under_the_strict_checks(
    model: Path, monkeypatch: pytest.MonkeyPatch, pair: tuple[str, str], page_size: int
) -> None:
    _check(model, monkeypatch, pair, page_size, 4, True)
