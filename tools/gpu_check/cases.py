"""Reported faults that need a whole engine on the device; the numbers are those of tests/cases/README.md."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from random import Random
from typing import Any, Final

import torch

from minisgl_core.core import Batch, SamplingParams
from minisgl_core.llm import LLM
from minisgl_core.registry import DeviceFacts

from .checks import Check, Here, expect
from .machine import GPU_PLAN, entries, minisgl
from .serving import answers, greedy, serve

__all__ = ["checks"]

MODEL: Final = "q3"
HOT: Final = 6.0
"""The tiny models are sure of themselves: at this temperature their answers vary."""
COMPILERS: Final = ("nvcc", "g++", "c++", "clang++")
_ENDS = """
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


def checks(device: DeviceFacts) -> list[Check]:
    """One check per fault, most of them in one process."""
    shared = partial(Check, seconds=6.0, session="cases")
    return [
        shared("case/24-cache-hits", cache_hits, cases=(24,)),
        shared("case/27-chunks", chunks, cases=(27,)),
        shared("case/38-tiny-temperatures", tiny_temperatures, cases=(38,)),
        shared("case/42-extreme-filters", extreme_filters, cases=(42,)),
        shared("case/43-seeds", seeds, cases=(43,)),
        shared("case/45-nan-logits", nan_logits, cases=(45,)),
        shared("case/46-crowd", alone_and_in_a_crowd, cases=(46, 65)),
        shared("case/67-unused-rows", garbage_in_unused_rows, cases=(67,)),
        Check("case/69-the-end", comes_to_an_end, 25.0, cases=(69,)),
        Check("case/90-no-compiler", without_compiler, 30.0, env=_without_compilers(device), cases=(90,)),
    ]


def _prompt(length: int, seed: int = 0) -> list[int]:
    draw = Random(1000 + seed)
    return [draw.randrange(3, 500) for _ in range(length)]


@contextmanager
def _engine(here: Here, **settings: Any) -> Iterator[LLM]:
    from .models import tiny_checkpoint

    small = {"max_running_req": 4, "max_seq_len_override": 192, "pool_tokens": 1024}
    with serve(here, tiny_checkpoint(MODEL), **{**small, **settings}) as llm:
        yield llm


