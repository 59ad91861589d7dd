"""The Python face: one engine for many callers, what it accepts, and the names that people try first."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from minisgl_core.core import SamplingParams
from minisgl_core.errors import AdmissionError, ConfigError, UsageError
from minisgl_core.llm import LLM, AsyncLLM, prepare_prompts
from minisgl_core.scheduler import Limits
from support.driver import greedy
from support.settings import SHARED

SETTINGS = SHARED


@pytest.fixture(scope="module")
def llm(tiny: Callable[[str], Path]) -> Iterator[LLM]:
    with LLM(tiny("q3-text"), **SETTINGS) as made:
        yield made


@pytest.fixture(scope="module")
def expected(answers: Callable[[str], Any]) -> Any:
    return answers("q3-text")


# ---- 103: several callers --------------------------------------------------------------------------------------------


def test_case_103_calls_of_several_threads_are_served_together(llm: LLM, expected: Any) -> None:
    rows: list[int] = []
    launch = llm.engine.launch

    def watched(batch: Any, mode: Any) -> Any:
        rows.append(batch.size)
        return launch(batch, mode)

    def call(turn: int) -> bool:
        which = turn % 3
        (answer,) = llm.generate([expected.prompts[which]], greedy(16), progress=False)
        return bool(answer.token_ids == expected.continuations[which])

    llm.engine.launch = watched  # type: ignore[method-assign]
    try:
        with ThreadPoolExecutor(8) as pool:
            assert list(pool.map(call, range(48))) == [True] * 48
    finally:
        del llm.engine.launch
    assert max(rows) > 2, "they shared passes"
    assert not llm.scheduler.has_work


def test_case_103_two_to_thread_calls_and_a_call_inside_a_running_loop(llm: LLM, expected: Any) -> None:
    def call(which: int) -> list[int]:
        return llm.generate([expected.prompts[which]], greedy(16), progress=False)[0].token_ids

    async def main() -> list[list[int]]:
        inside = call(2)  # as in a notebook's cell
        return [*await asyncio.gather(*(asyncio.to_thread(call, which) for which in (0, 1))), inside]

    assert asyncio.run(main()) == expected.continuations


def test_case_103_shutdown_ends_running_calls_with_an_error(tiny: Callable[[str], Path]) -> None:
    llm = LLM(tiny("q3-text"), **SETTINGS)
    step = llm.scheduler.step
    llm.scheduler.step = lambda: (time.sleep(0.05), step())[1]  # type: ignore[method-assign]
    raised: list[Exception] = []

    def call() -> None:
        try:
            llm.generate([[5, 6, 7]] * 3, greedy(60), progress=False)
        except Exception as error:
            raised.append(error)

    threads = [threading.Thread(target=call) for _ in range(3)]
    for thread in threads:
        thread.start()
    while llm.scheduler.stats.running < 3:
        time.sleep(0.01)
    closing = [threading.Thread(target=llm.shutdown) for _ in range(2)]
    for thread in (*closing, *threads):
        if thread in closing:
            thread.start()
    for thread in (*closing, *threads):
        thread.join(30)
        assert not thread.is_alive()
    assert [type(error) for error in raised] == [UsageError] * 3
    assert {str(error) for error in raised} == {"this LLM has been shut down; make a new one"}
    assert len({id(error) for error in raised}) == 3, "an exception of its own for each"
    llm.shutdown()


# ---- 114 and 116: prompts --------------------------------------------------------------------------------------------

IDS = [5, 6, 7, 300]
LIMITS = Limits(2048, None, 512)


@pytest.mark.parametrize(
    "prompts",
    [
        IDS,
        tuple(IDS),
        range(5, 9),
        iter(IDS),
        (token for token in IDS),
        [np.int64(token) for token in IDS],
        [5, np.int32(6), np.uint8(7), 300],
        *(np.array(IDS, dtype=dtype) for dtype in (np.int16, np.uint16, np.int32, np.uint32, np.int64, np.uint64)),
        np.array([5, 0, 6, 0, 7, 0, 300, 0])[::2],
        torch.tensor(IDS),
        torch.tensor(IDS, dtype=torch.int32),
        [torch.tensor(token) for token in IDS],
        [IDS],
        [(token for token in IDS)],
        [np.array(IDS)],
        [torch.tensor(IDS)],
        np.array([IDS]),
        torch.tensor([IDS]),
        iter([IDS]),
        np.array(IDS, dtype=object),
        [np.array(IDS, dtype=object)],
    ],
    ids=lambda value: type(value).__name__,
)
def test_case_114_token_ids_of_every_kind_are_one_prompt(prompts: Any) -> None:
    ((ids, *_),) = prepare_prompts(prompts, None, None, LIMITS)
    wanted = list(range(5, 9)) if isinstance(prompts, range) else IDS
    assert (ids.dtype, ids.tolist()) == (np.int32, wanted)


@pytest.mark.parametrize(
    "prompts",
    [np.array([IDS, IDS]), torch.tensor([IDS, IDS]), (row for row in [IDS, IDS]), [np.array(IDS), torch.tensor(IDS)]],
)
def test_case_114_rows_are_prompts(prompts: Any) -> None:
    assert [prompt.input_ids.tolist() for prompt in prepare_prompts(prompts, None, None, LIMITS)] == [IDS, IDS]


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([5, 1.5], "the prompt holds 1.5 at index 1"),
        ([5, True], "the prompt holds True at index 1"),
        ([5, np.True_], "the prompt holds np.True_ at index 1"),
        ([5, np.float32(6)], r"the prompt holds np.float32\(6.0\) at index 1"),
        ([5, [6]], r"the prompt holds \[6\] at index 1"),
        ([5, None], "the prompt holds None at index 1"),
        ([5, "6"], "the prompt holds '6' at index 1"),
        ([[[5]]], r"the prompt holds \[\[5\]\] at index 0"),
        (np.array([5.0]), r"the prompt is an array of shape \(1,\) and dtype float64"),
        (np.array([True]), r"the prompt is an array of shape \(1,\) and dtype bool"),
        (np.array([[5]]), r"the prompt is an array of shape \(1, 1\) and dtype int64"),
        (torch.tensor([5.0]), r"the prompt is an array of shape \(1,\) and dtype torch.float32"),
        (np.array(5), r"the prompt is an array of shape \(\)"),
        (torch.tensor([5.0], dtype=torch.bfloat16), r"the prompt is an array of shape \(1,\) and dtype torch.bfloat16"),
        (torch.tensor([5j]).conj(), r"the prompt is an array of shape \(1,\) and dtype torch.complex64"),
        (torch.tensor([5]).to_sparse(), r"the prompt is an array of shape \(1,\) and dtype torch.int64"),
        (torch.tensor([5], device="meta"), r"the prompt is an array of shape \(1,\) and dtype torch.int64"),
        (np.array("text"), r"the prompt is an array of shape \(\) and dtype <U4"),
        ({5: 6}, "the prompt is {5: 6}"),
        ({5, 6}, "the prompt is {5, 6}"),
        (5.0, "the prompt is 5.0"),
        ([5, 512], "the prompt holds token id 512"),
        ([5, 2**40], f"the prompt holds token id {2**40}"),
        ([5, -(2**70)], f"the prompt holds token id {-(2**70)}"),
        (np.array([5, 2**32 + 5]), f"the prompt holds token id {2**32 + 5}"),
        (np.array([5, 2**63 + 5], dtype=np.uint64), f"the prompt holds token id {2**63 + 5}"),
        (np.array([-1, 5], dtype=np.int8), "the prompt holds token id -1"),
        (np.array([]), "the prompt is empty"),
        (torch.tensor([]), "the prompt is empty"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_case_114_anything_else_is_refused_by_name(prompt: Any, message: str) -> None:
    with pytest.raises(AdmissionError, match=f"prompt 1: {message}"):
        prepare_prompts([IDS, prompt], None, None, LIMITS)


@pytest.mark.parametrize("kind", ["U", "O"])
def test_case_114_a_column_of_texts_is_several_prompts(llm: LLM, kind: Any) -> None:
    texts = ["def answer", "return"]
    prepared = prepare_prompts(np.array(texts, dtype=kind), None, llm.tokenizer, llm.scheduler.limits)
    wanted = prepare_prompts(texts, None, llm.tokenizer, llm.scheduler.limits)
    assert [one.input_ids.tolist() for one in prepared] == [one.input_ids.tolist() for one in wanted]


def test_case_114_what_a_tokenizer_of_transformers_returns_gets_a_hint() -> None:
    with pytest.raises(AdmissionError, match=r"prompt 0: .* give what it holds as 'prompt_token_ids'"):
        prepare_prompts([{"prompt_token_ids": IDS}], None, None, LIMITS)  # type: ignore[list-item]
    with pytest.raises(AdmissionError, match="give what it holds as 'input_ids'"):
        prepare_prompts({"input_ids": [IDS]}, None, None, LIMITS)  # type: ignore[arg-type]


@pytest.mark.parametrize("make", [np.array, list, torch.tensor], ids=["array", "list", "tensor"])
def test_case_116_no_work_of_python_for_each_id(make: Any) -> None:
    """64 prompts x 1,024 ids: 0.6 ms as arrays and 4 ms as lists where this was written, 40 ms id by id."""

    def calls(length: int) -> int:
        prompt, count = make(list(range(length))), 0

        def seen(*_: object) -> None:
            nonlocal count
            count += 1

        sys.setprofile(seen)
        try:
            prepare_prompts([prompt], None, None, Limits(4096, None, 4096))
        finally:
            sys.setprofile(None)
        return count

    calls(10)  # imports, the first time
    assert calls(2000) == calls(10)


# ---- 132: names and fields -------------------------------------------------------------------------------------------


def test_case_132_the_top_package_has_the_names_and_loads_nothing() -> None:
    code = (
        "import sys, time; before = set(sys.modules); begin = time.perf_counter(); import minisgl_core; "
        "seconds = time.perf_counter() - begin; new = set(sys.modules) - before; "
        "print(seconds < 0.05, sorted(new), {'LLM', 'AsyncLLM', 'SamplingParams'} <= set(dir(minisgl_core))); "
        "from minisgl_core import LLM, SamplingParams, AsyncLLM; print(LLM.__module__, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["True ['minisgl_core'] True", "minisgl_core.llm.llm True"]


TYPED = """
from minisgl_core import LLM, AsyncLLM, Completion, SamplingParams

