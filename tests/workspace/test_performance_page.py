"""docs/performance.md, the raw results and what is shipped say the same."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import performance_page
import pytest
from marked import rewritten

from minisgl_core.bench.plot import bar_chart

ROOT = performance_page.ROOT
TEXT = performance_page.PAGE.read_text(encoding="utf-8")
MEASURED = re.compile(
    r"\d[\d.,]*\s?(?:us|ms|TB/s|GB/s|TFLOP/s|tok/s|tokens per second|tokens/s)\b|\d[\d.]*\s?(?:%|times)"
)
SHOWN = [path.name for path in performance_page.measured_files() if not path.name.startswith("gpu_check")]
NOT_SHOWN = ("gpu_decode_h200.json", "h200_fuse_options.json")
"""Older or explained by its own note: nothing but their origin is on the page."""


def prose(page: str) -> str:
    """All that is written by hand."""
    return re.sub(r"<!-- begin (.*?) -->.*?<!-- end \1 -->", "", page, flags=re.DOTALL)


def test_the_tables_are_those_of_the_raw_results() -> None:
    assert rewritten(TEXT, performance_page.parts()) == TEXT, "run `make performance-page` and commit the page"


def test_prose_holds_no_measured_figure() -> None:
    definitions = ("100 %",)
    found = [text for text in MEASURED.findall(prose(TEXT)) if text not in definitions]
    assert found == []
    assert MEASURED.findall("in 3.5 us, 20 %, 4.2 TB/s and 1,024 tok/s") == [
        "3.5 us",
        "20 %",
        "4.2 TB/s",
        "1,024 tok/s",
    ]


def test_the_readme_holds_no_measured_figure() -> None:
    assert MEASURED.findall((ROOT / "README.md").read_text(encoding="utf-8")) == []


def changed(value: Any) -> Any:
    """JSON data with every number with a fraction made larger."""
    if isinstance(value, dict):
        return {key: changed(item) for key, item in value.items()}
    if isinstance(value, list):
        return [changed(item) for item in value]
    return value * 1.5 if isinstance(value, float) else value


@pytest.mark.parametrize("name", [name for name in SHOWN if name not in NOT_SHOWN])
def test_a_changed_result_is_noticed(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = tmp_path / "results"
    shutil.copytree(performance_page.RESULTS, results)
    lines = (results / name).read_text().splitlines() if name.endswith(".jsonl") else [(results / name).read_text()]
    (results / name).write_text("\n".join(json.dumps(changed(json.loads(line))) for line in lines) + "\n")
    monkeypatch.setattr(performance_page, "RESULTS", results)
    assert rewritten(TEXT, performance_page.parts()) != TEXT


@pytest.mark.parametrize("name", ["qwen3-0.6b", "qwen3-14b", "qwen3-30b-a3b"])
def test_the_charts_are_drawn_from_the_raw_results(name: str) -> None:
    found = performance_page.result(f"h200_{name}-ablation.json")
    bars = [
        (row["variant"] if row["mode"] == found["mode"] else f"{row['variant']} ({row['mode']})", row["relative"])
        for row in found["rows"]
        if row["relative"] is not None
    ]
    drawn = (ROOT / "docs" / "figures" / f"h200_{name}-ablation.svg").read_text()
    plain = bar_chart(f"offline, {name}: tokens per second, relative to the default", bars)
    assert numbers(drawn) == numbers(plain)


def numbers(svg: str) -> list[str]:
    """The labels of the bars, without the stars at those of other runs."""
    return [text.removesuffix(" *") for text in re.findall(r">([^<]+)</text>", svg)[1:]]


def test_the_gpu_check_page_counts_what_the_report_counts() -> None:
    page = (ROOT / "docs" / "gpu-check.md").read_text(encoding="utf-8")
    report = performance_page.result("gpu_check_h200.json")
    counts = report["counts"]
    assert f"{counts['ok']} checks\nok" in page or f"{counts['ok']} checks ok" in page.replace("\n", " ")
    assert (counts.get("failed", 0), counts.get("unfinished", 0)) == (0, 0) and "none failed, none unfinished" in page
