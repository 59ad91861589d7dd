"""``--grammar`` and the key ``grammar`` of JSON lines."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from minisgl_core.cli.app import main

pytest.importorskip("llguidance")
pytest.importorskip("minisgl_grammar")
pytest.importorskip("minisgl_cpu_sim")

ENGINE = ["--num-page-override", "64", "--max-seq-len-override", "60", "--device", "cpu", "--dtype", "float32"]


@pytest.mark.parametrize(
    ("flag", "pattern"),
    [
        ("regex=[a-c]{3}", "[a-c]{3}"),
        ('choice=["yes", "no"]', "yes|no"),
        ("json_schema=@schema.json", "true|false"),
    ],
)
def test_an_answer_has_the_form_of_the_flag(
    flag: str,
    pattern: str,
    tiny: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "schema.json").write_text('{"type": "boolean"}')
    monkeypatch.chdir(tmp_path)
    code = main(["generate", "--model", str(tiny("q3-text")), "--prompt", "x", "--grammar", flag, "--json", *ENGINE])
    assert code == 0
    answer = json.loads(capsys.readouterr().out)
    assert re.fullmatch(pattern, answer["text"])


@pytest.mark.parametrize(
    ("flag", "says"),
    [
        ("regex=(ab", "unclosed group"),
        ("yaml=x", "a grammar has one of"),
        ("choice=yes", "no JSON"),
        ("json_schema=@missing.json", "cannot be read"),
        ("json_object=x", "json_object is true"),
    ],
)
def test_a_wrong_flag_is_refused_in_one_line(
    flag: str, says: str, tiny: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(["generate", "--model", str(tiny("q3-text")), "--prompt", "x", "--grammar", flag, *ENGINE])
    assert code == 2
    assert says in capsys.readouterr().err


def test_a_line_has_a_grammar_of_its_own(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    lines = [{"prompt": "x", "grammar": {"regex": "[0-9]{2}"}}, {"prompt": "y", "grammar": {"choice": ["a"]}}]
    given, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    given.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert (
        main(["generate", "--model", str(tiny("q3-text")), "--input", str(given), "--output", str(out), *ENGINE]) == 0
    )
    texts = [
        json.loads(line)["text"] for line in sorted(out.read_text().splitlines(), key=lambda t: json.loads(t)["id"])
    ]
    assert re.fullmatch("[0-9]{2}", texts[0]) and texts[1] == "a"
