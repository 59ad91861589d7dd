"""docs/structured-output.md: its example runs, and its table has every kind of grammar."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from minisgl_core import SamplingParams
from minisgl_core.plugin_api import GRAMMAR_KINDS

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "structured-output.md").read_text(encoding="utf-8")


def test_every_kind_of_grammar_is_in_the_table() -> None:
    rows = re.findall(r"^\| `(\{.*?\})` \|", PAGE, re.MULTILINE)
    assert sorted(next(iter(ast.literal_eval(row))) for row in rows) == sorted(GRAMMAR_KINDS)
    for row in rows:
        if "..." not in row:
            assert SamplingParams(grammar=ast.literal_eval(row)).grammar is not None


def test_the_example_runs(tiny: Callable[[str], Path]) -> None:
    pytest.importorskip("llguidance")
    pytest.importorskip("minisgl_grammar")
    pytest.importorskip("minisgl_cpu_sim")
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    settings = "num_page_override=256, max_seq_len_override=250, progress=False"
    code = code.replace('LLM("demo")', f"LLM({str(tiny('q3-text'))!r}, {settings})").replace(
        "max_tokens=100", "max_tokens=200"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert re.match(r'\{\s*"city"', done.stdout)
