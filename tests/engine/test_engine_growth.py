"""What a whole LLM keeps depends on the requests alive, not on those served."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from minisgl_core.bench.model_folder import write_geometry
from minisgl_core.core import SamplingParams
from minisgl_core.llm import LLM
from minisgl_core.modelconfig.geometries import geometry
from support.holdings import holdings

ROWS, WAVE, WAVES = 4, 20, 12


def params_of(uid: int) -> SamplingParams:
    """Each with sampling parameters of its own."""
    kinds: list[Callable[[], SamplingParams]] = [
        lambda: SamplingParams(max_tokens=3, stop_token_ids=[uid % 500], ignore_eos=True),
        lambda: SamplingParams(max_tokens=2, temperature=1.0, seed=uid, top_k=1 + uid % 9),
        lambda: SamplingParams(max_tokens=3, repetition_penalty=1.0 + uid / 999, logit_bias={uid % 500: 1.0}),
        lambda: SamplingParams(max_tokens=2, logprobs=uid % 5, presence_penalty=1.0),
    ]
    return kinds[uid % len(kinds)]()


@pytest.mark.parametrize("cuda_graph_max_bs", [0, ROWS])
def test_nothing_grows_with_the_requests_served(tmp_path: Path, cuda_graph_max_bs: int) -> None:
    model = write_geometry(geometry("tiny"), tmp_path)
    with LLM(
        model,
        device="cpu",
        dummy_weights=True,
        max_running_req=ROWS,
        num_page_override=256,
        max_seq_len_override=64,
        cuda_graph_max_bs=cuda_graph_max_bs,
        progress=False,
    ) as llm:
        sizes: list[dict[str, int]] = []
        for number in range(WAVES):
            uids = range(number * WAVE, (number + 1) * WAVE)
            prompts = [[uid % 400, uid % 7, *[uid % 50] * (uid % 20)] for uid in uids]
            llm.generate(prompts, [params_of(uid) for uid in uids], progress=False)
            for _ in llm.stream([1, 2, 3, uids[0] % 500], SamplingParams(max_tokens=20)):
                break  # aborted
            llm.generate([[5, 6]] * ROWS, SamplingParams(max_tokens=2), progress=False)  # each row's last
            llm.clear_cache()
            sizes.append(holdings(llm))
    first, last = sizes[1], sizes[-1]
    assert len(first) > 60, "its engine and its scheduler were looked into"
    assert {path: (first.get(path, 0), count) for path, count in last.items() if count > first.get(path, 0)} == {}
