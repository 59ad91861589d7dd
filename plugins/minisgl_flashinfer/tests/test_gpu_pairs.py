"""fa and flashinfer in whole bfloat16 engines on the device, every pairing, teacher-forced against attention:torch.

Both engines are fed the reference's tokens, so that one close call does not spoil all that follows.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from minisgl_core.builtin.devices import detect_device
from minisgl_core.core import Batch, Req, SamplingParams
from minisgl_core.engine import Engine, EngineConfig
from support.model_configs import write_tiny_config

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]  # the libraries warn when they are imported
VOCAB, PROMPTS, CHUNK, STEPS, LONGEST = 2048, (5, 131, 300, 64, 257), 100, 12, 512
PAIRS = [(prefill, decode) for prefill in ("fa", "flashinfer") for decode in ("fa", "flashinfer")]
MARGIN = 3e-2
"""Allowed error of a logit, as a share of its row's range."""


@pytest.fixture(autouse=True, scope="module")
def _libraries() -> None:
    if detect_device("auto").sm != 90 or not all(map(find_spec, ("flashinfer", "flash_attn_interface"))):
        pytest.skip("needs a Hopper GPU, flashinfer and flash_attn_interface")


@pytest.fixture(autouse=True)
def _no_compilation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHINFER_DISABLE_JIT", "1")


@pytest.fixture(scope="module", params=[(16, 8), (10, 2)], ids=["ratio2", "ratio5"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four layers of real geometry (head_dim 128); the engine draws the weights."""
    folder = tmp_path_factory.mktemp("model")
    return write_tiny_config(
        folder,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=4,
        num_attention_heads=request.param[0],
        num_key_value_heads=request.param[1],
        head_dim=128,
        vocab_size=VOCAB,
        max_position_embeddings=LONGEST,
        rope_theta=1e6,
        torch_dtype="bfloat16",
    )


def _run(
    model: Path, attention: Any, page_size: int, largest: int, forced: list[list[int]] | None
) -> tuple[list[list[int]], list[torch.Tensor]]:
    """(tokens per Req, logits per step); ``forced``: the tokens to go on with instead of the sampled ones."""
    engine = Engine(
        EngineConfig(
            str(model),
            dtype=torch.bfloat16,
            device="cuda",
            max_running_req=8,
            num_page_override=8 * LONGEST // page_size,
            max_seq_len_override=LONGEST,
            page_size=page_size,
            cuda_graph_max_bs=largest,
            dummy_weights=True,
            seed=1,
            progress=False,
            backends={"attention": attention, "kv": "torch"},
        )
    )
    for target in engine.model.weight_targets("", frozenset()):
        if "norm" in target.name:
            target.storage.fill_(1.0)  # as trained ones are: drawn like the rest, they would make attention uniform
    try:
        return _generate(engine, forced)
    finally:
        engine.shutdown()


def _generate(engine: Engine, forced: list[list[int]] | None) -> tuple[list[list[int]], list[torch.Tensor]]:
    reqs = []
    for uid, length in enumerate(PROMPTS):
        engine.state.set_slots(uid, 0, np.arange(uid * LONGEST, uid * LONGEST + LONGEST, dtype=np.int32))
        ids = (torch.arange(length, dtype=torch.int32) * 37 + 11 * uid) % VOCAB
        reqs.append(Req(ids, uid, 0, STEPS, uid, SamplingParams(max_tokens=STEPS)))
    for req in reqs:
        req.device_len = min(CHUNK, req.device_len)
    _forward(engine, [req for req in reqs if req.device_len < req.num_tokens], "prefill", None)
    for req in reqs:
        req.device_len = req.num_tokens
    tokens: list[list[int]] = [[] for _ in reqs]
    logits = []
    for step in range(STEPS):
        feed = forced if step and forced is not None else None
        inputs = None if feed is None else torch.tensor([row[step - 1] for row in feed], dtype=torch.int32)
        out = _forward(engine, list(reqs), "decode" if step else "prefill", inputs)
        logits.append(out.logits.float().cpu())
        for row, (req, token) in enumerate(zip(reqs, out.next_tokens_cpu.tolist(), strict=True)):
            tokens[row].append(token)
            req.append_token(token if forced is None else forced[row][step])
    return tokens, logits


def _forward(engine: Engine, reqs: list[Req], phase: Any, inputs: torch.Tensor | None) -> Any:
    batch = Batch(reqs=reqs, phase=phase)
    engine.graph_runner.pad_batch(batch)
    if inputs is not None:
        batch.input_ids = inputs
    out = engine.forward_batch(batch, engine.sampler.prepare(batch))
    out.wait()
    return out


@cache
def _reference(model: Path) -> tuple[list[list[int]], list[torch.Tensor]]:
    return _run(model, "torch", 16, 0, None)


@pytest.mark.parametrize(("page_size", "largest"), [(1, 8), (16, 8), (256, 8), (16, 0)])
@pytest.mark.parametrize("pair", PAIRS, ids="+".join)
def test_every_pairing_follows_the_reference(model: Path, pair: tuple[str, str], page_size: int, largest: int) -> None:
    wanted, want_logits = _reference(model)
    attention = {"prefill": pair[0], "decode": pair[1]}
    tokens, logits = _run(model, attention, page_size, largest, wanted)
    worst = 0.0
    for step, (got, want) in enumerate(zip(logits, want_logits, strict=True)):
        span = want.amax(-1) - want.amin(-1)
        error = (got - want).abs().amax(-1) / span
        worst = max(worst, float(error.max()))
        assert worst < MARGIN, f"step {step}: errors per row {error.tolist()} of the logits' range"
        first, second = want.topk(2, dim=-1).values.unbind(-1)
        for row, clear in enumerate(((first - second) / span > 2 * MARGIN).tolist()):
            assert not clear or tokens[row][step] == wanted[row][step], f"step {step}, row {row}"
    print(f"{'+'.join(pair)}, page {page_size}, graphs up to {largest}: worst error {worst:.2e} of the range")
