"""moe:fused and ops:fused_route compiled, on the device: float64 sums, graphs, huge offsets, whole engines."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from support.make_checkpoints import ensure_checkpoint, reference

pytest.importorskip("triton", reason="the kernels need triton")

from minisgl_core.core import Batch, Req, SamplingParams
from minisgl_core.engine import Engine, EngineConfig
from minisgl_core.testing import MoESuite
from minisgl_moe import executor as module
from minisgl_moe.executor import FusedMoE
from minisgl_moe.plugin import minisgl_moe_executors
from minisgl_moe.routing import FusedRouting
from minisgl_moe.tiles import Tile, Tiling
from minisgl_moe.triton_ops.align import Alignment, align

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.filterwarnings("ignore"),  # compilers and drivers warn about themselves
]
Make = Callable[..., Any]
SPREAD, ROUNDING = 3e-2, 2**-8
"""Largest error of half precision: in standard deviations of the right answer, and in shares of one value, which is
itself rounded to 8 bits: of millions of values the largest are many deviations from zero.
"""


class TestFusedMoE(MoESuite):
    spec = minisgl_moe_executors()[0]


@pytest.fixture(autouse=True)
def _full_precision() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)
    torch.cuda.empty_cache()


@pytest.fixture(scope="module")
def wide(layer: Make) -> Callable[[int], Any]:
    """``wide(experts)`` -> a bfloat16 layer of Qwen3-30B-A3B's widths, made once."""
    made: dict[int, Any] = {}

    def get(experts: int) -> Any:
        if experts not in made:
            top_k = {5: 2, 60: 4, 128: 8}[experts]
            made[experts] = layer(
                experts, top_k, hidden=2048, inner=768, dtype=torch.bfloat16, device="cuda", max_tokens=8192
            )
        return made[experts]

    return get


def close(out: torch.Tensor, expected: torch.Tensor) -> None:
    spread, rounding = (1e-5, 0.0) if out.dtype == torch.float32 else (SPREAD, ROUNDING)
    beyond = float(((out.double() - expected).abs() - rounding * expected.abs()).max())
    bound = spread * float(expected.std())
    print(f"worst error beyond one rounding {beyond:.2e}, bound {bound:.2e}")
    assert beyond <= bound


def run(made: Any, tokens: int, ids: torch.Tensor | None = None) -> None:
    moe = FusedMoE(made.setup())
    x, shares = made.randn(tokens, made.hidden), made.shares(tokens)
    ids = made.ids(tokens) if ids is None else ids
    before = x.clone()
    out = moe.forward(x, ids, shares, moe.prepare_weights(0, made.w13, made.w2), 0)
    assert torch.equal(x, before)
    close(out, made.expected(x, ids, shares))
    moe.close()


@pytest.mark.parametrize("experts", [5, 60, 128])
@pytest.mark.parametrize("tokens", [1, 2, 7, 64, 1000, 20000])
def test_bfloat16(wide: Callable[[int], Any], tokens: int, experts: int) -> None:
    run(wide(experts), tokens)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("tokens", [1, 50, 700])
def test_other_dtypes(layer: Make, dtype: torch.dtype, tokens: int) -> None:
    run(layer(12, 3, hidden=512, inner=192, dtype=dtype, device="cuda", max_tokens=700), tokens)


TILES = {
    "pairs": Tiling(False, Tile(1, 8, 256), Tile(1, 4, 512)),
    "16": Tiling(True, Tile(16, 128, 64, stages=4), Tile(16, 64, 128)),
    "16 swapped": Tiling(True, Tile(16, 128, 64, swap=1), Tile(16, 64, 128, swap=1)),
    "32 swapped, descriptors": Tiling(True, Tile(32, 128, 64, swap=1, tma=1), Tile(32, 64, 64, swap=1, tma=1)),
    "64 descriptors": Tiling(True, Tile(64, 128, 64, tma=1), Tile(64, 256, 64, warps=8, tma=1)),
    "128": Tiling(True, Tile(128, 256, 64, warps=8), Tile(128, 128, 64, warps=4)),
    "128 descriptors": Tiling(True, Tile(128, 256, 64, warps=8, tma=1), Tile(128, 128, 64, warps=8, tma=1)),
}


