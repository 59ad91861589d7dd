"""``minisgl generate --input FILE --output FILE``: requests and answers as JSON lines."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from minisgl_core.cli.app import main
from minisgl_core.core import SamplingParams
from minisgl_core.llm import LLM

Tiny = Callable[[str], Path]
Capture = pytest.CaptureFixture[str]
PROGRAM = str(Path(sys.executable).with_name("minisgl"))
SMALL = ("--num-page-override", "256", "--max-seq-len-override", "128", "--max-tokens", "6")


pytestmark = pytest.mark.usefixtures("no_settings")


def write(name: str, *lines: object) -> None:
    Path(name).write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))


def read(name: str) -> dict[str | int, dict[str, Any]]:
    answers = [json.loads(line) for line in Path(name).read_text().splitlines()]
    assert len({answer["id"] for answer in answers}) == len(answers)
    return {answer["id"]: answer for answer in answers}


def call(model: Path, *more: str) -> int:
    return main(["generate", "--input", "in.jsonl", "--output", "out.jsonl", "--model", str(model), *SMALL, *more])


def test_every_kind_of_prompt_is_answered_as_llm_answers_it(tiny: Tiny, capsys: Capture) -> None:
    model = tiny("q3-text")
    messages = [{"role": "user", "content": "hello"}]
    write(
        "in.jsonl",
        {"id": "text", "prompt": "hello there"},
        {"prompt": [5, 6, 7], "max_tokens": 3, "ignore_eos": True},
        "",
        {"id": "chat", "messages": messages, "temperature": 1, "seed": 7, "n": 2, "logprobs": 1},
    )
    assert call(model, "--ignore-eos") == 0
    with LLM(model, num_page_override=256, max_seq_len_override=128, progress=False) as llm:
        params = SamplingParams(max_tokens=6, ignore_eos=True)
        own = SamplingParams(max_tokens=6, ignore_eos=True, temperature=1, seed=7, n=2, logprobs=1)
        (text,) = llm.generate(["hello there"], params)
        (ids,) = llm.generate([[5, 6, 7]], SamplingParams(max_tokens=3, ignore_eos=True))
        (chat,) = llm.chat(messages, own)
    found = read("out.jsonl")
    assert found.keys() == {"text", 2, "chat"}
    for key, expected in (("text", text), (2, ids), ("chat", chat)):
        assert found[key]["token_ids"] == expected.token_ids and found[key]["text"] == expected.text
        assert found[key]["prompt_tokens"] == expected.prompt_tokens
    assert [one["token_ids"] for one in found["chat"]["choices"]] == [one.token_ids for one in chat.choices or ()]
    _, summary = capsys.readouterr().err.splitlines()
    assert summary.startswith("3 answered (21 tokens in ") and summary.endswith(" tokens/s)")


def test_text_and_messages_agree_under_chat(tiny: Tiny) -> None:
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]
    write("in.jsonl", {"id": 1, "prompt": "hello"}, {"id": 2, "messages": messages})
    assert call(tiny("q3-text"), "--chat", "--system", "be brief") == 0
    found = read("out.jsonl")
    assert found[1]["token_ids"] == found[2]["token_ids"]


BAD = {
    '{"prompt": "x"': "it is no JSON",
    '"text"': 'it is "text"; write',
    '{"prompt": "x", "max_new_tokens": 3}': "SamplingParams calls this `max_tokens`",
    '{"prompt": "x", "temprature": 3}': "unknown key 'temprature'; did you mean 'temperature'?",
    '{"prompt": "x", "temperature": -1}': "sampling parameter `temperature` is -1",
    '{"prompt": "x", "temperature": NaN}': "sampling parameter `temperature` is nan",
    '{"prompt": ""}': 'prompt is ""; give a text',
    '{"prompt": [1, "a"]}': "give a text or a list of token ids",
    '{"prompt": [true]}': "give a text or a list of token ids",
    '{"messages": ["a"]}': "give messages such as",
    '{"messages": [{"content": 1}]}': "",
    '{"prompt": "x", "messages": [{"role": "user", "content": "x"}]}': "both prompt and messages are there",
    '{"id": 1.5, "prompt": "x"}': "id is 1.5; give a text or an integer",
    '{"id": "good", "prompt": "x"}': "id 'good' is that of line 1 too",
    '{"prompt": [999999999]}': "999999999",
    f'{{"prompt": {[7] * 200}}}': "200",
}


def test_bad_lines_are_named_by_number_and_cost_no_other(tiny: Tiny, capsys: Capture) -> None:
    write("in.jsonl", {"id": "good", "prompt": "hello"}, *BAD, {"id": "last", "prompt": [1, 2]})
    assert call(tiny("q3-text")) == 1
    assert read("out.jsonl").keys() == {"good", "last"}
    err = capsys.readouterr().err
    for number, why in enumerate(BAD.values(), 2):
        (line,) = [line for line in err.splitlines() if line.startswith(f"error: line {number}: ")]
        assert why in line
    assert err.splitlines()[-1].endswith(f", {len(BAD)} failed")


def test_what_is_answered_is_skipped_and_a_cut_line_is_repaired(tiny: Tiny, capsys: Capture) -> None:
    write("in.jsonl", *({"id": key, "prompt": [5, 6, 7 + key]} for key in range(4)))
    model = tiny("q3")
    assert call(model) == 0
    whole = Path("out.jsonl").read_bytes()
    expected = {key: one["token_ids"] for key, one in read("out.jsonl").items()}
    lines = whole.splitlines(keepends=True)
    for kept in (b"".join(lines[:2]) + lines[2][:-9], b"".join(lines[:2]), b"".join(lines[:2])[:-1], b""):
        Path("out.jsonl").write_bytes(kept)
        assert call(model) == 0
        assert {key: one["token_ids"] for key, one in read("out.jsonl").items()} == expected
        assert ("2 answered before" in capsys.readouterr().err.splitlines()[-1]) == bool(kept)
    assert call(Path("./no/model/is/needed")) == 0
    assert capsys.readouterr().err == "0 answered, 4 answered before\n"


def test_a_file_of_something_else_is_not_touched(tiny: Tiny, capsys: Capture) -> None:
    write("in.jsonl", {"id": 1, "prompt": [5]})
    Path("out.jsonl").write_text("my notes\nmore of them\n")
    assert call(tiny("q3")) == 2
    assert "line 1 of output file 'out.jsonl' is no answer" in capsys.readouterr().err
    assert Path("out.jsonl").read_text() == "my notes\nmore of them\n"
    assert main(["generate", "--input", "in.jsonl", "--output", "./in.jsonl"]) == 2
    assert "--input and --output are one file" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [["--output", "x"], ["--input", "-", "-p", "x"], ["--input", "-", "--json"], ["--input", "./no/where.jsonl"]],
)
def test_a_mixture_is_refused(arguments: list[str], capsys: Capture) -> None:
    assert main(["generate", *arguments]) == 2
    assert capsys.readouterr().err.startswith("error: ")


def test_pipes_and_a_full_disk(tiny: Tiny) -> None:
    program = [PROGRAM, "generate", "--input", "-", "--model", str(tiny("q3")), *SMALL]
    lines = '{"id": "a", "prompt": [1, 2]}\r\n{"id": "b", "prompt": [3]}'
    done = subprocess.run(program, input=lines, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert {json.loads(line)["id"] for line in done.stdout.splitlines()} == {"a", "b"}
    full = [*program, "--output", "/dev/full"]
    done = subprocess.run(full, input=lines, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "No space left on device" in done.stderr and "internal" not in done.stderr
