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

from gpu import test_answers, test_backends, test_cases, test_machine, test_memory, test_stress
from minisgl_core.core import SamplingParams
from minisgl_core.llm import LLM
from minisgl_core.registry import Candidate, DeviceFacts, discover
from minisgl_core.testing import Outcome
from support.gpu import models, serving, stress, teacher_forced
from support.gpu.backends import AttentionPair
from support.gpu.check import Context, Failed, Skipped
from support.gpu.near_tie import NearTieJudge, is_near_tie, pick
from support.make_checkpoints import ensure_checkpoint

TORCH = {"prefill": "torch", "decode": "torch"}
PAIR = AttentionPair("torch", "torch", True, ())


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
    assert [test_answers.near_tie(reference, 0, 0, token) for token in range(4)] == [False, True, True, False]


def test_a_family_answers_as_in_transformers(context: Context, figures: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    test_answers.test_fp32("mistral-full", context)
    assert figures()["compared"] == 96
    real = serving.answers

    def wrong(llm: LLM, prompts: Any, params: Any) -> list[list[int]]:
        got = real(llm, prompts, params)
        got[1][3] ^= 1
        return got

    monkeypatch.setattr(test_answers, "answers", wrong)
    with pytest.raises(Failed, match="first answer to the prompt of 17 tokens: token 3 is "):
        test_answers.test_fp32("mistral-full", context)


# Teacher forcing.


def script(wanted: torch.Tensor) -> teacher_forced.Script:
    rows, steps, _ = wanted.shape
    return teacher_forced.Script([[1]] * rows, [[1] * steps] * rows, wanted, 100)


def test_logits_are_judged_by_their_range() -> None:
    wanted = torch.tensor([[[0.0, 10.0, 9.9], [0.0, 10.0, 5.0]]], dtype=torch.float64)
    best = wanted.argmax(-1)
    assert teacher_forced.judge(script(wanted), wanted + 0.2, best)["worst_error"] == pytest.approx(0.02)
    with pytest.raises(Failed, match=r"row 0 .* step 1: logits are off by 0.04 of their range"):
        teacher_forced.judge(script(wanted), wanted + torch.tensor([[[0.0], [0.4]]]), best)
    with pytest.raises(Failed, match="off by inf"):
        teacher_forced.judge(script(wanted), wanted * torch.tensor([[[1.0], [torch.nan]]]), best)
    teacher_forced.judge(script(wanted), wanted, torch.tensor([[2, 1]]))  # a near-tie at step 0
    with pytest.raises(Failed, match=r"at \(row, step\) \[\[0, 1\]\]"):
        teacher_forced.judge(script(wanted), wanted, torch.tensor([[1, 2]]))


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Context:
    """A place where the model and the reference of the comparisons in bfloat16 are made once."""
    return Context(DeviceFacts("cpu"), True, tmp_path_factory.mktemp("dense"))


def follow(context: Context, **more: Any) -> tuple[teacher_forced.Script, torch.Tensor, torch.Tensor]:
    folder = models.forced_model(context, "dense")
    made = teacher_forced.make_script(context, "dense", folder)
    logits, tokens, _ = teacher_forced.follow(context, folder, made, TORCH, graphs=False, **more)
    return made, logits, tokens


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_an_engine_follows_the_script_whatever_the_pages(dense: Context, page_size: int) -> None:
    made, logits, tokens = follow(dense, page_size=page_size)
    assert teacher_forced.judge(made, logits, tokens)["worst_error"] < 0.02


def test_rows_own_every_other_page() -> None:
    made = teacher_forced.Script([[1] * 20, [1] * 3], [[1] * 4] * 2, torch.empty(0), 8)
    slots = [teacher_forced.owned_slots(row, made, 16) for row in (0, 1)]
    assert [sorted(set((s // 16).tolist())) for s in slots] == [[0, 2], [4, 6]]
    assert slots[0].tolist() == [*range(16), *range(32, 48)]


def test_a_read_of_a_foreign_page_is_seen_through_the_poison(dense: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    made, logits, tokens = follow(dense, poison=True)
    teacher_forced.judge(made, logits, tokens)
    feed = teacher_forced._feed

    def astray(engine: Any, made: teacher_forced.Script) -> Any:
        owned = teacher_forced.owned_slots

        def one_wrong(row: int, made: teacher_forced.Script, size: int) -> Any:
            return owned(row, made, size) + (size if row == 1 else 0)  # pages that no row owns

        def poison_again(*args: Any) -> Any:
            out = passing(*args)
            if args[2] == "prefill":
                pages = torch.arange(1, engine.num_pages, 2)
                for pair in engine.kv_cache.caches():
                    for cache in pair:
                        cache[pages] = torch.nan
            return out

        passing = teacher_forced._pass
        with monkeypatch.context() as patch:
            patch.setattr(teacher_forced, "owned_slots", one_wrong)
            patch.setattr(teacher_forced, "_pass", poison_again)
            return feed(engine, made)

    monkeypatch.setattr(teacher_forced, "_feed", astray)
    made, logits, tokens = follow(dense, poison=True)
    with pytest.raises(Failed, match=r"row 1 .* off by inf"):
        teacher_forced.judge(made, logits, tokens)


# Stress.


def test_a_token_is_picked_as_the_core_samples() -> None:
    logits = torch.tensor([0.0, 3.0, 2.9, -5.0])
    assert pick(logits, SamplingParams(), 7) == 1
    hot = [pick(logits, SamplingParams(temperature=1.0, seed=seed), 7) for seed in range(40)]
    assert {1, 2} <= set(hot)
    assert {pick(logits, SamplingParams(temperature=1.0, seed=s, top_k=1), 7) for s in range(40)} == {1}
    assert hot == [pick(logits, SamplingParams(temperature=1.0, seed=seed), 7) for seed in range(40)]


def test_a_near_tie_is_what_a_small_change_decides() -> None:
    logits, greedy = torch.tensor([0.0, 10.0, 9.999, 4.0]), SamplingParams()
    assert is_near_tie(logits, greedy, 5, (2, 1), 1e-3)
    assert not is_near_tie(logits, greedy, 5, (2, 1), 1e-5)
    assert not is_near_tie(logits, greedy, 5, (3, 1), 1e-3)
    nearly = SamplingParams(temperature=1.0, seed=1, top_k=1)
    assert is_near_tie(logits, nearly, 5, (2, 1), 1e-3) and not is_near_tie(logits, nearly, 5, (0, 1), 1e-3)


def test_many_requests_are_answered_as_if_alone(
    context: Context, figures: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    test_stress.test_stress("page-64", context)
    whole = {"requests": 12, "answers": 12, "compared": 60, "near_ties": 0, "followed": 12, "preemptions": 0}
    assert figures() == whole
    test_stress.test_stress("small-pool", context)
    assert figures()["preemptions"] > 0
    test_stress.test_stress(PAIR, context)
    requests = stress.workload(context)
    alone = stress.solo_answers(context, requests, "all")
    folder = ensure_checkpoint(stress.MODEL)
    step = len(alone[0]) - 1
    with NearTieJudge(context, folder) as judge:
        least = int(judge.logits([*requests[0].prompt, *alone[0][:step]]).argmin())
    for got, message in (
        ([[*alone[0][:step], least], *alone[1:]], rf"request 0 .* token {step} is {least} instead of"),
        ([*alone[:3], alone[3][:-1], *alone[4:]], "request 3 .* equal as far as they go"),
        ([*alone[:3], [*alone[3], 5], *alone[4:]], f"request 3 .* more than {len(alone[3])} tokens"),
    ):
        with pytest.raises(Failed, match=rf"(?s)1 of 12 requests are answered wrongly.*{message}"):
            stress.compare(context, folder, requests, alone, stress.EXACT, lambda some, got=got: got)


def test_workloads_are_of_all_kinds_and_always_the_same(context: Context) -> None:
    on_gpu = replace(context, device=replace(context.device, kind="cuda", sm=90))
    requests = stress.workload(on_gpu)
    assert len(requests) == 256 and requests == stress.workload(on_gpu)
    assert (
        {request.params.is_greedy for request in requests}
        == {request.params.is_filtered for request in requests}
        == {True, False}
    )
    assert all(request.params.seed is not None for request in requests if not request.params.is_greedy)
    full = stress.workload(replace(on_gpu, quick=False))
    assert (
        max(len(request.prompt) for request in full) > 500 and max(request.params.max_tokens for request in full) > 120
    )


# Reported faults.


@pytest.mark.parametrize(
    "check",
    [
        test_cases.test_case_24_cache_hits,
        test_cases.test_case_27_chunks,
        test_cases.test_case_38_tiny_temperatures,
        test_cases.test_case_42_extreme_filters,
        test_cases.test_case_43_seeds,
        test_cases.test_case_45_nan_logits,
        test_cases.test_case_46_batch_sizes,
        test_cases.test_case_67_unused_rows,
    ],
)
def test_reported_faults_are_absent(check: Any, context: Context) -> None:
    check(context)


WRONG_ANSWERS = (
    test_cases.test_case_27_chunks,
    test_cases.test_case_38_tiny_temperatures,
    test_cases.test_case_42_extreme_filters,
    test_cases.test_case_43_seeds,
)


def test_they_are_seen_where_answers_are_wrong(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = iter(range(10**6))

    def unsteady(llm: LLM, prompts: Sequence[Any], params: Any) -> list[list[int]]:
        return [[next(calls)] * 7 for _ in prompts]

    monkeypatch.setattr(test_cases, "answers", unsteady)
    for check in WRONG_ANSWERS:
        with pytest.raises(Failed):
            check(context)


def test_a_path_without_compilers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder, program in (("a", "nvcc"), ("b", "gcc"), ("c", "g++")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / program).touch()
    monkeypatch.setenv("PATH", ":".join(str(tmp_path / folder) for folder in "abc"))
    assert test_cases.without_compilers("cpu") == {"PATH": str(tmp_path / "b")}
    assert test_cases.without_compilers("cuda") == {"PATH": f"{tmp_path / 'b'}:{tmp_path / 'c'}"}


# Backends by themselves.


def candidate(role: Any, name: str) -> Candidate:
    (found,) = [item for item in discover().candidates(role) if item.spec.name == name]
    return found


def test_a_backend_that_conforms_and_one_that_does_not(
    context: Context, figures: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    test_backends.test_conformance(candidate("linear", "plain"), context)
    assert figures()["passed"] > 5 and figures()["failed"] == 0 and "worst float32" in figures()
    outcomes = [Outcome("one", "passed"), Outcome("two", "failed", detail="wrong at 3\nand more")]
    report = SimpleNamespace(
        outcomes=outcomes,
        worst_errors=dict,
        speeds=(),
        passed=False,
        of_status=lambda status: [outcome for outcome in outcomes if outcome.status == status],
    )
    monkeypatch.setattr(test_backends, "verify", lambda *args, **more: report)
    with pytest.raises(Failed, match=r"1 of 2 checks failed:\ntwo: wrong at 3$"):
        test_backends.test_conformance(candidate("linear", "plain"), context)
    outcomes[:] = [Outcome("one", "skipped", detail="needs 2 GPUs")]
    with pytest.raises(Skipped, match="no check could be run: needs 2 GPUs"):
        test_backends.test_conformance(candidate("linear", "plain"), context)
    absent = candidate("linear", "plain")
    absent = replace(absent, spec=replace(absent.spec, requires=("import:no_such_module",)))
    with pytest.raises(Skipped, match=r"not installed: .*no_such_module"):
        test_backends.test_conformance(absent, context)


def test_shapes_are_right_or_refused(context: Context, figures: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    torch_attention = candidate("attention", "torch")
    test_backends.test_shapes(torch_attention, context)
    total = figures()["right"]
    assert total > 20 and figures()["refused"] == figures()["left out"] == 0
    plain = tuple(replace(caps, features=frozenset()) for caps in torch_attention.spec.caps)
    narrow = replace(torch_attention.spec, caps=plain)
    monkeypatch.setattr(test_backends, "prebuilt", lambda spec, may_compile: narrow)
    test_backends.test_shapes(torch_attention, context)
    assert (figures()["right"], figures()["left out"]) == (total - 2, 2)
    monkeypatch.setattr(test_backends.AttentionCheck, "run", lambda *args: 1 // 0)
    with pytest.raises(Failed, match="shapes are wrong:\nprefill/heads=9/3,head_dim=64: ZeroDivisionError"):
        test_backends.test_shapes(torch_attention, context)


# What is left behind.


def test_a_leak_is_seen(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    leaked: list[torch.Tensor] = []

    @contextmanager
    def serve(*args: Any, **settings: Any) -> Iterator[object]:
        leaked.append(torch.ones(1 << 20))
        yield object()

    monkeypatch.setattr(test_memory, "serve", serve)
    monkeypatch.setattr(test_memory, "answers", lambda *args: [[1]])
    with pytest.raises(Failed, match="bytes more are in use after engine 3 than after engine 2"):
        test_memory.test_memory(TORCH, "float32", context)
    given = iter(range(9))
    monkeypatch.setattr(test_memory, "answers", lambda *args: [[next(given)]])
    with pytest.raises(Failed, match="the engines answer differently"):
        test_memory.test_memory(TORCH, "float32", context)


def test_memory_comes_back(context: Context, figures: Any) -> None:
    test_memory.test_memory(TORCH, "float32", context)
    assert figures()["engine_mib"] > 0 and len(figures()["left_kib"]) == 3


def test_cuda_touched_too_early_is_seen(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    early = {"initialized": True, "imported": 3, "failed": {}}
    monkeypatch.setattr(test_machine, "last_line_of", lambda *args: early)
    with pytest.raises(Failed, match="initialised after importing"):
        test_machine.test_imports(context)
    for seen, message in (([True], "before the ranks were started"), ([], "0 ranks were started")):
        answer = {"initialized": seen, "tokens": None, "error": ""}
        monkeypatch.setattr(test_machine, "last_line_of", lambda *args, answer=answer: answer)
        with pytest.raises(Failed, match=message):
            test_machine.test_launcher(context)


def test_imports_leave_cuda_alone(context: Context, figures: Any) -> None:
    test_machine.test_imports(context)
    assert figures()["modules"] > 100
    with pytest.raises(Failed, match=r"(?s)exit code 1.*ZeroDivisionError"):
        test_machine.last_line_of("1 / 0")
