"""What an ablation exchanges, and the work that its rows are measured with."""

from __future__ import annotations

import pytest

from minisgl_core.bench import make_workload
from minisgl_core.bench.ablate import Job
from minisgl_core.bench.session import thrifty
from minisgl_core.bench.variants import DEFAULT, VARIANTS, Variant, choose_variants
from minisgl_core.engine import EngineConfig
from minisgl_core.errors import UsageError


def test_every_optimisation_has_its_rows() -> None:
    names = [variant.name for variant in VARIANTS]
    assert len(set(names)) == len(names) and DEFAULT.name not in names
    assert {name.split()[0] for name in names} == {
        "overlap", "graphs", "prefix-cache", "attention", "kv", "ops", "linear", "moe", "chunk", "page", "default",
    }  # fmt: skip
    pairs = {
        tuple(v.backends["attention"][phase] for phase in ("prefill", "decode"))
        for v in VARIANTS
        if "attention" in v.backends
    }
    assert pairs == {
        ("flashinfer", "flashinfer"), ("fa", "fa"), ("fa", "flashinfer"), ("flashinfer", "fa"), ("fa", "cuda_decode"),
    }  # fmt: skip
    assert {v.config["page_size"] for v in VARIANTS if "page_size" in v.config} == {1, 16, 64, 256}
    assert {v.config["max_prefill_tokens"] for v in VARIANTS if "max_prefill_tokens" in v.config} == {2048, 8192, 16384}
    assert {v.backends["kv"] for v in VARIANTS if "kv" in v.backends} == {"cuda/cpp", "cuda/triton", "torch"}


def test_rows_are_chosen_by_name_first_word_and_part() -> None:
    assert choose_variants([]) == VARIANTS
    assert [v.name for v in choose_variants(["page 16", "kv"])] == ["kv cpp", "kv triton", "kv torch", "page 16"]
    parts = [choose_variants([], (number, 3)) for number in (1, 2, 3)]
    assert sorted(v.name for part in parts for v in part) == sorted(v.name for v in VARIANTS)
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    for name, meant in (("overlapp", "overlap"), ("fa", "attention fa"), ("loop", "moe loop (no graphs)")):
        with pytest.raises(UsageError) as caught:
            choose_variants([name])
        assert str(caught.value) == f"no row {name!r}; did you mean {meant!r}?"


def test_a_variant_changes_one_thing() -> None:
    config = EngineConfig("m", backends={"attention": "fa", "kv": "cuda"}, max_prefill_tokens=4096)
    changed = Variant("x", {"page_size": 16}, {"kv": "torch"}).applied_to(config)
    assert (changed.page_size, changed.max_prefill_tokens) == (16, 4096)
    assert changed.backends == {"attention": "fa", "kv": "torch"} and config.backends["kv"] == "cuda"


def test_a_variant_changes_one_option_and_keeps_the_others() -> None:
    options = {"linear:skinny": {"fuse": ["act_and_mul"], "dependent_launch": True}, "moe:fused": {}}
    config = EngineConfig("m", backend_options=options)
    unfused = next(variant for variant in VARIANTS if variant.name == "linear unfused")
    changed = unfused.applied_to(config).backend_options
    assert changed == {"linear:skinny": {"fuse": [], "dependent_launch": True}, "moe:fused": {}}
    assert config.backend_options == options


def test_shorter_work_is_of_the_same_kind() -> None:
    offline, prefill = make_workload("offline"), make_workload("prefill")
    short = offline.shortened(4)
    assert short.prompts == offline.prompts and short.outputs[:2] == tuple(-(-n // 4) for n in offline.outputs[:2])
    assert prefill.shortened(4).facts() == {"seed": 0, "requests": 16, "tokens_in": 16 * 1024, "tokens_out": 16}


def test_a_warm_up_keeps_the_batch_sizes_and_what_hits_the_cache() -> None:
    offline, prefill, shared = map(make_workload, ("offline", "prefill", "shared-prefix"))
    warm = offline.warm_up(8)
    assert [len(prompt) for prompt in warm.prompts] == [-(-len(prompt) // 8) for prompt in offline.prompts]
    assert warm.outputs == offline.shortened(8).outputs
    assert prefill.warm_up(8) == prefill.shortened(8) and shared.warm_up(8) == shared.shortened(8)


def test_only_graphs_that_the_work_can_meet_are_recorded() -> None:
    config = EngineConfig("m")
    one = thrifty(config, [make_workload("latency")])
    assert (one.max_running_req, one.cuda_graph_modes) == (1, ("random",))
    both = thrifty(config, [make_workload("latency"), make_workload("shared-prefix")])
    assert both.max_running_req == 64
    assert thrifty(EngineConfig("m", max_running_req=32), [make_workload("offline")]).max_running_req == 32


def test_the_work_of_a_variant() -> None:
    work = {mode: make_workload(mode, requests=1) for mode in ("offline", "shared-prefix")}
    cache = next(v for v in VARIANTS if v.name == "prefix-cache off")
    job = Job(EngineConfig("m"), "offline", work)
    assert job.mode_of(cache) == "shared-prefix" and job.mode_of(DEFAULT) == "offline"
