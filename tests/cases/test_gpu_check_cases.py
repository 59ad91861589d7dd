"""Reported faults of the GPU check, on the CPU's stand-ins."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

from minisgl_core.registry import DeviceFacts
from support.gpu import serving, stress
from support.gpu.check import Check, Context, Failed
from support.gpu.collect import collected
from support.gpu.near_tie import Fault, NearTieJudge, compare_to_the_end
from support.make_checkpoints import ensure_checkpoint

ROOT = Path(__file__).parents[2]
H200 = DeviceFacts("cuda", sm=90, name="NVIDIA H200", driver="580.1")
EXPECTED = [[1, 2, 3, 4, 5], [6, 7], [8]]
ROUNDED = {(0, 1), (0, 3), (1, 1)}
"""(answer, position) where the backend's 90 is a near-tie"""


def backend(planted: Mapping[tuple[int, int], list[int]] | None = None) -> Callable[..., list[list[int]]]:
    """Goes astray at its near-ties, as a model does that is fed its own tokens, and ends as ``planted`` says."""

    def answer(fed: Mapping[int, int]) -> list[list[int]]:
        got = []
        for index, start in fed.items():
            tokens: list[int] = []
            for position in range(start, len(EXPECTED[index])):
                if (index, position) in (planted or {}):
                    tokens += (planted or {})[index, position]
                    break
                if (index, position) in ROUNDED:
                    tokens += [90] * (len(EXPECTED[index]) - position)
                    break
                tokens.append(EXPECTED[index][position])
            got.append(tokens)
        return got

    return answer


def near_tie(index: int, position: int, token: int) -> bool:
    return token == 90 and (index, position) in ROUNDED


def test_case_138_every_position_of_a_right_backend_is_compared_past_near_ties() -> None:
    found = compare_to_the_end(EXPECTED, backend(), near_tie)
    assert found.figures == {"answers": 3, "compared": 5, "near_ties": 3, "followed": 3} and not found.faults


@pytest.mark.parametrize(
    ("planted", "fault", "followed"),
    [
        ({(0, 2): [91, 4, 5]}, Fault(0, 2, 91, 3), 2),  # right behind the first near-tie
        ({(0, 4): [90]}, Fault(0, 4, 90, 5), 2),  # behind the second
        ({(0, 4): []}, Fault(0, 4, None, 5), 2),  # too short
        ({(0, 4): [5, 5]}, Fault(0, 5, 5, None), 2),  # too long
        ({(1, 1): []}, Fault(1, 1, None, 7), 2),  # ends where there is a near-tie
        ({(2, 0): [90]}, Fault(2, 0, 90, 8), 2),  # never met a near-tie
    ],
)
def test_case_138_a_wrong_token_after_a_near_tie_is_found(
    planted: dict[tuple[int, int], list[int]], fault: Fault, followed: int
) -> None:
    found = compare_to_the_end(EXPECTED, backend(planted), near_tie)
    assert found.faults == [fault] and found.followed == followed


@pytest.fixture
def context(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Context:
    monkeypatch.setattr(serving, "GRAPHS", {"cpu": 0, "cuda": 0})
    return Context(DeviceFacts("cpu"), True, tmp_path / "scratch")


def test_case_138_the_stress_test_goes_on_behind_a_near_tie(context: Context) -> None:
    """A real engine whose closest decision of one answer is turned round, and which then may go wrong."""
    requests = stress.workload(context)
    alone = stress.solo_answers(context, requests, "all")
    folder = ensure_checkpoint(stress.MODEL)
    index = max((i for i, request in enumerate(requests) if request.params.is_greedy), key=lambda i: len(alone[i]))
    with NearTieJudge(context, folder) as judge:
        rows = [judge.logits([*requests[index].prompt, *alone[index][:step]]) for step in range(len(alone[index]) - 1)]
    gaps = [float((row.topk(2).values[0] - row.topk(2).values[1]) / (row.max() - row.min())) for row in rows]
    step = min(range(len(gaps)), key=gaps.__getitem__)
    second, tolerance = int(rows[step].topk(2).indices[1]), 0.51 * gaps[step]

    with serving.serve(context, folder, max_running_req=8) as llm:

        def rounding(some: Sequence[stress.Request], wrong: bool = False) -> list[list[int]]:
            got = serving.answers(llm, [request.prompt for request in some], [request.params for request in some])
            if len(some) == len(requests):
                got[index][step:] = [second] * (len(got[index]) - step)
            elif wrong:
                got[0][-1] = int(judged.argmin())
            return got

        found = stress.compare(context, folder, requests, alone, tolerance, rounding)
        assert found.near_ties == 1 and found.followed == len(requests)
        assert found.compared == sum(map(len, alone)) - 1
        with NearTieJudge(context, folder) as judge:
            judged = judge.logits([*requests[index].prompt, *alone[index][:-1]])
        where = rf"request {index} .* token {len(alone[index]) - 1} is {int(judged.argmin())} instead of"
        with pytest.raises(Failed, match=rf"(?s)1 of 12 requests are answered wrongly.*{where}"):
            stress.compare(context, folder, requests, alone, tolerance, lambda some: rounding(some, wrong=True))

        # the rest of an answer, seeded ones too, is what a request for the rest is answered
        rest = [request.after(tokens[:1]) for request, tokens in zip(requests, alone, strict=True) if len(tokens) > 1]
        assert any(not request.params.is_greedy for request in rest)
        tails = [tokens[1:] for tokens in alone if len(tokens) > 1]
        assert serving.answers(llm, [request.prompt for request in rest], [request.params for request in rest]) == tails


def listed(quick: bool) -> list[Check]:
    return collected(Context(H200, quick, Path(), elsewhere=True))


@pytest.mark.parametrize("quick", [True, False])
def test_case_138_fused_products_at_real_widths_are_in_every_run_on_a_gpu(quick: bool) -> None:
    assert "few-rows/fa+cuda_decode" in {check.name for check in listed(quick)}


def test_case_138_the_page_names_what_the_stored_report_lacks() -> None:
    stored = json.loads((ROOT / "benchmarks" / "results" / "gpu_check_h200.json").read_text())
    missing = {check.name for check in listed(False)} - {check["name"] for check in stored["checks"]}
    page = (ROOT / "docs" / "gpu-check.md").read_text()
    assert [name for name in sorted(missing) if f"`{name}`" not in page] == []
