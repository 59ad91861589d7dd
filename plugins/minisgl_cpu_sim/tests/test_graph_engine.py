"""The emulated graph under the real engine: equal to eager steps, clean under the strict checks, and shut down fast."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from minisgl_core.core import Batch, Req, SamplingParams
from minisgl_core.engine import Engine, EngineConfig
from minisgl_cpu_sim.graph import GraphViolation
from support.child_env import child_env
from support.model_configs import write_tiny_config

VOCAB, PROMPTS, STEPS = 64, (5, 9, 12), 6
PARAMS = (
    SamplingParams(max_tokens=STEPS),
    SamplingParams(max_tokens=STEPS, temperature=0.9, seed=3),
    SamplingParams(max_tokens=STEPS, temperature=0.8, top_k=5, seed=4),
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3 without weights: the engine draws them."""
    folder = tmp_path_factory.mktemp("tiny")
    return write_tiny_config(folder)


def make_engine(model: Path, largest: int, *, strict: bool = False, page_size: int = 4) -> Engine:
    torch.set_num_threads(1)
    return Engine(
        EngineConfig(
            str(model),
            dtype=torch.float32,
            max_running_req=4,
            num_page_override=4 * 64 // page_size,
            max_seq_len_override=64,
            page_size=page_size,
            cuda_graph_max_bs=largest,
            dummy_weights=True,
            seed=1,
            progress=False,
            backends={"attention": "torch", "kv": "torch"},
            backend_options={"graph:emulated": {"strict": strict}} if largest else {},
        )
    )


def generate(
    engine: Engine, rows: tuple[int, ...] = (0, 1, 2), before_step: Callable[[int, list[Req]], None] | None = None
) -> tuple[list[list[int]], torch.Tensor]:
    """Drive three prompts by hand; (their tokens, the last step's logits)."""
    reqs = []
    for uid, (row, length, params) in enumerate(zip(rows, PROMPTS, PARAMS, strict=True)):
        engine.state.set_slots(row, 0, np.arange(row * 64, row * 64 + 64, dtype=np.int32))
        ids = (torch.arange(length, dtype=torch.int32) * 7 + uid) % VOCAB
        reqs.append(Req(ids, row, cached_len=0, output_len=STEPS, uid=uid, sampling_params=params))
    logits = torch.empty(0)
    for step in range(STEPS):
        if before_step is not None:
            before_step(step, reqs)
        batch = Batch(reqs=list(reqs), phase="decode" if step else "prefill")
        engine.graph_runner.pad_batch(batch)
        out = engine.forward_batch(batch, engine.sampler.prepare(batch))
        out.wait()
        logits = out.logits.clone()
        for req, token in zip(reqs, out.next_tokens_cpu.tolist(), strict=True):
            req.append_token(token)
    return [req.tokens.tolist() for req in reqs], logits


def run(model: Path, largest: int, **more: Any) -> tuple[list[list[int]], torch.Tensor]:
    engine = make_engine(model, largest, **more)
    try:
        return generate(engine)
    finally:
        engine.shutdown()


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("strict", [False, True])
def test_engine_replays_equal_eager_steps(model: Path, page_size: int, strict: bool) -> None:
    tokens, logits = run(model, 0, page_size=page_size)
    replayed, replayed_logits = run(model, 4, page_size=page_size, strict=strict)
    assert replayed == tokens
    torch.testing.assert_close(replayed_logits, logits, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("strict", [False, True])
def test_case_65_batches_shrink_and_grow(model: Path, strict: bool) -> None:
    """Reqs leave and come back, so that sizes 3, 2, 1, 3 run in graphs of 4, 2, 1, 4 rows."""
    outputs = []
    for largest in (0, 4):
        engine = make_engine(model, largest, strict=strict and largest > 0)
        gone: list[Req] = []
        sizes = {2: 2, 3: 1, 4: 3}

        def regroup(step: int, reqs: list[Req], gone: list[Req] = gone, sizes: dict[int, int] = sizes) -> None:
            while len(reqs) > sizes.get(step, len(reqs)):
                gone.append(reqs.pop())
            while len(reqs) < sizes.get(step, len(reqs)):
                reqs.append(gone.pop())

        outputs.append(generate(engine, before_step=regroup))
        engine.shutdown()
    assert outputs[0][0] == outputs[1][0]
    torch.testing.assert_close(outputs[1][1], outputs[0][1], rtol=1e-5, atol=1e-6)


def test_case_67_garbage_token_ids_in_unused_rows(model: Path) -> None:
    engine = make_engine(model, 4)
    engine.state.last_token.fill_(2**31 - 1)
    tokens, logits = generate(engine)
    engine.shutdown()
    want, want_logits = run(model, 0)
    assert tokens == want
    torch.testing.assert_close(logits, want_logits, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("buffer", ["rows", "last_token", "lengths", "params", "page_table"])
def test_strict_names_each_stale_buffer_of_the_engine(model: Path, buffer: str) -> None:
    engine = make_engine(model, 4, strict=True)

    def corrupt(step: int, reqs: list[Req]) -> None:
        if step == 3:
            held = getattr(engine.state, buffer)
            held[reqs[0].table_idx] += 1

    with pytest.raises(GraphViolation) as caught:
        generate(engine, before_step=corrupt)
    engine.shutdown()
    assert caught.value.kind == "stale_buffer"
    assert caught.value.name.startswith(f"DecodeState.{buffer}")


_EXIT = """
import torch
from pathlib import Path
import test_graph_engine as t
engine = t.make_engine(Path({model!r}), largest=0)
t.generate(engine)
engine.shutdown()
print("done", flush=True)
"""


def test_case_69_without_graphs_the_process_ends_soon_after_shutdown(model: Path) -> None:
    script = _EXIT.format(model=str(model))
    process = subprocess.Popen(
        [sys.executable, "-c", script], env=child_env(Path(__file__).parent), stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "done\n"
    assert process.wait(timeout=10) == 0
    process.stdout.close()


def test_the_stale_buffer_example_holds() -> None:
    script = Path(__file__).parents[3] / "examples" / "stale_buffer.py"
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "strict: stale_buffer: DecodeState.rows: rows [0, 1] hold [0, 1]" in done.stdout
