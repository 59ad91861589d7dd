"""An engine driven by hand: whatever the order in which its parts are called, a pass is the same."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from minisgl_core.core import Batch, Req, SamplingParams
from minisgl_core.engine import Engine, EngineConfig
from minisgl_core.plugin_api import Phase

LENGTH, ROWS = 32, 4
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "vocab_size": 97,
    "max_position_embeddings": LENGTH,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder: Path = tmp_path_factory.mktemp("tiny")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    config = EngineConfig(
        str(folder), device="cpu", max_running_req=ROWS, num_page_override=ROWS * LENGTH, page_size=1,
        cuda_graph_max_bs=0, dummy_weights=True, progress=False,
    )  # fmt: skip
    built = Engine(config)
    built.page_table[:ROWS] = torch.arange(ROWS * LENGTH, dtype=torch.int32).view(ROWS, LENGTH)
    yield built
    built.shutdown()


def make_req(row: int, seed: int = 0, temperature: float = 0.0) -> Req:
    tokens = torch.arange(3, 9, dtype=torch.int32) + 10 * seed
    return Req(tokens, row, 0, LENGTH - len(tokens), seed, SamplingParams(temperature=temperature, seed=seed))


def forward(engine: Engine, batch: Batch) -> torch.Tensor:
    """(B, V): the logits; each Req gets its token."""
    out = engine.forward_batch(batch, engine.sampler.prepare(batch))
    for req, token in zip(batch.reqs, out.next_tokens_cpu.tolist(), strict=True):
        req.append_token(token)
    return out.logits.clone()


def test_tokens_are_on_the_host_when_they_are_read(engine: Engine) -> None:
    waits: list[None] = []
    event = SimpleNamespace(synchronize=lambda: waits.append(None))
    batch = Batch([make_req(0)], "prefill")
    out = engine.forward_batch(batch, engine.sampler.prepare(batch))._replace(copied=event)
    assert not waits
    assert torch.equal(out.next_tokens_cpu, out.next_tokens_gpu)
    assert len(waits) == 1


def test_sampling_parameters_may_be_prepared_after_the_metadata(engine: Engine) -> None:
    tokens: dict[bool, list[int]] = {False: [], True: []}
    for metadata_first, found in tokens.items():
        for seed in range(ROWS):
            req = make_req(seed, seed, temperature=50.0)
            batch = Batch([req], "prefill")
            if metadata_first:
                engine.attn_backend.prepare_metadata(batch)
            forward(engine, batch)
            found.append(int(req.tokens[-1]))
        forward(engine, Batch([make_req(row) for row in range(ROWS)], "prefill"))
    assert tokens[True] == tokens[False]


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_two_batches_may_be_prepared_before_the_first_one_runs(engine: Engine, phase: Phase) -> None:
    def run(together: bool) -> list[torch.Tensor]:
        reqs = [make_req(row, seed) for row, seed in ((2, 0), (1, 7))]
        if phase == "decode":
            for req in reqs:
                forward(engine, Batch([req], "prefill"))
        batches = [Batch([req], phase) for req in reqs]
        if together:
            for batch in batches:
                engine.attn_backend.prepare_metadata(batch)
        return [forward(engine, batch) for batch in (*batches, *(Batch([req], "decode") for req in reqs))]

    for found, expected in zip(run(together=True), run(together=False), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


def test_a_req_may_be_taken_back_some_tokens(engine: Engine) -> None:
    req = make_req(0)
    forward(engine, Batch([req], "prefill"))
    decoded = [forward(engine, Batch([req], "decode")) for _ in range(5)]
    req.cached_len, req.device_len = req.cached_len - 3, req.device_len - 3
    for expected in decoded[2:]:
        batch = Batch([req], "decode")
        out = engine.forward_batch(batch, engine.sampler.prepare(batch))
        torch.testing.assert_close(out.logits, expected, rtol=0, atol=1e-6)
