from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import ModuleType

import pytest
import torch

LONG_PROMPT = 140
LONG_STEPS = 6


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def long_answer(checkpoints: ModuleType) -> Callable[[str], tuple[list[int], list[int]]]:
    """``long_answer("q3")`` -> a prompt of more than two pages of 64, and transformers' continuation as far as its
    margins make it certain.
    """

    @cache
    def answer_of(name: str) -> tuple[list[int], list[int]]:
        model = checkpoints.load_model(checkpoints.ensure_checkpoint(name))
        draw = torch.Generator().manual_seed(5)
        prompt: list[int] = torch.randint(3, 500, (LONG_PROMPT,), generator=draw).tolist()
        ids = list(prompt)
        with torch.inference_mode():
            for _ in range(LONG_STEPS):
                best = model(torch.tensor([ids]), use_cache=False).logits[0, -1].topk(2)
                if float(best.values[0] - best.values[1]) < 0.01:
                    break
                ids.append(int(best.indices[0]))
        assert len(ids) > len(prompt), "the first margin is too small to prove anything: draw another prompt"
        return prompt, ids[len(prompt) :]

    return lambda name: answer_of(
        name.removesuffix("-gguf")
    )  # transformers gets the same weights from the other folder
