"""``prompt_logprobs``: the log-probability of every prompt token, against transformers' log-softmax in float32."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from minisgl_core.core import SamplingParams
from minisgl_core.scheduler import Abort, ClearCache, PromptOut, TokenOut
from support.driver import Answer, Driver, greedy

TOLERANCE = 2e-4


def prompt_of(length: int, seed: int) -> list[int]:
    ids: list[int] = torch.randint(3, 500, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
    return ids


@pytest.fixture(scope="session")
def log_softmax(checkpoints: ModuleType) -> Callable[[str, list[int]], torch.Tensor]:
    """``log_softmax(model, prompt)`` (T, V) float32: transformers' log-probabilities after each of its tokens."""
    models: dict[str, Any] = {}

    def compute(name: str, prompt: list[int]) -> torch.Tensor:
        if name not in models:
            models[name] = checkpoints.load_model(checkpoints.ensure_checkpoint(name))
        with torch.inference_mode():
            logits: torch.Tensor = models[name](torch.tensor([prompt]), use_cache=False).logits[0]
        return logits.log_softmax(-1)

    return compute


def collect(driver: Driver) -> dict[int, PromptOut]:
    """Step until nothing is left to do; every request's PromptOut, which must come once and before its first token."""
    found: dict[int, PromptOut] = {}
    while driver.runner.has_work:
        outs = driver.runner.step()
        for part in outs.parts:
            if isinstance(part, PromptOut):
                assert part.uid not in found, "said twice"
                assert not driver.answers[part.uid].tokens, "said after the first token"
                found[part.uid] = part
            else:
                for out in [part] if isinstance(part, TokenOut) else map(TokenOut, part.uids, part.tokens):
                    driver.answers[out.uid].add(out)
    driver.drain()
    return found


