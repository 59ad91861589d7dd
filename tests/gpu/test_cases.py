"""Reported faults that need a whole engine on the device; the numbers are those of tests/cases/README.md."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from random import Random
from typing import Any

import pytest
import torch

from minisgl_core.core import Batch, SamplingParams
from minisgl_core.llm import LLM
from support.child_env import child_env
from support.driver import greedy
from support.gpu.check import Context, expect
from support.gpu.collect import context_of
from support.gpu.machine import GPU_PLAN, entries, minisgl
from support.gpu.serving import answers, serve
from support.make_checkpoints import ensure_checkpoint, reference

pytestmark = [pytest.mark.gpu, pytest.mark.check(seconds=6.0, session="case")]
MODEL = "q3"
HOT = 6.0
"""The tiny models are sure of themselves: at this temperature their answers vary."""
COMPILERS = ("nvcc", "g++", "c++", "clang++")
ENDS = """
import sys
from minisgl_core.llm import LLM
from minisgl_core.core import SamplingParams
model, device, graphs = sys.argv[1:]
llm = LLM(model, device=device, dtype="float32", num_page_override=64, max_running_req=2, max_seq_len_override=128,
          cuda_graph_max_bs=int(graphs), progress=False, backends={"attention": "torch"})
llm.generate([[5, 6, 7]], SamplingParams(max_tokens=4, ignore_eos=True), progress=False)
if graphs == "0":
    llm.shutdown()  # with graphs the end of the program has to do it
