"""``min_tokens`` in a whole engine: what would end an answer has probability 0 until then."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from support.driver import Driver, greedy
from support.edited_checkpoints import edited

MODEL = "mistral-full"
PROMPTS = [torch.randint(3, 500, (12,), generator=torch.Generator().manual_seed(seed)).tolist() for seed in range(3)]
LONGEST, LEAST, MARGIN = 24, 14, 1e-3


def continued(model: Any, prompt: Sequence[int], steps: int, banned: Sequence[int], least: int) -> list[int]:
    """transformers' likeliest tokens, none of the ``banned`` among the first ``least``, until one of them comes."""
    ids = list(prompt)
    with torch.inference_mode():
        for step in range(steps):
            logits = model(torch.tensor([ids]), use_cache=False).logits[0, -1]
            if step < least:
                logits[list(banned)] = -torch.inf
            best = logits.topk(2)
            assert float(best.values[0] - best.values[1]) > MARGIN, "draw another prompt: this margin proves nothing"
            ids.append(int(best.indices[0]))
            if ids[-1] in banned:
                break
    return ids[len(prompt) :]


@pytest.fixture(scope="module")
def model(checkpoints: ModuleType) -> Any:
    return checkpoints.load_model(checkpoints.ensure_checkpoint(MODEL))


@pytest.fixture(scope="module")
def endings(model: Any) -> list[int]:
    """Ids that would end each answer early."""
    return sorted({continued(model, prompt, LONGEST, [], 0)[2] for prompt in PROMPTS})


@pytest.fixture(scope="module")
def folder(tiny: Callable[[str], Path], endings: list[int], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One of the endings is the user's, the others are the model's own."""
    path = tmp_path_factory.mktemp("min") / "model"
    return edited(tiny(MODEL), path, config={"eos_token_id": endings[1:]}, generation={"eos_token_id": endings[1:]})


@pytest.mark.parametrize("graph", [0, 4])
@pytest.mark.parametrize(("tp", "pages"), [(1, 400), (1, 56), (2, 56)])
def test_case_132_answers_equal_transformers_with_the_endings_masked(
    tp: int, pages: int, graph: int, overlap: bool, folder: Path, model: Any, endings: list[int]
) -> None:
    """Two of three are admitted to 56 pages of one token, and do not fit to the end: one is preempted."""
    expected = [continued(model, prompt, LONGEST, endings, LEAST) for prompt in PROMPTS]
    early = [continued(model, prompt, LONGEST, endings, 0) for prompt in PROMPTS]
    assert all(len(tokens) <= 3 for tokens in early)
    assert all(len(tokens) >= LEAST for tokens in expected)
    own: dict[str, Any] = {"ignore_eos": False, "stop_token_ids": endings[:1]}
    params = greedy(LONGEST, min_tokens=LEAST, **own)
    settings = {"page_size": 1, "num_page_override": pages, "cuda_graph_max_bs": graph, "max_prefill_tokens": 7}
    with Driver(folder, tp=tp, overlap=overlap, **settings) as driver:
        served = driver.tokens([*PROMPTS, PROMPTS[0]], [params] * 3 + [greedy(LONGEST, **own)])
        assert served == [*expected, early[0]]
        assert bool(driver.scheduler.stats.preemptions) == (pages < 400)
        assert bool(driver.replays) == bool(graph)


def test_rows_that_have_their_tokens_are_sampled_in_the_step_again(folder: Path, endings: list[int]) -> None:
    with Driver(folder, overlap=False, page_size=1, num_page_override=400, cuda_graph_max_bs=4) as driver:
        driver.submit(PROMPTS[0], greedy(20, min_tokens=5, stop_token_ids=endings))
        changed = []
        while driver.runner.has_work:
            driver.step()
            changed.append(driver.engine.sampler.needs_postprocessing)
        # The prompt's pass, four more, and the one that finds that no ban is left.
        assert changed == [True] * 5 + [False] * 15


def test_a_ban_is_not_kept_by_the_next_request_of_the_row(folder: Path, model: Any, endings: list[int]) -> None:
    params = greedy(LONGEST, min_tokens=LEAST, stop_token_ids=endings)
    with Driver(folder, page_size=1, num_page_override=400, max_running_req=1) as driver:
        expected = [continued(model, prompt, LONGEST, endings, LEAST) for prompt in PROMPTS]
        assert driver.tokens(PROMPTS, params) == expected  # one after the other, on one row, with one params object
        free = driver.tokens(PROMPTS, greedy(LONGEST, stop_token_ids=endings))
        assert free == [continued(model, prompt, LONGEST, endings, 0) for prompt in PROMPTS]
