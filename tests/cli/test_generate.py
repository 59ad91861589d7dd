from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from minisgl_core.cli.app import main
from minisgl_core.cli.start import plan_line
from minisgl_core.core import SamplingParams
from minisgl_core.engine import EngineConfig
from minisgl_core.llm.arguments import SETTINGS
from minisgl_core.registry import Plan
from minisgl_core.settings.schema import EngineSettings
from minisgl_core.tokenizer import load_tokenizer

Tiny = Callable[[str], Path]
Capture = pytest.CaptureFixture[str]

SMALL = ("--num-page-override", "256", "--max-seq-len-override", "128", "--ignore-eos")


pytestmark = pytest.mark.usefixtures("no_settings", "one_thread")


def ids(tokens: list[int]) -> str:
    return ",".join(map(str, tokens))


def run(capsys: Capture, *arguments: str) -> Any:
    """The JSON document that generate prints; nothing else may be on standard output."""
    assert main(["generate", *arguments, "--json", "--plan", *SMALL]) == 0
    return json.loads(capsys.readouterr().out)


def test_json_of_one_prompt_equals_transformers(tiny: Tiny, answers: Callable[[str], Any], capsys: Capture) -> None:
    expected = answers("q3")
    data = run(capsys, "--model", str(tiny("q3")), "--prompt-ids", ids(expected.prompts[1]), "--max-tokens", "8")
    assert list(data) == ["text", "token_ids", "finish_reason", "usage", "backends", "plan"]
    assert data["token_ids"] == expected.continuations[1][:8]
    assert (data["text"], data["finish_reason"]) == ("", "length")
    assert data["usage"] == {"prompt_tokens": 17, "completion_tokens": 8, "total_tokens": 25}
    assert Plan.from_json(data["plan"]).architecture == "Qwen3ForCausalLM"


def test_json_of_several_prompts(tiny: Tiny, answers: Callable[[str], Any], capsys: Capture) -> None:
    expected = answers("q3")
    prompts = [word for prompt in expected.prompts for word in ("--prompt-ids", ids(prompt))]
    data = run(capsys, "--model", str(tiny("q3")), *prompts, "--max-tokens", "4")
    assert list(data) == ["outputs", "usage", "backends", "plan"]
    assert [output["token_ids"] for output in data["outputs"]] == [tokens[:4] for tokens in expected.continuations]
    assert all(list(output) == ["text", "token_ids", "finish_reason", "usage"] for output in data["outputs"])
    assert data["usage"] == {"prompt_tokens": 62, "completion_tokens": 12, "total_tokens": 74}


def test_text_is_the_text_of_the_ids_streamed_or_not(tiny: Tiny, capsys: Capture) -> None:
    model = str(tiny("q3-text"))
    data = run(capsys, "--model", model, "--prompt", "hello there", "--max-tokens", "12")
    tokenizer = load_tokenizer(model)
    assert tokenizer is not None
    assert data["usage"]["prompt_tokens"] == len(tokenizer.encode("hello there"))
    assert data["text"] == tokenizer.decode(data["token_ids"])
    assert main(["generate", "--model", model, "--prompt", "hello there", "--max-tokens", "12", *SMALL]) == 0
    captured = capsys.readouterr()
    assert captured.out == data["text"] + "\n"
    plan, summary = captured.err.splitlines()
    assert plan == plan_line(Plan.from_json(data["plan"]))
    assert summary.startswith("12 tokens in ") and summary.endswith(", finished by length")


def test_a_model_without_tokenizer_streams_ids(tiny: Tiny, answers: Callable[[str], Any], capsys: Capture) -> None:
    expected = answers("q3")
    prompt = ids(expected.prompts[0])
    assert main(["generate", "--model", str(tiny("q3")), "--prompt-ids", prompt, "--max-tokens", "5", *SMALL]) == 0
    assert capsys.readouterr().out.split() == [str(token) for token in expected.continuations[0][:5]]


def test_answers_of_several_prompts_are_printed_under_their_prompts(tiny: Tiny, capsys: Capture) -> None:
    call = ["generate", "--model", str(tiny("q3")), "--prompt-ids", "5", "--prompt-ids", ids([7] * 40)]
    assert main([*call, "--max-tokens", "2", *SMALL]) == 0
    captured = capsys.readouterr()
    first, _, second, _ = captured.out.splitlines()
    assert first == "--- '[5]'"
    assert second == f"--- '{str([7] * 40)[:60]}...'"
    _, *ended, total = captured.err.splitlines()
    assert ended == ["prompt 0: 2 tokens, finished by length", "prompt 1: 2 tokens, finished by length"]
    assert total.startswith("4 tokens in ") and total.endswith(" tokens/s")


