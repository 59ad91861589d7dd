"""LLM on a tiny model with a tokenizer; numbers of another implementation decide."""

from __future__ import annotations

import gc
import itertools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from minisgl_core.core import SamplingParams
from minisgl_core.errors import AdmissionError, ConfigError, EngineError, UsageError
from minisgl_core.llm import LLM
from support.make_checkpoints import NUM_STEPS, Reference, ensure_checkpoint, reference
from support.settings import SHARED

SETTINGS = SHARED
GREEDY = SamplingParams(max_tokens=NUM_STEPS, ignore_eos=True)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(ensure_checkpoint("q3-text"), **SETTINGS) as llm:
        yield llm


@pytest.fixture(autouse=True)
def idle_afterwards(llm: LLM) -> Iterator[None]:
    """Every test leaves the shared engine idle."""
    yield
    assert not llm.scheduler.has_work, llm.scheduler.stats


def test_token_ids_equal_the_reference(llm: LLM, expected: Reference) -> None:
    answers = llm.generate(expected.prompts, GREEDY, progress=False)
    assert [answer["token_ids"] for answer in answers] == expected.continuations
    assert [answer["prompt_tokens"] for answer in answers] == [len(prompt) for prompt in expected.prompts]
    assert {answer["finish_reason"] for answer in answers} == {"length"}
    assert llm.tokenizer is not None
    assert [answer["text"] for answer in answers] == [llm.tokenizer.decode(ids) for ids in expected.continuations]


def test_a_text_is_encoded_and_one_prompt_needs_no_list(llm: LLM) -> None:
    assert llm.tokenizer is not None
    text = "def answer(model):"
    ids = llm.tokenizer.encode(text)
    asked = [llm.generate(prompts, GREEDY, progress=False) for prompts in (text, [ids], ids, [text])]
    assert {(answer.text, *answer.token_ids) for (answer,) in asked} == {(asked[0][0].text, *asked[0][0].token_ids)}
    assert [answer.cached_tokens for (answer,) in asked] == [0, *[len(ids) - 1] * 3], "computed once"


def test_each_prompt_may_have_its_own_parameters(llm: LLM, expected: Reference) -> None:
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (3, 1, 7)]
    answers = llm.generate(expected.prompts, params, progress=False)
    assert [answer["token_ids"] for answer in answers] == [
        expected.continuations[0][:3],
        expected.continuations[1][:1],
        expected.continuations[2][:7],
    ]
    with pytest.raises(UsageError, match="2 sampling parameters for 3 prompts"):
        llm.generate(expected.prompts, params[:2])


def test_no_prompts_no_answers(llm: LLM) -> None:
    assert llm.generate([], progress=False) == []


def test_logprobs_are_those_of_greedy_choice(llm: LLM, expected: Reference) -> None:
    (answer,) = llm.generate(
        [expected.prompts[0]], SamplingParams(max_tokens=4, ignore_eos=True, logprobs=2), progress=False
    )
    assert [entry.token_id for entry in answer.logprobs] == expected.continuations[0][:4] == answer.token_ids
    assert "".join(entry.text for entry in answer.logprobs) == answer.text
    for entry in answer.logprobs:
        best, second = entry.top
        assert (best.token_id, best.text) == (entry.token_id, entry.text)
        assert best.logprob == pytest.approx(entry.logprob)
        assert second.logprob < best.logprob < 0


