"""The engine driven by hand over one and two tensor-parallel ranks, then through LLM with and without graphs.

    python examples/stage4_milestone.py                # makes a random model of Qwen3-0.6B geometry (2 layers)
    python examples/stage4_milestone.py --model DIR    # any model that divides over two ranks

Prints what each rank holds and computes, and exits with 1 if any comparison is False.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import socket
import sys
import tempfile
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from minisgl_core.core import Batch, Req, SamplingParams
from minisgl_core.distributed import DistributedInfo
from minisgl_core.engine import Engine, EngineConfig
from minisgl_core.llm import LLM
from minisgl_core.modelconfig import read_model_config

PROMPT_LEN, DECODE_STEPS, GRAPH_TOKENS = 16, 3, 6


def make_model(folder: Path, layers: int = 2, vocab: int = 2048) -> Path:
    """A random checkpoint with the layer shapes of Qwen3-0.6B."""
    hidden, inner, head_dim, q_heads, kv_heads = 1024, 3072, 128, 16, 8
    generator = torch.Generator().manual_seed(0)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) / columns**0.5

    def norm(size: int) -> torch.Tensor:
        return 0.5 + torch.rand(size, generator=generator)

    weights = {"model.embed_tokens.weight": matrix(vocab, hidden), "model.norm.weight": norm(hidden)}
    for i in range(layers):
        layer = {
            "input_layernorm": norm(hidden),
            "post_attention_layernorm": norm(hidden),
            "self_attn.q_proj": matrix(q_heads * head_dim, hidden),
            "self_attn.k_proj": matrix(kv_heads * head_dim, hidden),
            "self_attn.v_proj": matrix(kv_heads * head_dim, hidden),
            "self_attn.o_proj": matrix(hidden, q_heads * head_dim),
            "self_attn.q_norm": norm(head_dim),
            "self_attn.k_norm": norm(head_dim),
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
        "num_hidden_layers": layers,
        "num_attention_heads": q_heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": vocab,
        "max_position_embeddings": 2048,
        "rope_theta": 1e6,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
        "hidden_act": "silu",
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def free_port() -> int:
    """A free port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def drive(model: str, rank: int, size: int, port: int) -> dict[str, Any]:
    """One rank by hand: a prefill pass and the decode steps after it."""
    torch.set_num_threads(max(1, torch.get_num_threads() // size))
    config = EngineConfig(
        model_path=model,
        tp_info=DistributedInfo(rank, size),
        dtype=torch.float32,
        max_running_req=2,
        num_page_override=256,
        max_seq_len_override=128,
        distributed_port=port,
        progress=False,
    )
    engine = Engine(config)
    engine.page_table[0, :128] = torch.arange(128)
    steps = 1 + DECODE_STEPS
    prompt = (torch.arange(PROMPT_LEN) * 7919 % engine.vocab_size).to(torch.int32)
    params = SamplingParams(max_tokens=steps)
    req = Req(prompt, table_idx=0, cached_len=0, output_len=steps, uid=0, sampling_params=params, cache_handle=None)
    for step in range(steps):
        batch = Batch(reqs=[req], phase="prefill" if step == 0 else "decode")
        engine.graph_runner.pad_batch(batch)
        start, end = req.cached_len, req.device_len
        batch.positions = torch.arange(start, end, dtype=torch.int32)
        batch.input_ids = req.input_ids[start:end]
        batch.out_loc = engine.page_table[0, start:end]
        engine.attn_backend.prepare_metadata(batch)
        out = engine.forward_batch(batch, engine.sampler.prepare(batch))
        out.wait()
        req.append_host(out.next_tokens_cpu[:1])
    qkv = engine.model.model.layers.op_list[0].self_attn.qkv_proj.weight
    found = {
        "qkv_proj": tuple(qkv.shape),
        "kv_pool": tuple(engine.kv_cache.k_cache(0).shape),
        "tokens": req.input_ids[PROMPT_LEN:].tolist(),
    }
    engine.shutdown()
    return found


def spawn_ranks(model: str, size: int) -> list[dict[str, Any]]:
    """All ranks of one engine, each in a process of its own; what a rank raises is raised here."""
    port = free_port()
    with ProcessPoolExecutor(size, mp_context=multiprocessing.get_context("spawn")) as ranks:
        started = [ranks.submit(drive, model, rank, size, port) for rank in range(size)]
        return [rank.result() for rank in started]


def by_hand(model: str) -> bool:
    """TP=1 against TP=2."""
    reference: list[int] = []
    equal = True
    for size in (1, 2):
        for rank, found in enumerate(spawn_ranks(model, size)):
            reference = reference or found["tokens"]
            same = found["tokens"] == reference
            equal &= same
            print(
                f"TP={size} rank {rank}: qkv_proj {found['qkv_proj']}, KV pool of a layer {found['kv_pool']}, "
                f"tokens {found['tokens']}, equal: {same}"
            )
    return equal


def with_graphs(model: str) -> bool:
    """Three prompts through LLM, eager against replayed."""
    vocab = read_model_config(model).vocab_size
    prompts = [[(i * 31 + k * 17) % vocab for i in range(n)] for k, n in enumerate((5, 9, 12))]
    params = SamplingParams(max_tokens=GRAPH_TOKENS, ignore_eos=True)
    outputs = []
    replays: Counter[str] = Counter()
    for largest in (0, 4):
        with LLM(
            model,
            dtype=torch.float32,
            cuda_graph_max_bs=largest,
            max_running_req=4,
            num_page_override=256,
            max_seq_len_override=128,
            progress=False,
        ) as llm:
            watch_replays(llm, replays)
            outputs.append([answer["token_ids"] for answer in llm.generate(prompts, params, progress=False)])
    equal = outputs[0] == outputs[1]
    print("replays: " + ", ".join(f"{sizes} x {count}" for sizes, count in replays.items()))
    print(f"LLM without and with graphs: {outputs[1]}, equal: {equal}")
    return equal and sum(replays.values()) > 0


def watch_replays(llm: LLM, replays: Counter[str]) -> None:
    """Count the graph replays of an engine by batch size and padded size."""
    replay = llm.engine.graph_runner.replay

    def counted(batch: Batch) -> Any:
        replays[f"{batch.size}->{batch.padded_size}"] += 1
        return replay(batch)

    llm.engine.graph_runner.replay = counted


def main() -> int:
    """Run both halves; 1 if anything differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder of a model that divides over two ranks (default: a random one)")
    given = parser.parse_args().model
    with tempfile.TemporaryDirectory() as scratch:
        model = given or str(make_model(Path(scratch) / "qwen3-geometry"))
        results = [by_hand(model), with_graphs(model)]
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
