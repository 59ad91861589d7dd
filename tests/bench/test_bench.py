"""Benchmarks: the work is drawn exactly, limits are worked out by hand, and a tiny engine goes through it all."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch

from minisgl_core.bench import limits, make_workload
from minisgl_core.bench.limits import Ceilings, PassFacts, measure_ceilings, pass_seconds
from minisgl_core.bench.model_folder import write_geometry
from minisgl_core.bench.peers import best_peer, peer_rows
from minisgl_core.builtin.platform import CpuPlatform
from minisgl_core.cli.app import main
from minisgl_core.errors import UsageError
from minisgl_core.modelconfig import MoEConfig, read_model_config
from minisgl_core.modelconfig.geometries import GEOMETRIES, geometry

KEYS = {
    "mode", "geometry", "commit", "device", "versions", "command", "repeat", "tok_s", "tpot_ms", "ttft_ms", "in_tok_s",
    "host_us_steady", "host_us_changed", "limit_share", "slowest", "runs", "ceilings", "workload", "plan",
}  # fmt: skip


def test_offline_work_is_drawn_as_published() -> None:
    r = Random(0)
    prompts = [[r.randint(0, 10000) for _ in range(r.randint(100, 1024))] for _ in range(256)]
    outputs = [r.randint(100, 1024) for _ in range(256)]
    work = make_workload("offline")
    assert [list(prompt) for prompt in work.prompts] == prompts and list(work.outputs) == outputs
    assert (work.tokens_in, work.tokens_out, work.temperature) == (142_827, 133_966, 0.6)


def test_other_modes_have_their_published_sizes() -> None:
    latency, prefill, shared = (make_workload(mode) for mode in ("latency", "prefill", "shared-prefix"))
    assert (len(latency.prompts[0]), latency.outputs) == (128, (512,))
    assert (prefill.tokens_in, set(prefill.outputs)) == (64 * 1024, {1})
    assert {prompt[:2048] for prompt in shared.prompts} == {shared.prefix} and len(shared.prefix) == 2048
    assert max(map(max, make_workload("prefill", requests=2).within(100).prompts)) < 100
    with pytest.raises(UsageError, match="latency"):
        make_workload("latencies")


def test_limits_by_hand() -> None:
    tiny = geometry("tiny")
    # a layer: (2*4 + 2*2) heads * 32 * 64 + 3 * 128 * 64 = 24576 + 24576; two of them and the 512 * 64 head
    weights = 2 * 49152 + 32768
    kv_per_token = 2 * 2 * 2 * 32
    decode = PassFacts(True, tokens=3, rows=3, context=100)
    read = (weights + kv_per_token * 103) * 4
    assert pass_seconds(tiny, decode, Ceilings(1e9, 1e15), 4) == pytest.approx(read / 1e9)
    prefill = PassFacts(False, tokens=1000, rows=2, context=0)
    # all of the first layer, keys and values of the second, of 2 * 2 heads * 32 * 64; the rest for the rows alone
    multiplied = 2 * ((49152 + 8192) * 1000 + (49152 - 8192 + 32768) * 2)
    assert pass_seconds(tiny, prefill, Ceilings(1e15, 1e9), 4) == pytest.approx(multiplied / 1e9)
    assert pass_seconds(tiny, prefill, Ceilings(1e15, 1e9), 4, ranks=2) == pytest.approx(multiplied / 2e9)


def test_limits_of_experts_count_those_that_are_touched() -> None:
    moe = MoEConfig(num_experts=4, top_k=1, intermediate_size=10, norm_topk_prob=True, layers=(0, 1))
    sparse = replace(geometry("tiny"), moe=moe)
    one = PassFacts(True, tokens=1, rows=1, context=0)
    weights = 2 * (24576 + 3 * 10 * 64) + 32768  # one token touches one expert a layer
    read = (weights + 2 * 2 * 2 * 32) * 4
    assert pass_seconds(sparse, one, Ceilings(1e9, 1e15), 4) == pytest.approx(read / 1e9)
    # three tokens, of which one is sampled: 4 * (1 - 0.75**3) experts in the first layer, one in the last
    prompt = PassFacts(False, tokens=3, rows=1, context=0)
    weights = 2 * 24576 + (4 * (1 - 0.75**3) + 1) * 3 * 10 * 64 + 32768
    read = (weights + 3 * 2 * 2 * 2 * 32) * 4
    assert pass_seconds(sparse, prompt, Ceilings(1e9, 1e15), 4) == pytest.approx(read / 1e9)


@pytest.mark.parametrize("name", GEOMETRIES)
def test_geometries_survive_their_config_json(name: str, tmp_path: Any) -> None:
    model = geometry(name)
    read = read_model_config(write_geometry(model, tmp_path))
    if model.rope.kind == "default":  # the reader notes the context there, which no other kind needs
        model = replace(model, rope=replace(model.rope, original_max_position=model.max_position_embeddings))
    assert replace(read, bos_token_id=model.bos_token_id) == model


def test_peers_are_known_by_name_and_work() -> None:
    figures = {figure.engine: (figure.low, figure.high, figure.date) for figure in peer_rows("offline", "qwen3-0.6b")}
    assert figures == {
        "mini-sglang 20fcd7f": (21720, 21910, "2026-11-30"), "vLLM 0.26.0": (22350, 23140, "2026-11-30"),
        "nano-vllm bb823b3": (20697, 20697, "2026-11-29"), "SGLang 0.5.17": (20291, 20291, "2026-11-29"),
    }  # fmt: skip
    assert peer_rows("prefill", "qwen3-0.6b", "nano-vllm bb823b3") == [] and peer_rows("offline", "tiny") == []
    with pytest.raises(UsageError, match=r"vLLM 0\.26\.0"):
        peer_rows("offline", "qwen3-14b", "vLLM 0.26")


@pytest.mark.parametrize(
    ("mode", "name", "best", "engine"),
    [("latency", "tpot_ms", 1.75, "mini-sglang 20fcd7f"), ("prefill", "in_tok_s", 449_000, "mini-sglang 20fcd7f")],
)
def test_each_mode_is_compared_by_its_own_figure(mode: str, name: str, best: float, engine: str) -> None:
    found = best_peer(name, "qwen3-0.6b")
    assert found is not None and (found.name, found.best, found.engine) == (name, best, engine)
    assert {figure.name for figure in peer_rows(mode, "qwen3-0.6b")} == {name}


def bench(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    code = main(["bench", *arguments, "--geometry", "tiny", "--repeat", "1", "--num-page-override", "9000"])
    return code, capsys.readouterr().out


@pytest.mark.parametrize("mode", ["offline", "latency", "prefill", "shared-prefix"])
def test_every_mode_runs_on_a_cpu(mode: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out = bench(capsys, mode, "--requests", "2", "--json")
    found = json.loads(out)
    assert code == 0 and set(found) >= KEYS and found["mode"] == mode
    assert found["in_tok_s"] > 0 and 0 < found["limit_share"] < 1 and 0 < found["device_pass_share"] <= 1


def test_the_table_is_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    code, out = bench(capsys, "prefill", "--requests", "1")
    assert code == 0 and "median of 1" in out and "slowest" in out
    assert re.search(r"tokens in per second +[\d,]+ +[\d,]+$", out, re.MULTILINE)
    for what in ("tokens out per second", "time per token after it", "host time, steady decode step"):
        assert re.search(rf"{what} +- +-$", out, re.MULTILINE), what  # there is none: each answer is one token


def test_a_cpu_that_is_slow_in_half_precision_is_held_to_its_rate_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    def seconds(platform: Any, call: Any) -> float:
        if call.func is not torch.matmul:
            return 0.5
        return {torch.bfloat16: 60.0, torch.float32: 1.0}[call.args[0].dtype]

    monkeypatch.setattr(limits, "_best_seconds", seconds)
    assert measure_ceilings(CpuPlatform(), torch.bfloat16).flops_per_s == 2 * 1024**3
    assert measure_ceilings(CpuPlatform(), torch.float32).flops_per_s == 2 * 1024**3
    # a copy of 2**24 bytes reads them and writes them, here in half a second
    assert measure_ceilings(CpuPlatform(), torch.float32).bytes_per_s == 2 * 2**24 / 0.5
