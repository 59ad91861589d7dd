"""The checks themselves, on the CPU's stand-ins: they pass on what is right and notice what is wrong."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gpu_check import cases, conformance, crowd, forced, geometry, hygiene, models, parity, serving
from gpu_check.checks import Failed, Here, Skipped
from gpu_check.ties import TieJudge, is_tie, pick
from minisgl_core.core import SamplingParams
from minisgl_core.llm import LLM
from minisgl_core.registry import Candidate, DeviceFacts, discover
from minisgl_core.testing import Outcome

TORCH = {"prefill": "torch", "decode": "torch"}


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recording an emulated graph takes seconds; other tests hold graphs to eager steps."""
    monkeypatch.setattr(serving, "GRAPHS", {"cpu": 0, "cuda": 0})


# Equal tokens.


def test_tokens_within_a_margin_of_the_references_best_are_near_ties() -> None:
    reference = SimpleNamespace(logits=[torch.tensor([[0.0, 5.0, 4.995, 4.98]])])
    assert [parity._near_tie(reference, 0, 0, token) for token in range(4)] == [False, True, True, False]


def test_a_family_answers_as_in_transformers(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    assert parity.same_tokens("mistral-full", here)["compared"] == 96
    real = serving.answers

    def wrong(llm: LLM, prompts: Any, params: Any) -> list[list[int]]:
        got = real(llm, prompts, params)
        got[1][3] ^= 1
        return got

    monkeypatch.setattr(serving, "answers", wrong)
    with pytest.raises(Failed, match="first answer to the prompt of 17 tokens: token 3 is "):
        parity.same_tokens("mistral-full", here)


# Teacher forcing.


def script(wanted: torch.Tensor) -> forced.Script:
    rows, steps, _ = wanted.shape
    return forced.Script([[1]] * rows, [[1] * steps] * rows, wanted, 100)


def test_logits_are_judged_by_their_range() -> None:
    wanted = torch.tensor([[[0.0, 10.0, 9.9], [0.0, 10.0, 5.0]]], dtype=torch.float64)
    best = wanted.argmax(-1)
    assert forced.judge(script(wanted), wanted + 0.2, best)["worst_error"] == pytest.approx(0.02)
    with pytest.raises(Failed, match=r"row 0 .* step 1: logits are off by 0.04 of their range"):
        forced.judge(script(wanted), wanted + torch.tensor([[[0.0], [0.4]]]), best)
    with pytest.raises(Failed, match="off by inf"):
        forced.judge(script(wanted), wanted * torch.tensor([[[1.0], [torch.nan]]]), best)
    forced.judge(script(wanted), wanted, torch.tensor([[2, 1]]))  # a near-tie at step 0
    with pytest.raises(Failed, match=r"at \(row, step\) \[\[0, 1\]\]"):
        forced.judge(script(wanted), wanted, torch.tensor([[1, 2]]))


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Here:
    """A place where the model and the reference of the comparisons in bfloat16 are made once."""
    return Here(DeviceFacts("cpu"), True, tmp_path_factory.mktemp("dense"), lambda **figures: None)


def follow(here: Here, **more: Any) -> tuple[forced.Script, torch.Tensor, torch.Tensor]:
    folder = models.forced_model(here, "dense")
    made = forced.make_script(here, "dense", folder)
    logits, tokens, _ = forced.follow(here, folder, made, TORCH, graphs=False, **more)
    return made, logits, tokens


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_an_engine_follows_the_script_whatever_the_pages(dense: Here, page_size: int) -> None:
    made, logits, tokens = follow(dense, page_size=page_size)
    assert forced.judge(made, logits, tokens)["worst_error"] < 0.02


def test_rows_own_every_other_page() -> None:
    made = forced.Script([[1] * 20, [1] * 3], [[1] * 4] * 2, torch.empty(0), 8)
    slots = [forced.owned_slots(row, made, 16) for row in (0, 1)]
    assert [sorted(set((s // 16).tolist())) for s in slots] == [[0, 2], [4, 6]]
    assert slots[0].tolist() == [*range(16), *range(32, 48)]


def test_a_read_of_a_foreign_page_is_seen_through_the_poison(dense: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    made, logits, tokens = follow(dense, poison=True)
    forced.judge(made, logits, tokens)
    feed = forced._feed

    def astray(engine: Any, made: forced.Script) -> Any:
        owned = forced.owned_slots

        def one_wrong(row: int, made: forced.Script, size: int) -> Any:
            return owned(row, made, size) + (size if row == 1 else 0)  # pages that nobody was to touch

        def poison_again(*args: Any) -> Any:
            out = passing(*args)
            if args[2] == "prefill":
                pages = torch.arange(1, engine.num_pages, 2)
                for pair in engine.kv_cache.caches():
                    for cache in pair:
                        cache[pages] = torch.nan
            return out

        passing = forced._pass
        with monkeypatch.context() as patch:
            patch.setattr(forced, "owned_slots", one_wrong)
            patch.setattr(forced, "_pass", poison_again)
            return feed(engine, made)

    monkeypatch.setattr(forced, "_feed", astray)
    made, logits, tokens = follow(dense, poison=True)
    with pytest.raises(Failed, match=r"row 1 .* off by inf"):
        forced.judge(made, logits, tokens)


# Crowds.


def test_a_token_is_picked_as_the_core_samples() -> None:
    logits = torch.tensor([0.0, 3.0, 2.9, -5.0])
    assert pick(logits, SamplingParams(), 7) == 1
    hot = [pick(logits, SamplingParams(temperature=1.0, seed=seed), 7) for seed in range(40)]
    assert {1, 2} <= set(hot)
    assert {pick(logits, SamplingParams(temperature=1.0, seed=s, top_k=1), 7) for s in range(40)} == {1}
    assert hot == [pick(logits, SamplingParams(temperature=1.0, seed=seed), 7) for seed in range(40)]


def test_a_tie_is_what_a_small_change_decides() -> None:
    logits, greedy = torch.tensor([0.0, 10.0, 9.999, 4.0]), SamplingParams()
    assert is_tie(logits, greedy, 5, (2, 1), 1e-3)
    assert not is_tie(logits, greedy, 5, (2, 1), 1e-5)
    assert not is_tie(logits, greedy, 5, (3, 1), 1e-3)
    nearly = SamplingParams(temperature=1.0, seed=1, top_k=1)
    assert is_tie(logits, nearly, 5, (2, 1), 1e-3) and not is_tie(logits, nearly, 5, (0, 1), 1e-3)


def test_a_crowd_is_answered_as_if_alone(here: Here, figures: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    crowd.as_alone("page-64", here)
    whole = {"requests": 12, "answers": 12, "compared": 60, "near_ties": 0, "followed": 12, "preemptions": 0}
    assert figures() == whole
    assert crowd.in_a_small_pool(here)["preemptions"] > 0
    crowd.as_alone_in_half(TORCH, here)
    wishes = crowd.workload(here)
    alone = crowd.solo_answers(here, wishes, "all")
    folder = models.tiny_checkpoint(crowd.MODEL)
    step = len(alone[0]) - 1
    with TieJudge(here, folder) as judge:
        least = int(judge.logits([*wishes[0].prompt, *alone[0][:step]]).argmin())
    for got, told in (
        ([[*alone[0][:step], least], *alone[1:]], rf"request 0 .* token {step} is {least} instead of"),
        ([*alone[:3], alone[3][:-1], *alone[4:]], "request 3 .* equal as far as they go"),
        ([*alone[:3], [*alone[3], 5], *alone[4:]], f"request 3 .* more than {len(alone[3])} tokens"),
    ):
        with pytest.raises(Failed, match=rf"(?s)1 of 12 requests are answered wrongly.*{told}"):
            crowd.compare(here, folder, wishes, alone, crowd.EXACT, lambda some, got=got: got)


def test_workloads_are_of_all_kinds_and_always_the_same(here: Here) -> None:
    on_gpu = replace(here, device=replace(here.device, kind="cuda", sm=90))
    wishes = crowd.workload(on_gpu)
    assert len(wishes) == 256 and wishes == crowd.workload(on_gpu)
    assert {wish.params.is_greedy for wish in wishes} == {wish.params.is_filtered for wish in wishes} == {True, False}
    assert all(wish.params.seed is not None for wish in wishes if not wish.params.is_greedy)
    full = crowd.workload(replace(on_gpu, quick=False))
    assert max(len(wish.prompt) for wish in full) > 500 and max(wish.params.max_tokens for wish in full) > 120


# Reported faults.


@pytest.mark.parametrize(
    "check",
    [
        cases.cache_hits,
        cases.chunks,
        cases.tiny_temperatures,
        cases.extreme_filters,
        cases.seeds,
        cases.nan_logits,
        cases.alone_and_in_a_crowd,
        cases.garbage_in_unused_rows,
    ],
)
def test_reported_faults_are_absent(check: Any, here: Here) -> None:
    check(here)


def test_they_are_seen_where_answers_are_wrong(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = iter(range(10**6))

    def unsteady(llm: LLM, prompts: Sequence[Any], params: Any) -> list[list[int]]:
        return [[next(calls)] * 7 for _ in prompts]

    monkeypatch.setattr(cases, "answers", unsteady)
    for check in (cases.chunks, cases.tiny_temperatures, cases.extreme_filters, cases.seeds):
        with pytest.raises(Failed):
            check(here)


def test_a_path_without_compilers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, here: Here) -> None:
    for folder, program in (("a", "nvcc"), ("b", "gcc"), ("c", "g++")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / program).touch()
    monkeypatch.setenv("PATH", ":".join(str(tmp_path / folder) for folder in "abc"))
    assert cases._without_compilers(here.device) == {"PATH": str(tmp_path / "b")}
    gpu = replace(here.device, kind="cuda")
    assert cases._without_compilers(gpu) == {"PATH": f"{tmp_path / 'b'}:{tmp_path / 'c'}"}


# Backends by themselves.


def candidate(role: Any, name: str) -> Candidate:
    (found,) = [item for item in discover().candidates(role) if item.spec.name == name]
    return found


def test_a_backend_that_conforms_and_one_that_does_not(
    here: Here, figures: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    conformance.conforms(candidate("linear", "plain"), here)
    assert figures()["passed"] > 5 and figures()["failed"] == 0 and "worst float32" in figures()
    outcomes = [Outcome("one", "passed"), Outcome("two", "failed", detail="wrong at 3\nand more")]
    report = SimpleNamespace(
        outcomes=outcomes,
        worst_errors=dict,
        speeds=(),
        passed=False,
        of_status=lambda status: [outcome for outcome in outcomes if outcome.status == status],
    )
    monkeypatch.setattr("minisgl_core.testing.verify", lambda *args, **more: report)
    with pytest.raises(Failed, match=r"1 of 2 checks failed:\ntwo: wrong at 3$"):
        conformance.conforms(candidate("linear", "plain"), here)
    outcomes[:] = [Outcome("one", "skipped", detail="needs 2 GPUs")]
    with pytest.raises(Skipped, match="no check could be run: needs 2 GPUs"):
        conformance.conforms(candidate("linear", "plain"), here)
    absent = candidate("linear", "plain")
    absent = replace(absent, spec=replace(absent.spec, requires=("import:no_such_module",)))
    with pytest.raises(Skipped, match=r"not installed: .*no_such_module"):
        conformance.conforms(absent, here)


def test_shapes_are_right_or_refused(here: Here, figures: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    torch_attention = candidate("attention", "torch")
    geometry.run(torch_attention, here)
    total = figures()["right"]
    assert total > 20 and figures()["refused"] == figures()["left out"] == 0
    boxes = tuple(replace(box, features=frozenset()) for box in torch_attention.spec.caps)
    narrow = replace(torch_attention.spec, caps=boxes)
    monkeypatch.setattr(geometry, "prebuilt", lambda spec, may_compile: narrow)
    geometry.run(torch_attention, here)
    assert (figures()["right"], figures()["left out"]) == (total - 2, 2)
    monkeypatch.setattr(geometry.AttentionCheck, "run", lambda *args: 1 // 0)
    with pytest.raises(Failed, match="shapes are wrong:\nprefill/heads=9/3,head_dim=64: ZeroDivisionError"):
        geometry.run(torch_attention, here)


# What is left behind.


def test_a_leak_is_seen(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    leaked: list[torch.Tensor] = []

    @contextmanager
    def serve(*args: Any, **settings: Any) -> Iterator[object]:
        leaked.append(torch.ones(1 << 20))
        yield object()

    monkeypatch.setattr(serving, "serve", serve)
    monkeypatch.setattr(serving, "answers", lambda *args: [[1]])
    with pytest.raises(Failed, match="bytes more are in use after engine 3 than after engine 2"):
        hygiene.memory_comes_back(TORCH, "float32", here)
    given = iter(range(9))
    monkeypatch.setattr(serving, "answers", lambda *args: [[next(given)]])
    with pytest.raises(Failed, match="the engines answer differently"):
        hygiene.memory_comes_back(TORCH, "float32", here)


def test_memory_comes_back(here: Here, figures: Any) -> None:
    hygiene.memory_comes_back(TORCH, "float32", here)
    assert figures()["engine_mib"] > 0 and len(figures()["left_kib"]) == 3


def test_cuda_touched_too_early_is_seen(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    early = {"initialized": True, "imported": 3, "failed": {}}
    monkeypatch.setattr(hygiene, "_told_by", lambda *args: early)
    with pytest.raises(Failed, match="initialised after importing"):
        hygiene.untouched_by_imports(here)
    for seen, told in (([True], "before the ranks were started"), ([], "0 ranks were started")):
        answer = {"initialized": seen, "tokens": None, "error": ""}
        monkeypatch.setattr(hygiene, "_told_by", lambda *args, answer=answer: answer)
        with pytest.raises(Failed, match=told):
            hygiene.untouched_by_the_launcher(here)


def test_imports_leave_cuda_alone(here: Here) -> None:
    told = hygiene.untouched_by_imports(here)
    assert told["modules"] > 100
    with pytest.raises(Failed, match=r"(?s)exit code 1.*ZeroDivisionError"):
        hygiene._told_by("1 / 0")