@pytest.mark.parametrize("tiling", TILES.values(), ids=TILES)
@pytest.mark.parametrize(("hidden", "inner"), [(512, 384), (264, 104)])
def test_each_kind_of_tile(
    layer: Make, monkeypatch: pytest.MonkeyPatch, tiling: Tiling, hidden: int, inner: int
) -> None:
    if tiling.up.tma and torch.cuda.get_device_capability()[0] < 9:
        pytest.skip("tensor descriptors need Hopper")
    monkeypatch.setattr(module, "tiling_at", lambda *args: tiling)
    made = layer(7, 3, hidden, inner, dtype=torch.bfloat16, device="cuda", max_tokens=300)
    ids = made.ids(300)
    ids[::5, 1], ids[9] = -1, -1
    run(made, 300, ids)


@pytest.mark.parametrize("tokens", [1, 8, 64, 1000])
def test_a_graph_follows_new_routing(wide: Callable[[int], Any], tokens: int) -> None:
    made = wide(128)
    moe = FusedMoE(made.setup())
    weights = moe.prepare_weights(0, made.w13, made.w2)
    x, ids, shares = made.randn(tokens, 2048), made.ids(tokens), made.shares(tokens)
    moe.forward(x, ids, shares, weights, 0)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = moe.forward(x, ids, shares, weights, 0)
    one_expert, padded = torch.full_like(ids, -1), made.ids(tokens)
    one_expert[:, 0] = 127
    padded[tokens // 2 :] = -1
    for routing in (one_expert, padded, made.ids(tokens)):
        ids.copy_(routing)
        x.copy_(made.randn(tokens, 2048))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, moe.forward(x, ids, shares, weights, 0)), "replay and eager differ"
        close(out, made.expected(x, ids, shares))
    del graph


def test_weights_beyond_two_billion_elements(layer: Make) -> None:
    made = layer(1, 1, hidden=4096, inner=8192, dtype=torch.bfloat16, device="cuda")
    made.experts, made.top_k = 72, 2
    made.w13 = torch.empty(72, 16384, 4096, dtype=torch.bfloat16, device="cuda").normal_(0, 4096**-0.5)
    made.w2 = torch.empty(72, 4096, 8192, dtype=torch.bfloat16, device="cuda").normal_(0, 8192**-0.5)
    for tokens in (1, 20):
        run(made, tokens, torch.tensor([[71, 0]], device="cuda", dtype=torch.int32).repeat(tokens, 1))


def test_a_hundred_thousand_tokens(layer: Make) -> None:
    run(layer(60, 4, hidden=512, inner=256, dtype=torch.bfloat16, device="cuda", max_tokens=100_000), 100_000)


