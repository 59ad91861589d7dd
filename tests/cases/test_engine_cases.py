"""Cases of the engine: driven by hand, pages that may hold NaN, captured operations, stored weights, pauses."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from minisgl_core.builtin.linear import PlainLinear
from minisgl_core.builtin.ops import ComposedOps
from minisgl_core.core import Batch, Req, SamplingParams
from minisgl_core.distributed import DistributedInfo
from minisgl_core.engine import Engine, EngineConfig
from minisgl_core.engine.plan_resolution import make_plan
from minisgl_core.errors import BackendError, ConfigError
from minisgl_core.modelconfig import read_model_config
from support.driver import Driver, greedy

Fields = Callable[[Engine, Batch, int, int], None]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run_outline(folder: Path, prompt: list[int], N: int, fields: Fields, graphs: int, **more: Any) -> list[int]:
    """The outline by hand, one line after the other; ``fields`` sets the Batch's inputs."""
    ids = torch.tensor(prompt, dtype=torch.int32)
    P, rank, size = free_port(), 0, 1
    engine = Engine(EngineConfig(model_path=str(folder), tp_info=DistributedInfo(rank, size), dtype=torch.float32,
                    max_running_req=2, num_page_override=256, max_seq_len_override=128, distributed_port=P,
                    device="cpu", page_size=1, cuda_graph_max_bs=graphs, progress=False, **more))  # fmt: skip
    try:
        engine.page_table[0, :128] = torch.arange(128)
        req = Req(input_ids=ids, table_idx=0, cached_len=0, output_len=N, uid=0,
                  sampling_params=SamplingParams(max_tokens=N), cache_handle=None)  # fmt: skip
        for step in range(N):
            batch = Batch(reqs=[req], phase="decode" if step else "prefill")
            engine.graph_runner.pad_batch(batch)
            fields(engine, batch, req.cached_len, req.device_len)
            engine.attn_backend.prepare_metadata(batch)
            out = engine.forward_batch(batch, engine.sampler.prepare(batch))
            req.append_host(out.next_tokens_cpu[:1])
        return req.input_ids[len(prompt) :].tolist()
    finally:
        engine.shutdown()


def as_in_the_outline(engine: Engine, batch: Batch, a: int, b: int) -> None:
    batch.positions = torch.arange(a, b, dtype=torch.int32)
    batch.input_ids = batch.reqs[0].input_ids[a:b]
    batch.out_loc = engine.page_table[0, a:b]


def views_of_device_state(engine: Engine, batch: Batch, a: int, b: int) -> None:
    """Every field is a view of a tensor that the engine itself writes."""
    if b - a == 1:
        batch.positions, batch.input_ids = engine.state.lengths[:1], engine.state.last_token[:1]
    else:
        engine.page_table[1, :128] = engine.page_table[0, :128]
        batch.positions = engine.page_table[1, a:b]  # slot i is i
    engine.page_table[0, :] = engine.page_table[0, :]
    batch.out_loc = engine.page_table[0, a:b]


def overlapping_views(engine: Engine, batch: Batch, a: int, b: int) -> None:
    """Positions and slots are one and the same memory, as slot i is i here; and longer than the pass."""
    batch.positions = batch.out_loc = engine.page_table[0, a : b + 1]


@pytest.mark.parametrize("graphs", [0, 2], ids=["eager", "graphs"])
@pytest.mark.parametrize("fields", [as_in_the_outline, views_of_device_state, overlapping_views])
def test_case_101_the_outline_by_hand(fields: Fields, graphs: int, small: Path, answers: Callable[[str], Any]) -> None:
    if graphs:
        pytest.importorskip("minisgl_cpu_sim")
    reference = answers("mistral-full")
    prompt, expected = reference.prompts[1], reference.continuations[1]
    options = {"backend_options": {"graph:emulated": {"strict": True}}} if graphs else {}
    assert run_outline(small, prompt, len(expected), fields, graphs, **options) == expected


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_case_101_views_hold_what_they_held_when_the_batch_was_prepared(phase: str, small: Path) -> None:
    """Between the preparation and the pass the caller goes on to write the tensors whose views it gave."""

    def logits(disturb: bool) -> torch.Tensor:
        def change(engine: Engine, batch: Batch, a: int, b: int) -> None:
            as_in_the_outline(engine, batch, a, b)
            if disturb and batch.phase == phase:
                inputs = torch.stack([batch.positions, batch.input_ids, batch.out_loc])
                batch.positions, batch.input_ids, batch.out_loc = inputs
                prepare = engine.attn_backend.prepare_metadata

                def prepare_then_overwrite(prepared: Batch) -> None:
                    prepare(prepared)
                    inputs.fill_(0)

                engine.attn_backend.prepare_metadata = prepare_then_overwrite  # type: ignore[method-assign]

        return torch.tensor(run_outline(small, list(range(3, 20)), 4, change, 0))

    assert torch.equal(logits(True), logits(False))