def check(found: PromptOut, prompt: list[int], reference: torch.Tensor, wanted: int) -> None:
    assert found.logprobs is not None
    assert [entry.token for entry in found.logprobs] == prompt[1:]
    chosen = reference[:-1].gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
    torch.testing.assert_close(
        torch.tensor([entry.logprob for entry in found.logprobs]), chosen, atol=TOLERANCE, rtol=0
    )
    for entry, row in zip(found.logprobs, reference, strict=False):
        ids, values = [token for token, _ in entry.top], torch.tensor([value for _, value in entry.top])
        torch.testing.assert_close(values, row.topk(wanted).values, atol=TOLERANCE, rtol=0)
        torch.testing.assert_close(values, row[ids], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize(
    ("name", "tp", "page_size", "chunk", "graph"),
    [
        ("mistral-full", 1, 1, 8192, 0),
        ("mistral-full", 1, 16, 7, 4),
        ("mistral-full", 1, 1, 1, 0),
        ("mistral-full", 2, 16, 16, 4),
        ("q3", 1, 64, 23, 4),
        ("moe", 2, 1, 40, 0),
    ],
)
def test_case_132_prompt_scores_equal_transformers(
    name: str,
    tp: int,
    page_size: int,
    chunk: int,
    graph: int,
    overlap: bool,
    tiny: Callable[[str], Path],
    log_softmax: Callable[[str, list[int]], torch.Tensor],
) -> None:
    """Scored prompts, and others, share batches; the second round finds all prompts in the prefix cache."""
    prompts = [prompt_of(length, length) for length in (37, 1, 64, 12, 2)]
    params: list[SamplingParams] = [greedy(4, prompt_logprobs=n) for n in (3, 0, 20)] + [greedy(6), greedy(3)]
    params[1] = SamplingParams(max_tokens=0, prompt_logprobs=0)
    settings = {"page_size": page_size, "num_page_override": 512 // page_size, "max_prefill_tokens": chunk}
    with Driver(tiny(name), tp=tp, overlap=overlap, cuda_graph_max_bs=graph, **settings) as driver:
        plain = driver.tokens(prompts, [greedy(own.max_tokens or 1) for own in params])
        plain[1] = []
        driver.runner.post(ClearCache())
        for _ in range(2):
            uids = [driver.submit(prompt, own) for prompt, own in zip(prompts, params, strict=True)]
            found = collect(driver)
            assert [driver.answers[uid].tokens for uid in uids] == plain
            assert all(driver.answers[uid].finish_reason == "length" for uid in uids)
            for uid, prompt, own in zip(uids, prompts, params, strict=True):
                if own.prompt_logprobs is None:
                    assert found[uid].logprobs is None
                else:
                    assert found[uid].cached_tokens == 0
                    check(found[uid], prompt, log_softmax(name, prompt), own.prompt_logprobs)
        assert bool(driver.replays) == bool(graph)


def test_case_132_scores_are_said_once_whatever_is_preempted(
    overlap: bool, small: Path, log_softmax: Callable[[str, list[int]], torch.Tensor]
) -> None:
    """Prompts that go on growing in a pool that cannot hold all of them."""
    prompts = [prompt_of(12, seed) for seed in range(4)]
    with Driver(small, overlap=overlap, page_size=1, num_page_override=60, max_prefill_tokens=7) as driver:
        expected = [driver.tokens([prompt], greedy(30))[0] for prompt in prompts]
        driver.runner.post(ClearCache())
        uids = [driver.submit(prompt, greedy(30, prompt_logprobs=2)) for prompt in prompts]
        found = collect(driver)
        assert driver.scheduler.stats.preemptions
        for uid, prompt, tokens in zip(uids, prompts, expected, strict=True):
            assert driver.answers[uid].tokens == tokens
            check(found[uid], prompt, log_softmax("mistral-full", prompt), 2)


def test_case_132_a_prompt_as_long_as_the_context_is_scored(
    small: Path, log_softmax: Callable[[str, list[int]], torch.Tensor]
) -> None:
    """Where nothing is generated the prompt may fill context and pool; one token more is refused with both."""
    prompt, only = prompt_of(48, 0), SamplingParams(max_tokens=0, prompt_logprobs=1)
    with Driver(small, page_size=16, num_page_override=3, max_seq_len_override=48) as driver:
        for _ in range(2):
            uid = driver.submit(prompt, only)
            check(collect(driver)[uid], prompt, log_softmax("mistral-full", prompt), 1)
            assert driver.answers[uid] == Answer([], "length", None)
        for ids, params in (([*prompt, 3], only), (prompt, greedy(1))):
            (answer,) = driver.serve([ids], params)
            assert answer.finish_reason == "error"
            assert answer.error is not None and "48" in answer.error


def test_case_132_scored_prompts_are_published(small: Path) -> None:
    prompt = prompt_of(40, 0)
    with Driver(small, page_size=4, num_page_override=64, max_prefill_tokens=16) as driver:
        driver.serve([prompt], SamplingParams(max_tokens=0, prompt_logprobs=1))
        uid = driver.submit(prompt, greedy(2))
        assert collect(driver)[uid].cached_tokens == 36
        uid = driver.submit(prompt_of(30, 1), greedy(3, n=3, prompt_logprobs=1))
        for other in (uid + 1, uid + 2):
            driver.answers[other] = Answer()
        found = collect(driver)
        assert [len(found[uid].logprobs or ()), *(found.get(uid + i) for i in (1, 2))] == [29, None, None]
        assert driver.scheduler.stats.hit_tokens == 36 + 2 * 28


def test_case_132_an_abort_while_a_prompt_is_scored(overlap: bool, small: Path) -> None:
    with Driver(small, overlap=overlap, page_size=1, num_page_override=256, max_prefill_tokens=8) as driver:
        uid = driver.submit(prompt_of(40, 0), greedy(4, prompt_logprobs=1))
        for _ in range(3):
            driver.step()
        driver.runner.post(Abort(uid))
        assert collect(driver) == {}
        assert driver.answers[uid] == Answer([], "abort", None)