def cache_hits(here: Here) -> dict[str, Any]:
    """One long prompt four times, with the prefix cache and without: one answer."""
    length = 200 if here.tiny else 1464
    prompt, found = _prompt(length), []
    for cache in ("radix", "naive"):
        with _engine(here, cache=cache, max_seq_len_override=length + 32, pool_tokens=2 * length + 64) as llm:
            found += [answers(llm, [prompt], greedy(8))[0] for _ in range(4)]
            hits = llm.scheduler.stats.hit_tokens
            wanted = 3 * ((length - 1) // 16 * 16) if cache == "radix" else 0
            expect(hits == wanted, f"cache={cache}: {hits} tokens came from the cache, expected {wanted}")
    expect(found.count(found[0]) == len(found), f"the answers differ: {found}")
    return {"prompt": length}


def chunks(here: Here) -> dict[str, Any]:
    """A prompt of 40 in chunks of 16 beside another one: no token more, none other."""
    prompts, params = [_prompt(40), _prompt(7, 1)], [greedy(7), greedy(1)]
    with _engine(here, max_prefill_tokens=16) as llm:
        cut = answers(llm, prompts, params)
    with _engine(here, cache="naive") as llm:
        whole = [answers(llm, [prompt], own)[0] for prompt, own in zip(prompts, params, strict=True)]
    expect(cut == whole, f"in chunks {cut}, whole {whole}")
    expect([len(tokens) for tokens in cut] == [7, 1], f"{[len(t) for t in cut]} tokens came, 7 and 1 were asked for")
    return {}


def tiny_temperatures(here: Here) -> dict[str, Any]:
    """Temperatures that leave nothing but the maximum."""
    prompts = [_prompt(9, seed) for seed in range(3)]
    with _engine(here) as llm:
        wanted = answers(llm, prompts, greedy(6))
        for temperature in (1e-5, 1e-8, 1e-38):
            params = SamplingParams(temperature=temperature, max_tokens=6, ignore_eos=True)
            got = answers(llm, prompts, params)
            expect(got == wanted, f"temperature {temperature}: {got}, greedy {wanted}")
    return {}


def extreme_filters(here: Here) -> dict[str, Any]:
    """Filters that leave one token, and filters that leave all."""
    prompt = _prompt(9)
    hot: dict[str, Any] = {"temperature": HOT, "max_tokens": 6, "ignore_eos": True, "seed": 3}
    with _engine(here) as llm:
        (likeliest,) = answers(llm, [prompt], greedy(6))
        (free,) = answers(llm, [prompt], SamplingParams(**hot))
        expect(free != likeliest, "the temperature does not matter to this model")
        one: tuple[dict[str, Any], ...] = ({"top_p": 0.0}, {"top_p": 1e-9}, {"top_k": 1}, {"min_p": 1.0})
        everything: tuple[dict[str, Any], ...] = ({"top_k": 2**30}, {"top_k": 512}, {"top_p": 1.0})
        for filters, wanted in [*((f, likeliest) for f in one), *((f, free) for f in everything)]:
            (got,) = answers(llm, [prompt], SamplingParams(**hot, **filters))
            expect(got == wanted, f"{filters}: {got}, expected {wanted}")
    return {}


def seeds(here: Here) -> dict[str, Any]:
    """A seed gives one answer in any place and company; different seeds differ."""

    def hot(seed: int | None, **more: Any) -> SamplingParams:
        return SamplingParams(temperature=HOT, max_tokens=12, ignore_eos=True, seed=seed, **more)

    prompt, others = _prompt(9), [_prompt(12, seed) for seed in range(1, 4)]
    with _engine(here) as llm:
        (alone,) = answers(llm, [prompt], hot(42))
        for place in range(4):
            for neighbours in (hot(7), hot(None), greedy(12), hot(9, top_k=5)):
                prompts, params = list(others), [neighbours] * 3
                prompts.insert(place, prompt)
                params.insert(place, hot(42))
                got = answers(llm, prompts, params)[place]
                expect(got == alone, f"seed 42 gives {got} in place {place} beside {neighbours}, alone {alone}")
        expect(answers(llm, [prompt] * 2, hot(42)) == [alone] * 2, "two requests with one seed differ")
        different = {tuple(answers(llm, [prompt], hot(seed))[0]) for seed in range(8)}
    expect(len(different) == 8, f"8 seeds give {len(different)} answers")
    return {}


def nan_logits(here: Here) -> dict[str, Any]:
    """NaN in one row of one step ends that request with an error; its neighbours and the engine go on."""
    prompts = [_prompt(20, seed) for seed in range(3)]
    with _engine(here, cuda_graph_max_bs=0) as llm:
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
    return {}


def alone_and_in_a_crowd(here: Here) -> dict[str, Any]:
    """Requests that end one after the other: batch sizes cross every graph size, shrinking, and grow again."""
    count, largest = (6, 2) if here.tiny else (17, 16)
    prompts = [_prompt(3 + seed % 7, seed) for seed in range(count)]
    params = [greedy(2 + index) for index in range(count)]
    with _engine(here, max_running_req=count, cuda_graph_max_bs=largest, cache="naive", pool_tokens=2048) as llm:
        sizes: set[tuple[int, int]] = set()
        replay = llm.engine.graph_runner.replay

        def watched(batch: Batch) -> Any:
            sizes.add((batch.size, batch.padded_size))
            return replay(batch)

        llm.engine.graph_runner.replay = watched
        crowds = [answers(llm, prompts, params) for _ in range(2)]
        alone = [answers(llm, [prompt], own)[0] for prompt, own in zip(prompts, params, strict=True)]
        same = answers(llm, [prompts[0]] * count, params[0])
    expect(crowds == [alone] * 2, f"in a crowd {crowds[0]}, alone {alone}")
    expect(same == [alone[0]] * count, "one prompt many times gives several answers")
    padded = sorted(size for size, fit in sizes if fit > size)
    expect(here.tiny or bool(padded), f"no batch was padded: {sorted(sizes)}")
    return {"replayed": len(sizes), "padded": len(padded)}


def garbage_in_unused_rows(here: Here) -> dict[str, Any]:
    """Token ids that no vocabulary has, in every row that no request has used yet."""
    prompts = [_prompt(9, seed) for seed in range(3)]
    with _engine(here) as llm:
        llm.engine.state.last_token.fill_(2**31 - 1)
        got = answers(llm, prompts, greedy(8))
    with _engine(here, cuda_graph_max_bs=0) as llm:
        wanted = answers(llm, prompts, greedy(8))
    expect(got == wanted, f"{got}, expected {wanted}")
    return {}


def comes_to_an_end(here: Here) -> dict[str, Any]:
    """A program ends by itself, soon, with code 0: without graphs after a shutdown, with graphs without one."""
    from .models import tiny_checkpoint

    figures = {}
    for graphs in ("0", "2"):
        arguments = [str(tiny_checkpoint(MODEL)), here.kind, graphs]
        program = f"import sys; sys.path[:] = {sys.path!r}\n{_ENDS}"
        process = subprocess.Popen(
            [sys.executable, "-c", program, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        try:
            assert process.stdout is not None
            line, began = process.stdout.readline(), time.monotonic()
            code = process.wait(timeout=10)
            figures[f"seconds_graphs_{graphs}"] = time.monotonic() - began
            told = process.communicate()[1].strip().splitlines()[-4:]
            expect(line == "done\n" and code == 0, "\n".join([f"graphs {graphs}: exit code {code}", *told]))
        finally:
            process.kill()
            process.wait()
    return figures


def _without_compilers(device: DeviceFacts) -> dict[str, str]:
    """A PATH that leads to no CUDA compiler; on a CPU, where that is nothing to miss, to no C++ compiler."""
    absent = COMPILERS[:1] if device.kind == "cuda" else COMPILERS
    folders = os.environ.get("PATH", "").split(os.pathsep)
    return {"PATH": os.pathsep.join(f for f in folders if not any(os.path.exists(os.path.join(f, n)) for n in absent))}


def without_compiler(here: Here) -> dict[str, Any]:
    """What must be compiled is replaced by what need not, which the plan says, and the engine answers the same."""
    told = minisgl("explain", "--geometry", "qwen3-0.6b", "--device", here.kind, "--no-calibrated")
    expect(told["plan"] is not None, f"no plan: {told['error']}")
    chosen = {bucket["choice"]["variant"] for bucket in told["plan"]["buckets"] if bucket["role"] in ("kv", "ops")}
    expect("cpp" not in chosen, f"the plan has variants {sorted(chosen)} although there is no compiler")
    if here.kind == "cuda":
        expect(entries(told["plan"])["kv"] <= GPU_PLAN["kv"], "the plan has no Triton variant of kv:cuda")
    why = [
        f"{reason['wanted']} {reason['supported']}"
        for entry in told["entries"]
        if entry["entry"] == "kv"
        for candidate in entry["candidates"]
        for reason in candidate["reasons"]
    ]
    named = "nvcc" if here.kind == "cuda" else "g++"
    expect(any(named in text for text in why), f"no reason names {named}: {why}")
    from .models import tests_checkpoints

    reference = tests_checkpoints().reference(MODEL)
    with _engine(here) as llm:
        got = answers(llm, reference.prompts, greedy(len(reference.continuations[0])))
        kv = llm.plan.choice("kv").label
    expect(got == reference.continuations, f"with {kv}: {got}, expected {reference.continuations}")
    return {"kv": kv}