@pytest.mark.parametrize("name", ["positions", "input_ids", "out_loc"])
@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_case_101_a_field_of_too_few_tokens_is_named(phase: str, name: str, small: Path) -> None:
    def too_short(engine: Engine, batch: Batch, a: int, b: int) -> None:
        as_in_the_outline(engine, batch, a, b)
        if batch.phase == phase:
            setattr(batch, name, getattr(batch, name)[:0])

    with pytest.raises(ConfigError, match=f"Batch.{name}"):
        run_outline(small, [5, 6, 7], 2, too_short, 0)


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_case_101_slots_set_by_hand_are_where_attention_looks(
    phase: str, small: Path, answers: Callable[[str], Any]
) -> None:
    """``out_loc`` names slots that the page table did not: this pass and later ones find the keys there."""
    reference = answers("mistral-full")
    prompt, expected = reference.prompts[0], reference.continuations[0]

    def elsewhere(engine: Engine, batch: Batch, a: int, b: int) -> None:
        batch.out_loc = engine.page_table[0, a:b] + (100 if batch.phase == phase else 0)

    assert run_outline(small, prompt, len(expected), elsewhere, 0) == expected


# ---- 117: what a prefill pass costs before it begins -----------------------------------------------------------------

MOST_OPERATIONS = 5
"""Of torch, to make ready a prefill pass, views aside: the upload, a copy of it, a look-up of slots, a conversion"""


@pytest.mark.parametrize("lengths", [[128], [5, 1, 40], [7] * 8])
def test_case_117_a_prefill_is_made_ready_in_a_few_operations(lengths: list[int], small: Path) -> None:
    """The first token of a short prompt waits for launches, not for the device."""
    seen = []

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    settings: dict[str, Any] = {"num_page_override": 512, "max_seq_len_override": 256, "page_size": 1}
    engine = Engine(EngineConfig(model_path=str(small), device="cpu", max_running_req=8, progress=False, **settings))
    try:
        reqs = [
            Req(torch.arange(3, 3 + length, dtype=torch.int32), row, 0, 1, row, SamplingParams(max_tokens=1))
            for row, length in enumerate(lengths)
        ]
        batch = Batch(reqs=reqs, phase="prefill")
        engine.graph_runner.pad_batch(batch)
        with Count():
            engine.attn_backend.prepare_metadata(batch)
        launching = [name for name in seen if not any(view in name for view in ("slice", "split", "view", "alias"))]
        assert len(launching) <= MOST_OPERATIONS, launching
    finally:
        engine.shutdown()


# ---- 102: pages that may hold NaN -----------------------------------------------------------------------------------

NAN_TOKEN = 7
HEALTHY = list(range(20, 38))


@pytest.fixture(scope="session")
def untied(tiny: Callable[[str], Path]) -> Path:
    """A checkpoint whose head is not its embedding: NaN in a row of that reaches only those who read it."""
    return tiny("llama-bias")


def tail_plan(folder: Path, *, finite_tail: bool, **settings: Any) -> dict[str, Any]:
    """``attention:torch``, which then multiplies the unused tails of pages by zero."""
    backends = {"attention": "torch", "kv": "torch"}
    settings = {"dtype": torch.float32, "max_seq_len_override": 64, "page_size": 16, **settings}
    config = EngineConfig(str(folder), device="cpu", progress=False, backends=backends, **settings)
    plan = make_plan(config, read_model_config(str(folder)))
    choice = replace(
        plan.choice("attention", phase="decode"), factory="support.tail_reader:TailReader", finite_tail=finite_tail
    )
    buckets = [replace(b, choice=choice) if b.entry.role == "attention" else b for b in plan.buckets]
    return replace(plan, buckets=tuple(buckets)).to_json()