def script(llm: LLM) -> list[str]:
    answers: list[Completion] = llm.generate(["a", [5, 6]], [SamplingParams(max_tokens=4, stop="x"), SamplingParams()])
    llm.generate("a")
    llm.generate([5, 6])
    llm.generate(text for text in ("a", "b"))
    messages = [{"role": "user", "content": "x"}]
    llm.chat(messages, enable_thinking=False)
    llm.chat([messages, messages])
    if answers[0].logprobs and answers[0].choices:
        print(answers[0].logprobs[0].top[0].text, answers[0].choices[0].text, answers[0].to_dict())
    return [chunk.text for chunk in llm.stream("x")] + [chunk.text for chunk in llm.stream_chat(messages)]

async def server() -> None:
    async with AsyncLLM("x", dtype="float32", page_size=16) as llm:
        (answer,) = await llm.generate("x")
        async for chunk in llm.stream("x"):
            print(chunk.text + answer.text)
"""


@pytest.mark.slow
def test_case_132_a_typed_script_passes_mypy(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(TYPED)
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent", "script.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout


def test_case_132_star_import_and_unknown_names() -> None:
    import minisgl_core

    assert [name for name in minisgl_core.__all__ if not hasattr(minisgl_core, name)] == []
    with pytest.raises(AttributeError, match="has no attribute 'LMM'"):
        minisgl_core.LMM  # type: ignore[attr-defined]  # noqa: B018


def test_case_132_the_package_is_a_program() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "minisgl_core", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("minisgl, version")


@pytest.mark.parametrize(
    ("given", "hint"),
    [
        ({"tensor_parallel_size": 2}, "LLM calls this `tp_size`"),
        ({"max_model_len": 64}, "LLM calls this `max_seq_len_override`"),
        ({"gpu_memory_utilization": 0.9}, "LLM calls this `memory_ratio`"),
        ({"max_num_seqs": 4}, "LLM calls this `max_running_req`"),
        ({"enforce_eager": True}, "set `cuda_graph_max_bs=0`"),
        ({"model": "x"}, "LLM calls this `path`"),
        ({"tokenizer": "x"}, "read from the model's folder"),
        ({"trust_remote_code": True}, "no code of a checkpoint is ever run"),
        ({"torch_dtype": "float32"}, "LLM calls this `dtype`"),
        ({"temperature": 0.5}, "how to sample is set per call, in SamplingParams"),
    ],
)
@pytest.mark.parametrize("face", [LLM, AsyncLLM])
def test_case_132_settings_by_the_names_of_other_engines(face: Any, given: dict[str, Any], hint: str) -> None:
    with pytest.raises(ConfigError, match=hint):
        face(**given)


@pytest.mark.parametrize(
    ("given", "hint"),
    [
        ({"sampling_params": SamplingParams()}, "this is called `params` here"),
        ({"max_tokens": 3}, r"give it in `params`: SamplingParams\(max_tokens=3\)"),
        ({"use_tqdm": False}, "this is called `progress` here"),
        ({"max_new_tokens": 3}, "SamplingParams calls this `max_tokens`"),
        ({"do_sample": True}, "`temperature=0` takes the likeliest token"),
        ({"progess": False}, r"did you mean 'progress'\?"),
    ],
)
def test_case_132_arguments_by_the_names_of_other_engines(llm: LLM, given: dict[str, Any], hint: str) -> None:
    with pytest.raises(UsageError, match=hint):
        llm.generate([IDS], **given)


def test_case_132_chat_answers_what_the_template_writes(llm: LLM) -> None:
    assert llm.tokenizer is not None
    messages = [{"role": "user", "content": "def answer"}]
    prompt = llm.tokenizer.apply_chat_template(messages)
    (wanted,) = llm.generate([prompt], greedy(8), progress=False)
    (one,) = llm.chat(messages, greedy(8), progress=False)
    two = llm.chat([messages, messages], greedy(8), progress=False)
    assert [answer.text for answer in (one, *two)] == [wanted.text] * 3
    assert one.prompt_tokens == len(prompt)
    assert "".join(chunk.text for chunk in llm.stream_chat(messages, greedy(8))) == wanted.text


@pytest.mark.parametrize("make", [list, tuple, iter, lambda turns: (turn for turn in turns)])
def test_case_132_a_conversation_may_be_any_iterable(llm: LLM, make: Any) -> None:
    turns = [{"role": "user", "content": "def answer"}]
    (wanted,) = llm.chat(turns, greedy(4), progress=False)
    assert llm.chat(make(turns), greedy(4), progress=False) == [wanted]
    assert llm.chat(make([make(turns), make(turns)]), greedy(4), progress=False) == [wanted] * 2
    assert "".join(chunk.text for chunk in llm.stream_chat(make(turns), greedy(4))) == wanted.text


class _Model:
    """As a message of a client library: it can be iterated over, and is no mapping."""

    def __iter__(self) -> Iterator[tuple[str, str]]:
        return iter(self.model_dump().items())

    def model_dump(self) -> dict[str, str]:
        return {"role": "user", "content": "def answer"}


def test_case_132_messages_of_client_libraries_are_messages(llm: LLM) -> None:
    wanted = llm.chat([_Model().model_dump()], greedy(4), progress=False)
    assert llm.chat([_Model()], greedy(4), progress=False) == wanted  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("messages", "problem"),
    [
        ("hello", "the messages are 'hello'"),
        ({"role": "user"}, "the messages are {'role': 'user'}"),
        (None, "the messages are None"),
        ([5], "message 5 has no role"),
        (["hello"], "message 'hello' has no role"),
        ([object], "message <class 'object'> has no role"),
        ([[]], "there are no messages"),
        (
            [[{"role": "user", "content": "a"}], [{"content": "b"}]],
            "conversation 1: message {'content': 'b'} has no role",
        ),
    ],
)
def test_case_132_what_is_no_conversation_is_refused_by_name(llm: LLM, messages: Any, problem: str) -> None:
    with pytest.raises(AdmissionError, match=problem):
        llm.chat(messages, greedy(4), progress=False)
    with pytest.raises(AdmissionError):
        llm.stream_chat(messages, greedy(4))


@pytest.mark.parametrize(
    ("given", "hint"),
    [
        ({"sampling_params": SamplingParams()}, "this is called `params` here"),
        ({"use_tqdm": False}, "this is called `progress` here"),
        ({"max_tokens": 3}, r"give it in `params`: SamplingParams\(max_tokens=3\)"),
        ({"max_new_tokens": 3}, "SamplingParams calls this `max_tokens`"),
        (
            {"chat_template_kwargs": {"enable_thinking": False}},
            "give the template's variables as arguments of their own",
        ),
    ],
)
def test_case_132_arguments_of_chat_by_the_names_of_other_engines(llm: LLM, given: dict[str, Any], hint: str) -> None:
    for call in (llm.chat, llm.stream_chat):
        with pytest.raises(UsageError, match=hint):
            call([{"role": "user", "content": "a"}], **given)  # type: ignore[operator]


def test_case_132_answers_are_typed_and_still_mappings(llm: LLM, expected: Any) -> None:
    params = greedy(4, logprobs=2, stop_token_ids=[expected.continuations[0][2]])
    llm.clear_cache()
    first, again = (llm.generate([expected.prompts[0]], params, progress=False)[0] for _ in range(2))
    assert first.token_ids == expected.continuations[0][:3] == first["token_ids"]
    assert (first.finish_reason, first.stop_reason) == ("stop", expected.continuations[0][2])
    assert (first.prompt_tokens, first.cached_tokens, again.cached_tokens) == (5, 0, 4)
    assert "error" not in first and "choices" not in first and first.error is None
    assert dict(first)["text"] == first.text == first.get("text")
    assert first.logprobs is not None
    assert [entry.token_id for entry in first.logprobs] == first.token_ids
    assert all(len(entry.top) == 2 and entry.top[0].text == entry.text for entry in first.logprobs)
    assert first.to_dict()["logprobs"][0]["top"][0]["token_id"] == first.token_ids[0]
    assert len(repr(first)) < 100
    with pytest.raises(KeyError):
        first["no_such_field"]


def test_case_132_stop_reason_is_the_string_that_was_met(llm: LLM, expected: Any) -> None:
    (whole,) = llm.generate([expected.prompts[0]], greedy(16), progress=False)
    params = greedy(16, stop=["#never#", whole.text[4:7]])
    (answer,) = llm.generate([expected.prompts[0]], params, progress=False)
    assert (answer.finish_reason, answer.stop_reason) == ("stop", whole.text[4:7])
    assert whole.stop_reason is None


def test_case_132_several_choices_share_one_prompt(llm: LLM, expected: Any) -> None:
    plain = SamplingParams(temperature=1.0, seed=3, max_tokens=8, ignore_eos=True)
    params = replace(plain, n=3)
    (answer,) = llm.generate([expected.prompts[2]], params, progress=False)
    (single,) = llm.generate([expected.prompts[2]], plain, progress=False)
    assert answer.choices is not None and len(answer.choices) == 3
    assert answer.token_ids == answer.choices[0].token_ids == single.token_ids
    assert len({tuple(choice.token_ids) for choice in answer.choices}) == 3
    assert answer.prompt_tokens == len(expected.prompts[2])
    texts = ["", "", ""]
    for chunk in llm.stream(expected.prompts[2], params):
        texts[chunk.choice] += chunk.text
    assert texts == [choice.text for choice in answer.choices]
    assert len(answer.to_dict()["choices"]) == 3


def test_case_132_prompt_logprobs_are_transformers(llm: LLM, expected: Any, tiny: Callable[[str], Path]) -> None:
    from transformers import AutoModelForCausalLM

    prompt = expected.prompts[1]
    model = AutoModelForCausalLM.from_pretrained(tiny("q3-text"), dtype=torch.float32)
    with torch.inference_mode():
        table = model(torch.tensor([prompt])).logits[0, :-1].log_softmax(-1)
    (scored,) = llm.generate([prompt], SamplingParams(max_tokens=0, prompt_logprobs=2), progress=False)
    assert (scored.token_ids, scored.text, scored.prompt_tokens) == ([], "", len(prompt))
    assert scored.prompt_logprobs is not None and llm.tokenizer is not None
    assert [entry.token_id for entry in scored.prompt_logprobs] == prompt[1:]
    assert [entry.text for entry in scored.prompt_logprobs] == [llm.tokenizer.token_text(token) for token in prompt[1:]]
    got = torch.tensor([entry.logprob for entry in scored.prompt_logprobs])
    torch.testing.assert_close(got, table.gather(1, torch.tensor(prompt[1:])[:, None])[:, 0], atol=1e-3, rtol=1e-3)
    assert [entry.top[0].token_id for entry in scored.prompt_logprobs] == table.argmax(-1).tolist()