print("done", flush=True)
"""


def prompt_of(length: int, seed: int = 0) -> list[int]:
    draw = Random(1000 + seed)
    return [draw.randrange(3, 500) for _ in range(length)]


@contextmanager
def engine(context: Context, **settings: Any) -> Iterator[LLM]:
    small = {"max_running_req": 4, "max_seq_len_override": 192, "pool_tokens": 1024}
    with serve(context, ensure_checkpoint(MODEL), **{**small, **settings}) as llm:
        yield llm


@pytest.mark.check(cases=(24,))
def test_case_24_cache_hits(context: Context) -> None:
    """One long prompt four times, with the prefix cache and without: one answer."""
    length = 200 if context.tiny else 1464
    prompt, found = prompt_of(length), []
    for cache in ("radix", "naive"):
        with engine(context, cache=cache, max_seq_len_override=length + 32, pool_tokens=2 * length + 64) as llm:
            found += [answers(llm, [prompt], greedy(8))[0] for _ in range(4)]
            hits = llm.scheduler.stats.hit_tokens
            wanted = 3 * ((length - 1) // 16 * 16) if cache == "radix" else 0
            expect(hits == wanted, f"cache={cache}: {hits} tokens came from the cache, expected {wanted}")
    expect(found.count(found[0]) == len(found), f"the answers differ: {found}")
    context.note(prompt=length)


@pytest.mark.check(cases=(27,))
def test_case_27_chunks(context: Context) -> None:
    """A prompt of 40 in chunks of 16, together with another one: the same tokens, and no more."""
    prompts, params = [prompt_of(40), prompt_of(7, 1)], [greedy(7), greedy(1)]
    with engine(context, max_prefill_tokens=16) as llm:
        cut = answers(llm, prompts, params)
    with engine(context, cache="naive") as llm:
        whole = [answers(llm, [prompt], own)[0] for prompt, own in zip(prompts, params, strict=True)]
    expect(cut == whole, f"in chunks {cut}, whole {whole}")
    lengths = [len(tokens) for tokens in cut]
    expect(lengths == [7, 1], f"{lengths} tokens came, 7 and 1 were requested")


@pytest.mark.check(cases=(38,))
def test_case_38_tiny_temperatures(context: Context) -> None:
    """Temperatures that leave nothing but the maximum."""
    prompts = [prompt_of(9, seed) for seed in range(3)]
    with engine(context) as llm:
        wanted = answers(llm, prompts, greedy(6))
        for temperature in (1e-5, 1e-8, 1e-38):
            params = SamplingParams(temperature=temperature, max_tokens=6, ignore_eos=True)
            got = answers(llm, prompts, params)
            expect(got == wanted, f"temperature {temperature}: {got}, greedy {wanted}")


@pytest.mark.check(cases=(42,))
def test_case_42_extreme_filters(context: Context) -> None:
    """Filters that leave one token, and filters that leave all."""
    prompt = prompt_of(9)
    hot: dict[str, Any] = {"temperature": HOT, "max_tokens": 6, "ignore_eos": True, "seed": 3}
    with engine(context) as llm:
        (likeliest,) = answers(llm, [prompt], greedy(6))
        (free,) = answers(llm, [prompt], SamplingParams(**hot))
        expect(free != likeliest, "the temperature does not matter to this model")
        one: tuple[dict[str, Any], ...] = ({"top_p": 0.0}, {"top_p": 1e-9}, {"top_k": 1}, {"min_p": 1.0})
        everything: tuple[dict[str, Any], ...] = ({"top_k": 2**30}, {"top_k": 512}, {"top_p": 1.0})
        for filters, wanted in [*((f, likeliest) for f in one), *((f, free) for f in everything)]:
            (got,) = answers(llm, [prompt], SamplingParams(**hot, **filters))
            expect(got == wanted, f"{filters}: {got}, expected {wanted}")


@pytest.mark.check(cases=(43,))
def test_case_43_seeds(context: Context) -> None:
    """A seed gives one answer in any row and with any other rows; different seeds differ."""

    def hot(seed: int | None, **more: Any) -> SamplingParams:
        return SamplingParams(temperature=HOT, max_tokens=12, ignore_eos=True, seed=seed, **more)

    prompt, others = prompt_of(9), [prompt_of(12, seed) for seed in range(1, 4)]
    with engine(context) as llm:
        (alone,) = answers(llm, [prompt], hot(42))
        for place in range(4):
            for other in (hot(7), hot(None), greedy(12), hot(9, top_k=5)):
                prompts, params = list(others), [other] * 3
                prompts.insert(place, prompt)
                params.insert(place, hot(42))
                got = answers(llm, prompts, params)[place]
                expect(got == alone, f"seed 42 gives {got} in place {place} with {other}, alone {alone}")
        expect(answers(llm, [prompt] * 2, hot(42)) == [alone] * 2, "two requests with one seed differ")
        different = {tuple(answers(llm, [prompt], hot(seed))[0]) for seed in range(8)}
    expect(len(different) == 8, f"8 seeds give {len(different)} answers")


@pytest.mark.check(cases=(45,))
def test_case_45_nan_logits(context: Context) -> None:
    """NaN in one row of one step ends that request with an error; the other rows and the engine continue."""
    prompts = [prompt_of(20, seed) for seed in range(3)]
    with engine(context, cuda_graph_max_bs=0) as llm:
        wanted = [answers(llm, [prompt], greedy(8))[0] for prompt in prompts]
        llm.clear_cache()
        model, sick = llm.engine.stepper.model, prompts[1]
        forward = model.forward

        def poisoned(batch: Batch) -> torch.Tensor:
            logits: torch.Tensor = forward(batch)
            for row, req in enumerate(batch.reqs):
                if req.device_len == len(sick) + 3 and req.input_ids[: len(sick)].tolist() == sick:
                    logits[row, 100] = torch.nan
            return logits

        model.forward = poisoned
        try:
            got = llm.generate(prompts, greedy(8), progress=False)
        finally:
            model.forward = forward
        for index, answer in enumerate(got):
            hurt = index == 1
            expect(answer["finish_reason"] == ("error" if hurt else "length"), f"request {index}: {answer}")
            expect(answer["token_ids"] == (wanted[1][:3] if hurt else wanted[index]), f"request {index}: {answer}")
        expect("NaN" in str(got[1].get("error")), f"the error does not name NaN: {got[1]}")
        hits = llm.scheduler.stats.hit_tokens
        expect(answers(llm, [sick], greedy(8)) == [wanted[1]], "the engine answers wrongly afterwards")
        expect(llm.scheduler.stats.hit_tokens == hits, "pages of the poisoned request stayed in the prefix cache")


@pytest.mark.check(cases=(46, 65))
def test_case_46_batch_sizes(context: Context) -> None:
    """Requests that end one after the other: batch sizes cross every graph size, shrinking, and grow again."""
    count, largest = (6, 2) if context.tiny else (17, 16)
    prompts = [prompt_of(3 + seed % 7, seed) for seed in range(count)]
    params = [greedy(2 + index) for index in range(count)]
    with engine(context, max_running_req=count, cuda_graph_max_bs=largest, cache="naive", pool_tokens=2048) as llm:
        sizes: set[tuple[int, int]] = set()
        replay = llm.engine.graph_runner.replay

        def recorded(batch: Batch) -> Any:
            sizes.add((batch.size, batch.padded_size))
            return replay(batch)

        llm.engine.graph_runner.replay = recorded
        together = [answers(llm, prompts, params) for _ in range(2)]
        alone = [answers(llm, [prompt], own)[0] for prompt, own in zip(prompts, params, strict=True)]
        same = answers(llm, [prompts[0]] * count, params[0])
    expect(together == [alone] * 2, f"together {together[0]}, alone {alone}")
    expect(same == [alone[0]] * count, "one prompt many times gives several answers")
    padded = sorted(size for size, fit in sizes if fit > size)
    expect(context.tiny or bool(padded), f"no batch was padded: {sorted(sizes)}")
    context.note(replayed=len(sizes), padded=len(padded))


@pytest.mark.check(cases=(67,))
def test_case_67_unused_rows(context: Context) -> None:
    """Token ids that no vocabulary has, in every row that no request has used yet."""
    prompts = [prompt_of(9, seed) for seed in range(3)]
    with engine(context) as llm:
        llm.engine.state.last_token.fill_(2**31 - 1)
        got = answers(llm, prompts, greedy(8))
    with engine(context, cuda_graph_max_bs=0) as llm:
        wanted = answers(llm, prompts, greedy(8))
    expect(got == wanted, f"{got}, expected {wanted}")


@pytest.mark.check(seconds=25.0, session="", cases=(69,))
def test_case_69_the_end(context: Context) -> None:
    """A program ends by itself, soon, with code 0: without graphs after a shutdown, with graphs without one."""
    for graphs in ("0", "2"):
        process = subprocess.Popen(
            [sys.executable, "-c", ENDS, str(ensure_checkpoint(MODEL)), context.kind, graphs],
            env=child_env(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        try:
            assert process.stdout is not None
            line, began = process.stdout.readline(), time.monotonic()
            code = process.wait(timeout=10)
            context.note(**{f"seconds_graphs_{graphs}": time.monotonic() - began})
            errors = process.communicate()[1].strip().splitlines()[-4:]
            expect(line == "done\n" and code == 0, "\n".join([f"graphs {graphs}: exit code {code}", *errors]))
        finally:
            process.kill()
            process.wait()


def without_compilers(kind: str) -> dict[str, str]:
    """A PATH without a CUDA compiler; on a CPU, which needs none, without a C++ compiler."""
    absent = COMPILERS[:1] if kind == "cuda" else COMPILERS
    folders = os.environ.get("PATH", "").split(os.pathsep)
    return {"PATH": os.pathsep.join(f for f in folders if not any(os.path.exists(os.path.join(f, n)) for n in absent))}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "path" in metafunc.fixturenames:
        path = without_compilers(context_of(metafunc.config).kind)
        metafunc.parametrize("path", [pytest.param(path, id="", marks=pytest.mark.check(env=path))])


@pytest.mark.check(seconds=30.0, session="", cases=(90,))
def test_case_90_no_compiler(path: dict[str, str], context: Context) -> None:
    """What must be compiled is replaced by what need not, the plan says so, and the engine answers the same."""
    explained = minisgl("explain", "--geometry", "qwen3-0.6b", "--device", context.kind, "--no-calibrated")
    expect(explained["plan"] is not None, f"no plan: {explained['error']}")
    buckets = explained["plan"]["buckets"]
    variants = {bucket["choice"]["variant"] for bucket in buckets if bucket["role"] in ("kv", "ops")}
    expect("cpp" not in variants, f"the plan has variants {sorted(variants)} although there is no compiler")
    if context.kind == "cuda":
        expect(entries(explained["plan"])["kv"] <= GPU_PLAN["kv"], "the plan has no Triton variant of kv:cuda")
    why = [
        f"{reason['wanted']} {reason['supported']}"
        for entry in explained["entries"]
        if entry["entry"] == "kv"
        for candidate in entry["candidates"]
        for reason in candidate["reasons"]
    ]
    named = "nvcc" if context.kind == "cuda" else "g++"
    expect(any(named in text for text in why), f"no reason names {named}: {why}")
    expected = reference(MODEL)
    with engine(context) as llm:
        got = answers(llm, expected.prompts, greedy(len(expected.continuations[0])))
        kv = llm.plan.choice("kv").label
    expect(got == expected.continuations, f"with {kv}: {got}, expected {expected.continuations}")
    context.note(kv=kv)