@pytest.mark.parametrize("experts", [1, 5, 60, 128, 512])
@pytest.mark.parametrize("tokens", [1, 16, 100, 5000, 16384])
def test_alignment(tokens: int, experts: int) -> None:
    top_k, block = min(8, experts), 64
    ids = torch.rand(tokens, experts, device="cuda").topk(top_k).indices.int()
    ids[::3, 0] = -1
    aligned = Alignment.empty(ids.numel(), experts, ids.device)
    align(*aligned, ids, experts, block)
    flat, total = ids.flatten().cpu().long(), int(aligned.total)
    padded = -(-torch.bincount(flat[flat >= 0], minlength=experts) // block) * block
    assert total == int(padded.sum())
    owners = torch.repeat_interleave(torch.arange(experts), padded // block)
    assert torch.equal(aligned.experts[: total // block].cpu().long(), owners)
    slots = aligned.slots[:total].cpu().long()
    real = slots < len(flat)
    order = torch.argsort(flat, stable=True)
    assert torch.equal(slots[real], order[flat[order] >= 0])
    assert torch.equal(flat[slots[real]], owners.repeat_interleave(block)[real])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("tokens", "experts", "top_k"), [(1, 128, 8), (5000, 128, 8), (700, 60, 4), (33, 513, 6)])
def test_routing(dtype: torch.dtype, tokens: int, experts: int, top_k: int) -> None:
    """Among 128 bfloat16 logits there are ties: the lower expert comes first."""
    logits = torch.randn(tokens, experts, device="cuda").to(dtype)
    setup: Any = None
    for renormalize in (False, True):
        ids, weights = FusedRouting(setup).route(logits, top_k, renormalize)
        order = torch.sort(logits.float(), dim=-1, descending=True, stable=True).indices[:, :top_k]
        assert torch.equal(ids, order.int())
        wanted = torch.softmax(logits.double(), dim=-1).gather(1, order)
        wanted = wanted / wanted.sum(-1, keepdim=True) if renormalize else wanted
        torch.testing.assert_close(weights.double(), wanted, atol=1e-6, rtol=1e-5)


# --- whole engines ----------------------------------------------------------------------------------------------------


def make_engine(path: Path, dtype: torch.dtype, moe: str, *, dummy: bool = False) -> Engine:
    """Driven by hand: page size 1, the first row owns the first 256 slots; nothing but the experts is under test."""
    engine = Engine(
        EngineConfig(
            str(path),
            dtype=dtype,
            device="cuda",
            max_running_req=2,
            max_seq_len_override=256,
            num_page_override=512,
            max_prefill_tokens=256,
            page_size=1,
            cuda_graph_max_bs=0,
            dummy_weights=dummy,
            progress=False,
            backends={"attention": "torch", "kv": "torch", "moe": moe},
        )
    )
    engine.page_table[0, :256] = torch.arange(256, dtype=torch.int32, device="cuda")
    return engine


def teacher_forced(engine: Engine, prompt: list[int], answer: list[int]) -> torch.Tensor:
    """(steps, V) float32: the logits before each token of the answer."""
    rows = []
    for step in range(len(answer)):
        tokens = torch.tensor(prompt + answer[:step], dtype=torch.int32)
        params = SamplingParams(max_tokens=1, ignore_eos=True)
        req = Req(tokens, 0, len(tokens) - 1 if step else 0, 1, 0, params, None)
        batch = Batch(reqs=[req], phase="decode" if step else "prefill")
        engine.graph_runner.pad_batch(batch)
        out = engine.forward_batch(batch, engine.sampler.prepare(batch))
        rows.append(out.logits[0].float().cpu())
    return torch.stack(rows)


@pytest.mark.parametrize("name", ["moe", "moe2"])
def test_the_tiny_models_answer_as_in_transformers(name: str) -> None:
    answer = reference(name)
    engine = make_engine(ensure_checkpoint(name), torch.float32, "fused")
    try:
        for prompt, tokens, logits in zip(answer.prompts, answer.continuations, answer.logits, strict=True):
            found = teacher_forced(engine, prompt, tokens)
            assert found.argmax(1).tolist() == tokens
            torch.testing.assert_close(found, torch.from_numpy(logits), atol=2e-4, rtol=1e-4)
    finally:
        engine.shutdown()


@pytest.mark.parametrize("name", ["moe", "moe2"])
def test_each_layer_of_a_bfloat16_model(layer: Make, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """In half precision these models are chaotic (a token that swaps its last expert gets other logits), so every call
    of a teacher-forced run is checked by itself, on what the engine gave it.
    """
    layers: dict[int, Any] = {}
    calls = []
    prepare, forward = FusedMoE.prepare_weights, FusedMoE.forward

    def keep(moe: FusedMoE, layer_id: int, w13: torch.Tensor, w2: torch.Tensor) -> Any:
        made = layers[layer_id] = layer(len(w2), 1, 16, 16)
        made.w13, made.w2 = w13.clone(), w2.clone()
        return prepare(moe, layer_id, w13, w2)

    def check(moe: FusedMoE, x: Any, ids: Any, shares: Any, weights: Any, layer_id: int) -> torch.Tensor:
        out = forward(moe, x, ids, shares, weights, layer_id)
        close(out, layers[layer_id].expected(x, ids, shares))
        calls.append(layer_id)
        return out

    monkeypatch.setattr(FusedMoE, "prepare_weights", keep)
    monkeypatch.setattr(FusedMoE, "forward", check)
    answer = reference(name)
    engine = make_engine(ensure_checkpoint(name), torch.bfloat16, "fused")
    try:
        teacher_forced(engine, answer.prompts[2], answer.continuations[2])
    finally:
        engine.shutdown()
    assert len(calls) >= 2 * len(answer.continuations[2])


def test_real_widths_answer_as_the_plain_experts_do(tmp_path: Path) -> None:
    """Two layers of Qwen3-30B-A3B in float32, random weights: 100 tokens of prefill, then decode steps."""
    config = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 2,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "vocab_size": 1024,
        "max_position_embeddings": 256,
        "rope_theta": 1e6,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "hidden_act": "silu",
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    prompt = torch.randint(0, 1024, (100,), generator=torch.Generator().manual_seed(1)).tolist()
    answer = torch.randint(0, 1024, (5,), generator=torch.Generator().manual_seed(2)).tolist()
    logits = []
    for moe in ("fused", "torch"):
        engine = make_engine(tmp_path, torch.float32, moe, dummy=True)
        logits.append(teacher_forced(engine, prompt, answer))
        engine.shutdown()
        del engine
        torch.cuda.empty_cache()
    fused, plain = logits
    worst = float((fused - plain).abs().max() / plain.std())
    print(f"worst difference {worst:.2e} standard deviations")
    assert worst <= 1e-3
    assert torch.equal(fused.argmax(1), plain.argmax(1))