def tail_driver(folder: Path, *, finite_tail: bool = True, overlap: bool = True, **settings: Any) -> Driver:
    fixed = {"max_seq_len_override": 64, "num_page_override": 8, "page_size": 16, **settings}
    plan = tail_plan(folder, finite_tail=finite_tail, **settings)
    driver = Driver(folder, plan=plan, overlap=overlap, **fixed)
    with torch.no_grad():
        driver.engine.model.model.embed_tokens.weight[NAN_TOKEN] = torch.nan
    return driver


def test_case_102_the_stand_in_multiplies_tails_by_zero(untied: Path) -> None:
    """Without the declaration nothing is zeroed, and the healthy request fails."""
    with tail_driver(untied, finite_tail=False) as driver:
        poisoned, healthy = (driver.serve([prompt], greedy(6))[0] for prompt in ([NAN_TOKEN] * 40, HEALTHY))
    assert (poisoned.finish_reason, healthy.finish_reason) == ("error", "error")


@pytest.mark.parametrize("graphs", [0, 2], ids=["eager", "graphs"])
@pytest.mark.parametrize("cache", ["radix", "naive"])
def test_case_102_pages_of_a_failed_request_are_zeroed_before_reuse(
    graphs: int, cache: str, untied: Path, overlap: bool
) -> None:
    with Driver(untied, page_size=1, num_page_override=256, overlap=False, cache="naive") as driver:
        expected = driver.tokens([HEALTHY], greedy(6))[0]
    with tail_driver(untied, cuda_graph_max_bs=graphs, cache=cache, overlap=overlap) as driver:
        for length in (16, 40, 58):
            (poisoned,) = driver.serve([[5] * (length - 3) + [NAN_TOKEN] * 3], greedy(6))
            assert poisoned.finish_reason == "error" and not poisoned.tokens
            assert driver.scheduler.stats.free_pages + driver.scheduler.stats.cached_pages == 8
            (healthy,) = driver.serve([HEALTHY], greedy(6))
            assert (healthy.finish_reason, healthy.tokens) == ("length", expected)
            driver.scheduler.clear_cache()


def test_case_102_pages_of_a_failed_request_leave_the_prefix_cache(untied: Path) -> None:
    prompt = [NAN_TOKEN] * 48
    with tail_driver(untied) as driver:
        both = driver.serve([prompt, [*prompt, 9]], greedy(6))  # the second shares what the first has published
        assert [answer.finish_reason for answer in both] == ["error", "error"]
        assert (driver.scheduler.stats.cached_pages, driver.scheduler.stats.free_pages) == (0, 8)
        assert not driver.engine.kv_cache.v_cache(0)[:8].isnan().any()


def test_case_102_a_request_that_fails_in_decode(untied: Path) -> None:
    """NaN first comes with a generated token, after the prompt's pages have been shared."""
    with tail_driver(untied) as driver:
        weight = driver.engine.model.model.embed_tokens.weight
        first = driver.tokens([HEALTHY], greedy(2))[0][0]
        kept = weight[first].clone()
        weight[first] = torch.nan
        (answer,) = driver.serve([HEALTHY], greedy(6))
        assert (answer.finish_reason, answer.tokens) == ("error", [first])
        assert driver.scheduler.stats.cached_pages == 0
        weight[first] = kept
        assert driver.serve([HEALTHY], greedy(6))[0].finish_reason == "length"


def test_case_102_a_scheduler_does_not_trust_the_pages_of_an_engine_that_has_run(untied: Path) -> None:
    with tail_driver(untied) as driver:
        assert not driver.engine.state.has_run
        driver.serve([HEALTHY], greedy(2))
        driver.engine.kv_cache.v_cache(0).fill_(torch.nan)
        driver.reschedule(overlap=True)
        assert driver.serve([HEALTHY], greedy(6))[0].finish_reason == "length"


