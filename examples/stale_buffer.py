"""What a forgotten buffer copy does to a captured decode step, and how the strict sanitiser names it.

    python examples/stale_buffer.py                # makes a tiny random model
    python examples/stale_buffer.py --model DIR    # any model

A graph reads its inputs from fixed buffers. If the host forgets to copy one of them before a replay, nothing fails:
the tokens are just wrong. This runs one engine eagerly, as it should be; one with the emulated graph and without the
copy of one buffer; and that one again under ``strict``. Exits with 1 unless the tokens go wrong and the buffer is
named.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from minisgl_core.core import Batch, Req, SamplingParams
from minisgl_core.engine import Engine, EngineConfig
from minisgl_cpu_sim.graph import GraphViolation

PROMPT_LENS, STEPS, MAX_LEN = (6, 9, 4), 10, 32
FIRST_SLOTS = 12
"""Positions that have slots from the start; the others get theirs at step ``GROWTH``."""
GROWTH, LEAVES = 2, 4
"""The steps before which slots are added, and before which the first Req leaves the batch."""


def make_model(folder: Path) -> Path:
    """A random Qwen3 of two small layers, with a head that makes its answers vary."""
    hidden, inner, head_dim, q_heads, kv_heads, vocab = 64, 96, 16, 4, 2, 512
    generator = torch.Generator().manual_seed(0)

    def matrix(rows: int, columns: int, gain: float = 1.0) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator).mul_(gain / columns**0.5)

    weights = {
        "model.embed_tokens.weight": matrix(vocab, hidden, gain=8.0),
        "model.norm.weight": torch.ones(hidden),
        "lm_head.weight": matrix(vocab, hidden, gain=8.0),
    }
    for i in range(2):
        layer = {
            "input_layernorm": torch.ones(hidden),
            "post_attention_layernorm": torch.ones(hidden),
            "self_attn.q_proj": matrix(q_heads * head_dim, hidden),
            "self_attn.k_proj": matrix(kv_heads * head_dim, hidden),
            "self_attn.v_proj": matrix(kv_heads * head_dim, hidden),
            "self_attn.o_proj": matrix(hidden, q_heads * head_dim, gain=4.0),
            "self_attn.q_norm": torch.ones(head_dim),
            "self_attn.k_norm": torch.ones(head_dim),
            "mlp.gate_proj": matrix(inner, hidden),
            "mlp.up_proj": matrix(inner, hidden),
            "mlp.down_proj": matrix(hidden, inner),
        }
        weights |= {f"model.layers.{i}.{name}.weight": tensor for name, tensor in layer.items()}
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": 2,
        "num_attention_heads": q_heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": vocab,
        "max_position_embeddings": 256,
        "rope_theta": 1e4,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "hidden_act": "silu",
    }
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def make_engine(model: str, *, graphs: bool, strict: bool = False) -> Engine:
    """An engine of four rows, eager or with the emulated graph."""
    return Engine(
        EngineConfig(
            model,
            dtype=torch.float32,
            max_running_req=4,
            num_page_override=4 * MAX_LEN,
            max_seq_len_override=MAX_LEN,
            page_size=1,
            cuda_graph_max_bs=4 if graphs else 0,
            progress=False,
            backends={"graph": "emulated"} if graphs else {},
            backend_options={"graph:emulated": {"strict": strict}} if graphs else {},
        )
    )


def drop_copy(engine: Engine, name: str) -> None:
    """From now on the engine behaves as if it forgot to copy ``DecodeState.<name>`` before a decode step."""
    state, buffer = engine.state, getattr(engine.state, name)
    upload = state.upload_decode

    def upload_all_but_one(batch: Batch) -> None:
        before = buffer.clone()
        upload(batch)
        buffer.copy_(before)

    state.upload_decode = upload_all_but_one  # type: ignore[method-assign]


def generate(engine: Engine, forgotten: str | None = None) -> list[list[int]]:
    """Three prompts driven by hand, greedily; one leaves early and all grow. Returns the generated tokens."""
    reqs = []
    for row, length in enumerate(PROMPT_LENS):
        slots = np.arange(row * MAX_LEN, (row + 1) * MAX_LEN, dtype=np.int32)
        engine.state.set_slots(row, 0, slots[:FIRST_SLOTS])
        prompt = ((torch.arange(length) * 37 + row * 11) % engine.vocab_size).to(torch.int32)
        reqs.append(Req(prompt, row, 0, STEPS, row, SamplingParams(max_tokens=STEPS)))
    running = list(reqs)
    for step in range(STEPS):
        if step == GROWTH:
            if forgotten is not None:
                drop_copy(engine, forgotten)
            for row in range(len(reqs)):
                slots = np.arange(row * MAX_LEN, (row + 1) * MAX_LEN, dtype=np.int32)
                engine.state.set_slots(row, FIRST_SLOTS, slots[FIRST_SLOTS:])
        if step == LEAVES:
            del running[0]
        batch = Batch(reqs=list(running), phase="decode" if step else "prefill")
        engine.graph_runner.pad_batch(batch)
        out = engine.forward_batch(batch, engine.sampler.prepare(batch))
        out.wait()
        for req, token in zip(running, out.next_tokens_cpu.tolist(), strict=True):
            req.append_token(token)
    return [req.tokens[req.prompt_len :].tolist() for req in reqs]


def show(model: str, buffer: str, right: list[list[int]]) -> bool:
    """Forget one buffer's copy: are the tokens wrong, and does the strict replay name the buffer?"""
    print(f"\nwithout the copy of DecodeState.{buffer}:")
    engine = make_engine(model, graphs=True)
    wrong = generate(engine, forgotten=buffer)
    engine.shutdown()
    differs = wrong != right
    print(f"  tokens {wrong}\n  wrong: {differs}")
    engine = make_engine(model, graphs=True, strict=True)
    try:
        generate(engine, forgotten=buffer)
        named = False
        print("  strict: found nothing")
    except GraphViolation as violation:
        named = violation.kind == "stale_buffer" and violation.name.startswith(f"DecodeState.{buffer}")
        print(f"  strict: {violation}\n  named: {named}")
    engine.shutdown()
    return differs and named


def main() -> int:
    """Run the comparison; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a model folder; a tiny random one is made without it")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = options.model or str(make_model(Path(folder)))
        engine = make_engine(model, graphs=False)
        right = generate(engine)
        engine.shutdown()
        print(f"eager:\n  tokens {right}")
        engine = make_engine(model, graphs=True, strict=True)
        replayed = generate(engine)
        engine.shutdown()
        print(f"emulated graph, nothing forgotten, strict:\n  equal: {replayed == right}")
        shown = [show(model, buffer, right) for buffer in ("rows", "page_table")]
    return 0 if replayed == right and all(shown) else 1


if __name__ == "__main__":
    sys.exit(main())