def test_a_stop_string_ends_the_answer_before_it(llm: LLM, expected: Reference) -> None:
    assert llm.tokenizer is not None
    whole = llm.tokenizer.decode(expected.continuations[0])
    stop = whole[6:9]
    (answer,) = llm.generate(
        [expected.prompts[0]], SamplingParams(max_tokens=16, ignore_eos=True, stop=stop), progress=False
    )
    assert (answer["text"], answer["finish_reason"]) == (whole[: whole.index(stop)], "stop")
    assert len(answer["token_ids"]) < 16


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ([], "prompt 1: the prompt is empty"),
        ("", "prompt 1: the prompt is empty"),
        ([1] * 64, "prompt 1: a prompt of 64 tokens .* context is 64 tokens and the KV pool holds 512"),
        ([5, 512], "prompt 1: the prompt holds token id 512"),
        ([5, -2], "prompt 1: the prompt holds token id -2"),
        ([5, 1.5], "prompt 1: the prompt holds 1.5"),
    ],
)
def test_one_bad_prompt_is_named_before_any_work(llm: LLM, bad: Any, message: str, expected: Reference) -> None:
    hits = llm.scheduler.stats
    with pytest.raises(AdmissionError, match=message):
        llm.generate([expected.prompts[0], bad, expected.prompts[1]], GREEDY)
    assert not llm.scheduler.has_work
    assert llm.scheduler.stats == hits


def test_a_stream_brings_the_same_as_generate(llm: LLM, expected: Reference) -> None:
    chunks = list(llm.stream(expected.prompts[1], GREEDY))
    assert [token for chunk in chunks for token in chunk.token_ids] == expected.continuations[1]
    assert (
        "".join(chunk.text for chunk in chunks)
        == llm.generate([expected.prompts[1]], GREEDY, progress=False)[0]["text"]
    )
    assert [chunk.finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]


def test_streams_may_be_read_in_turns_and_next_to_generate(llm: LLM, expected: Reference) -> None:
    streams = [llm.stream(prompt, GREEDY) for prompt in expected.prompts]
    first = [next(stream) for stream in streams]
    assert llm.generate([expected.prompts[0]], GREEDY, progress=False)[0]["token_ids"] == expected.continuations[0]
    rest: list[list[int]] = [[], [], []]
    for chunks in itertools.zip_longest(*streams):
        for tokens, chunk in zip(rest, chunks, strict=True):
            tokens += chunk.token_ids if chunk else []
    assert [chunk.token_ids + tokens for chunk, tokens in zip(first, rest, strict=True)] == expected.continuations


@pytest.mark.parametrize("read", [0, 1])
@pytest.mark.parametrize("drop", [True, False])
def test_case_55_closing_or_dropping_a_stream_frees_its_pages_at_once(
    llm: LLM, expected: Reference, read: int, drop: bool, slow_down: Callable[..., None]
) -> None:
    slow_down(llm, 0.01)
    stream = llm.stream(expected.prompts[2], SamplingParams(max_tokens=50, ignore_eos=True))
    for _ in range(read):
        next(stream)
    if drop:
        del stream
        llm.clear_cache()  # has its turn after the abort
    else:
        stream.close()
    stats = llm.scheduler.stats
    assert (stats.running, stats.waiting, llm.scheduler.has_work) == (0, 0, False)
    assert stats.free_pages + stats.cached_pages == 512


def test_closing_a_stream_ends_the_loop_of_the_thread_that_reads_it(llm: LLM, slow_down: Callable[..., None]) -> None:
    slow_down(llm, 0.02)
    stream = llm.stream([5, 6, 7], SamplingParams(max_tokens=50, ignore_eos=True))
    read: list[Any] = [next(stream)]
    reader = threading.Thread(target=lambda: read.extend(stream), daemon=True)
    reader.start()
    time.sleep(0.05)
    stream.close()
    reader.join(10)
    assert not reader.is_alive()
    assert all(chunk.finish_reason is None for chunk in read)


def test_bad_prompts_of_a_stream_raise_at_the_call(llm: LLM) -> None:
    with pytest.raises(AdmissionError, match="the prompt is empty"):
        llm.stream([])


def test_ctrl_c_between_steps_leaves_a_usable_engine(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, expected: Reference
) -> None:
    step, steps = llm.scheduler.step, itertools.count()

    def interrupted_step() -> Any:
        if next(steps) == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return step()

    monkeypatch.setattr(llm.scheduler, "step", interrupted_step)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(expected.prompts, GREEDY, progress=False)
    assert not llm.scheduler.has_work
    assert [
        answer["token_ids"] for answer in llm.generate(expected.prompts, GREEDY, progress=False)
    ] == expected.continuations