def test_an_empty_answer_among_several_is_printed_empty(tiny: Tiny, capsys: Capture) -> None:
    call = ("--model", str(tiny("q3-text")), "--prompt", "hello", "--max-tokens", "4")
    stop = run(capsys, *call)["text"][0]
    assert main(["generate", *call, "--prompt", "hello", "--stop", stop, *SMALL]) == 0
    assert capsys.readouterr().out == "--- 'hello'\n\n" * 2


def test_chat_puts_the_prompt_into_the_template_once(tiny: Tiny, capsys: Capture) -> None:
    model = str(tiny("q3-text"))
    tokenizer = load_tokenizer(model)
    assert tokenizer is not None
    common = ("--model", model, "--max-tokens", "6")
    data = run(capsys, *common, "--prompt", "hi", "--chat", "--system", "be brief")
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    by_hand = tokenizer.apply_chat_template(messages)
    assert data["usage"]["prompt_tokens"] == len(by_hand)
    assert data["token_ids"] == run(capsys, *common, "--prompt-ids", ids(by_hand))["token_ids"]


@pytest.mark.parametrize("way", ["stdin", "dash", "file"])
def test_piped_text_and_files_are_prompts_without_their_last_line_end(
    way: str, tiny: Tiny, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = ["--model", str(tiny("q3-text")), "--max-tokens", "3"]
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\nthere\n"))
    Path("prompt.txt").write_text("hello\nthere\n")
    source = {"stdin": [], "dash": ["--prompt-file", "-"], "file": ["--prompt-file", "prompt.txt"]}[way]
    assert run(capsys, *call, *source) == run(capsys, *call, "--prompt", "hello\nthere")


def test_a_stop_text_ends_the_answer_before_it(tiny: Tiny, capsys: Capture) -> None:
    call = ("--model", str(tiny("q3-text")), "--prompt", "hello", "--max-tokens", "12")
    whole = run(capsys, *call)["text"]
    stop = whole[4:6]
    data = run(capsys, *call, "--stop", stop)
    assert data["text"] == whole[: whole.index(stop)]
    assert data["finish_reason"] == "stop"


def test_sampling_depends_on_the_seed_alone(tiny: Tiny, capsys: Capture) -> None:
    call = ("--model", str(tiny("q3")), "--prompt-ids", "5,6", "--max-tokens", "8", "--temperature", "2")
    greedy = run(capsys, *call[:-2])["token_ids"]
    first, again, other = (run(capsys, *call, "--seed", seed)["token_ids"] for seed in ("3", "3", "4"))
    assert first == again
    assert first != other and first != greedy
    assert run(capsys, *call, "--top-k", "1")["token_ids"] == greedy


def test_settings_come_from_flags_environment_and_file(
    tiny: Tiny, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("minisgl.toml").write_text(
        f'[model]\npath = "{tiny("q3")}"\ndtype = "bfloat16"\n'
        '[engine]\npage_size = 16\n[backends]\nattention = "torch"\n'
    )
    monkeypatch.setenv("MINISGL_PAGE_SIZE", "32")
    plan = run(capsys, "--prompt-ids", "1,2", "--max-tokens", "1")["plan"]
    assert (plan["dtype"], plan["page_size"], plan["buckets"][0]["choice"]["name"]) == ("bfloat16", 32, "torch")
    flags = ("--dtype", "float32", "--page-size", "64", "--backend", "attention=cpu,torch")
    plan = run(capsys, "--prompt-ids", "1,2", "--max-tokens", "1", *flags)["plan"]
    assert (plan["dtype"], plan["page_size"], plan["buckets"][0]["choice"]["name"]) == ("float32", 64, "cpu")


def test_every_setting_of_the_engine_can_be_reached() -> None:
    known = {field.name for field in fields(EngineConfig)} | SETTINGS
    by_other_names = {
        "model_path": "--model",
        "tp_info": "--tp-size",
        "dtype": "--dtype",
        "backends": "--backend",
        "backend_options": "[backends.options]",
        "allow_plugins": "[plugins]",
        "deny_plugins": "[plugins]",
        "record": "--record",
        "record_role": "--record-role",
        "record_steps": "--record-steps",
        "record_max_mb": "--record-max-mb",
        "shadow": "[backends.shadow]",
    }
    of_programs = {"plan", "progress", "cuda_graph_modes", "observer", "distributed_host"}
    assert known - by_other_names.keys() - of_programs == EngineSettings.model_fields.keys() - {"tp_size"}


def test_the_defaults_that_help_states_are_those_of_sampling_params(capsys: Capture) -> None:
    assert main(["generate", "--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    names = [
        "max_tokens",
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
    ]
    for name in names:
        option = text.partition(f"--{name.replace('_', '-')} ")[2].partition(" --")[0]
        assert option.endswith(f"[{getattr(SamplingParams(), name):g}]")