def test_case_102_a_healthy_run_zeroes_nothing(untied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with tail_driver(untied) as driver:
        monkeypatch.setattr(driver.engine.kv_cache, "zero_pages", lambda pages: pytest.fail("nothing was wrong"))
        driver.serve([HEALTHY, HEALTHY[::-1], [4] * 30, [4] * 31], greedy(12))


# ---- 106: operations of other authors in strict graphs --------------------------------------------------------------


@pytest.mark.parametrize("device_types", [None, "cpu"])
def test_case_106_a_strict_engine_captures_a_custom_op(
    device_types: str | None, small: Path, answers: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("minisgl_cpu_sim")
    op = torch.library.custom_op(
        f"engine_cases::act_for_{device_types}", _silu_and_mul, mutates_args=(), device_types=device_types
    )
    monkeypatch.setattr(ComposedOps, "act_and_mul", lambda self, x: op(x))
    reference = answers("mistral-full")
    settings = {"backends": {"ops": "composed"}, "backend_options": {"graph:emulated": {"strict": True}}}
    with Driver(small, cuda_graph_max_bs=2, **settings) as driver:
        assert driver.tokens(reference.prompts[:1], greedy(6)) == [reference.continuations[0][:6]]
        assert driver.replays


def _silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


# ---- 115: pauses among equal prefills -------------------------------------------------------------------------------


def test_case_115_equal_prefill_calls_make_no_full_collection(tmp_path: Path) -> None:
    script, found = Path(__file__).parents[2] / "benchmarks" / "prefill_pauses.py", tmp_path / "pauses.json"
    arguments = ["--prompts", "2", "--tokens", "16", "--calls", "30", "--json", str(found)]
    subprocess.run([sys.executable, str(script), *arguments], check=True, capture_output=True, timeout=300)
    rows = json.loads(found.read_text())["rows"]
    assert len(rows) == 30 and all(row["ms"] > 0 and row["forced_switches"] >= 0 for row in rows)
    assert [one for row in rows[3:] for one in row["collections"] if one["generation"] == 2] == []
    assert all(row["modules"] == 0 for row in rows[3:]), "nothing is imported late"


# ---- 126: a linear backend that stores weights in its own format ----------------------------------------------------


def quantise(monkeypatch: pytest.MonkeyPatch) -> list[weakref.ref[torch.Tensor]]:
    """``linear:plain`` keeps int8 rows and a scale each; returns the dense weights that it was given."""
    given: list[weakref.ref[torch.Tensor]] = []

    def prepare(self: PlainLinear, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        given.append(weakref.ref(weight))
        scale = weight.abs().amax(1, keepdim=True).clamp(min=1e-8) / 127
        return (weight / scale).round().to(torch.int8), scale

    def forward(self: PlainLinear, x: torch.Tensor, weights: Any, bias: torch.Tensor | None = None) -> torch.Tensor:
        return torch.nn.functional.linear(x, weights[0].to(x.dtype) * weights[1], bias)

    monkeypatch.setattr(PlainLinear, "prepare_weights", prepare)
    monkeypatch.setattr(PlainLinear, "weight_of", lambda self, weights: None)
    monkeypatch.setattr(PlainLinear, "forward", forward)
    return given


@pytest.mark.parametrize("checkpoint", ["llama-bias", "mistral-full"])
def test_case_126_no_dense_copy_is_kept(
    checkpoint: str, tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    given = quantise(monkeypatch)
    with Driver(tiny(checkpoint), backends={"linear": "plain"}) as driver:
        model = driver.engine.model.model
        alive = [ref() for ref in given if ref() is not None]
        tied = driver.engine.model_config.tie_word_embeddings
        assert [w is model.embed_tokens.weight for w in alive] == ([True] if tied else [])
        with pytest.raises(BackendError, match="dequantized"):
            _ = model.layers.op_list[0].self_attn.qkv_proj.weight
        assert len(given) == 4 * len(model.layers.op_list) + 1
        assert all(len(tokens) == 4 for tokens in driver.tokens([HEALTHY], greedy(4)))


def test_case_126_a_plain_weight_is_the_merged_shard(small: Path) -> None:
    with Driver(small, backends={"linear": "plain"}) as driver:
        layer = driver.engine.model.model.layers.op_list[0].self_attn.qkv_proj
        width = (layer.q_heads + 2 * layer.kv_heads) * layer.head_dim
        assert layer.weight.shape == (width, driver.engine.model_config.hidden_size)
        assert layer.weight.data_ptr() == layer._prepared.data_ptr()