@pytest.mark.parametrize("streams", [False, True])
def test_ctrl_c_while_requests_are_posted_leaves_none_behind(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, streams: bool
) -> None:
    post, posts = llm._engine._transport.post, itertools.count()

    def interrupted(*given: Any) -> bool:
        if next(posts) == 0:
            raise KeyboardInterrupt
        return post(*given)

    monkeypatch.setattr(llm._engine._transport, "post", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.stream([5, 6, 7], GREEDY) if streams else llm.generate([[5, 6, 7]] * 3, GREEDY, progress=False)
    gc.collect()
    assert llm._engine._router._live == {}


def test_clear_cache_forgets_all_prefixes(llm: LLM, expected: Reference) -> None:
    llm.generate([expected.prompts[2]], GREEDY, progress=False)
    assert llm.scheduler.stats.cached_pages > 0
    llm.clear_cache()
    assert llm.scheduler.stats.cached_pages == 0
    assert llm.scheduler.stats.free_pages == 512


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_goes_to_stderr_where_that_is_a_terminal(
    llm: LLM,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    expected: Reference,
    terminal: bool,
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    llm.generate(expected.prompts, SamplingParams(max_tokens=2))
    shown = capsys.readouterr()
    assert ("3/3" in shown.err) is terminal
    assert shown.out == ""


# ---- making and ending -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_running_reqs": 4}, r"no setting `max_running_reqs`; did you mean 'max_running_req'\?"),
        ({"tp_sizes": 4}, r"did you mean 'tp_size'\?"),
        ({"model_path": "x"}, "no setting `model_path`"),
        ({"tp_size": 0}, "`tp_size` is 0"),
        ({"dtype": "float31"}, "`dtype` is 'float31'"),
        ({"max_running_req": 0}, "`max_running_req` is 0"),
    ],
)
def test_wrong_settings_are_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM("nowhere", **settings)


def test_a_folder_that_is_not_there_is_named(tmp_path: Any) -> None:
    with pytest.raises(UsageError, match="missing"):
        LLM(tmp_path / "missing")


def test_a_model_without_tokenizer_serves_token_ids() -> None:
    expected = reference("s93")
    with LLM(ensure_checkpoint("s93"), **SETTINGS) as llm:
        answers = llm.generate(expected.prompts, GREEDY, progress=False)
        assert [answer["token_ids"] for answer in answers] == expected.continuations
        assert {answer["text"] for answer in answers} == {""}
        with pytest.raises(AdmissionError, match="no tokenizer files"):
            llm.generate("text")
        with pytest.raises(AdmissionError, match="`stop` strings need a tokenizer"):
            llm.generate([[1]], SamplingParams(stop="x"))


def test_two_models_one_after_the_other_and_the_end_by_garbage_collection(expected: Reference) -> None:
    for _ in range(2):
        llm = LLM(ensure_checkpoint("q3-text"), **SETTINGS)
        assert llm.generate([expected.prompts[0]], GREEDY, progress=False)[0]["token_ids"] == expected.continuations[0]
        engine = llm.engine
        del llm
        gc.collect()
        assert engine.model is None


def test_after_shutdown_and_after_a_failed_step_nothing_pretends_to_work(
    monkeypatch: pytest.MonkeyPatch, expected: Reference
) -> None:
    llm = LLM(ensure_checkpoint("q3-text"), **SETTINGS)

    def broken(*_: Any) -> Any:
        raise RuntimeError("device lost")

    monkeypatch.setattr(llm.engine, "launch", broken)
    with pytest.raises(RuntimeError, match="device lost"):
        llm.generate(expected.prompts, GREEDY, progress=False)
    with pytest.raises(EngineError, match="stopped after an error: device lost"):
        llm.generate(expected.prompts, GREEDY, progress=False)
    llm.shutdown()
    llm.shutdown()
    with pytest.raises(UsageError, match="has been shut down"):
        llm.generate(expected.prompts, GREEDY)
