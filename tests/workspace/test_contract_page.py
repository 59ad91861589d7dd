"""docs/reference/contract.md lists every fact of the contract, with a test that exists."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

from minisgl_core.plugin_api import BackendSpec, Caps, PluginInfo
from minisgl_core.registry import Choice, Plan, discover

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "reference" / "contract.md").read_text(encoding="utf-8")
RECORDS: dict[str, Any] = {record.__name__: record for record in (PluginInfo, BackendSpec, Caps, Plan, Choice)}


def rows(section: str) -> dict[str, str]:
    """Fact -> test, of one table of the page."""
    text = PAGE.partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    return dict(re.findall(r"^\| `(\w+)` \| [^|]+ \| `([^`]+)` \|$", text, re.MULTILINE))


@pytest.mark.parametrize("record", RECORDS)
def test_each_fact_of_a_record_is_on_the_page_and_no_other(record: str) -> None:
    assert set(rows(record)) == {field.name for field in fields(RECORDS[record])}


@pytest.mark.parametrize("record", RECORDS)
def test_each_fact_names_a_test_that_exists(record: str) -> None:
    for fact, test in rows(record).items():
        file, _, function = test.partition("::")
        source = (ROOT / file).read_text(encoding="utf-8") if (ROOT / file).is_file() else ""
        assert re.search(rf"^def {function}\(", source, re.MULTILINE), f"{record}.{fact}: there is no {test}"


def test_a_summary_is_a_line_of_the_list_of_plugins(capsys: pytest.CaptureFixture[str]) -> None:
    from minisgl_core.cli.app import main

    assert main(["plugins"]) == 0
    text = capsys.readouterr().out
    assert all(item.spec.summary in text for plugin in discover().plugins for item in plugin.candidates)


@pytest.mark.parametrize("graphs", [0, 2])
def test_the_engine_runs_as_its_plan_says(graphs: int, tiny: Callable[[str], Path]) -> None:
    pytest.importorskip("minisgl_cpu_sim")
    from minisgl_core.engine.backend_factory import capture_sizes
    from minisgl_core.llm import LLM

    settings: dict[str, Any] = {"device": "cpu", "max_running_req": 2, "num_page_override": 16, "progress": False}
    with LLM(tiny("q3"), page_size=16, dtype=torch.float32, cuda_graph_max_bs=graphs, **settings) as llm:
        plan, engine = llm.plan, llm.engine
        assert (plan.page_size, plan.kv_layout, plan.graph, plan.dtype) == (16, "NHD", graphs > 0, "float32")
        assert engine.kv_cache.k_cache(0).shape[1] == 16 and engine.kv_cache.k_cache(0).dtype == torch.float32
        assert engine.kv_cache.layout == "NHD"
        assert capture_sizes(engine.config, plan) == ((1, 2) if graphs else ())
