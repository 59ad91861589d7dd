"""Token slots taken back from one running request and given to another, with replays of a real engine checked."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minisgl_core.bench.model_folder import write_geometry
from minisgl_core.modelconfig.geometries import geometry
from support.driver import Driver, greedy


@pytest.mark.parametrize("page_size", [1, 4])
def test_slots_that_change_hands_while_both_run(page_size: int, tmp_path: Path) -> None:
    """Strict replays poison what a request may not read: here also the slots that it had, and still names."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 500, 8).tolist() for _ in range(2)]
    settings: dict[str, Any] = {
        "page_size": page_size,
        "num_page_override": 100 // page_size,
        "cuda_graph_max_bs": 2,
        "dummy_weights": True,
        "backends": {"graph": "emulated"},
        "backend_options": {"graph:emulated": {"strict": True}},
    }
    with Driver(write_geometry(geometry("tiny"), tmp_path), **settings) as driver:
        alone = [driver.tokens([prompt], greedy(40))[0] for prompt in prompts]
        driver.scheduler.clear_cache()
        reclaimed = _watch(driver)
        first = driver.submit(prompts[0], greedy(80))
        for _ in range(4):
            driver.step()
        second = driver.submit(prompts[1], greedy(40))
        while len(driver.answers[first].tokens) < 40:
            driver.step()
        driver.abort(first)
        driver.drain()
        assert any(reclaimed)
        assert driver.scheduler.stats.preemptions == 0
        assert driver.answers[first].tokens[:40] == alone[0]
        assert driver.answers[second].tokens == alone[1]
        assert {rows for rows, _ in driver.replays} == {1, 2}


def _watch(driver: Driver) -> list[bool]:
    """Whether each attempt to take slots back brought any."""
    resources, found = driver.scheduler._resources, list[bool]()
    reclaim: Callable[[np.ndarray], bool] = resources.reclaim

    def watched(rows: np.ndarray) -> bool:
        found.append(reclaim(rows))
        return found[-1]

    resources.reclaim = watched  # type: ignore[method-assign]
    return found
