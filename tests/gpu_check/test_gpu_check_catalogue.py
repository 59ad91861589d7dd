"""The checks for an H200, listed here: every backend, pair and reported fault has its checks, and they fit."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from gpu import test_machine, test_marked
from minisgl_core.registry import DeviceFacts
from minisgl_flashinfer.plugin import minisgl_attention_backends
from support.gpu import machine
from support.gpu.backends import prebuilt
from support.gpu.check import ROOT, Check, Context, Failed
from support.gpu.collect import collected, part_of, sessions_of
from support.gpu.command import JOBS_ON_CUDA, QUICK_BUDGET_S
from support.gpu.inner_pytest import marked_files

H200 = DeviceFacts("cuda", sm=90, name="NVIDIA H200", driver="580.1")
ON_A_GPU = {1, 2, 16, 24, 27, 38, 42, 43, 45, 46, 62, 63, 64, 65, 67, 68, 69, 70, 71, 72, 74, 75, 88, 89, 90}
"""The reported faults that one GPU can show."""
PAIRS = {f"{p}+{d}" for p in ("fa", "flashinfer") for d in ("fa", "flashinfer", "cuda_decode")}

MAIN_PAIRS = {"fa+fa", "flashinfer+flashinfer", "fa+cuda_decode"}


@pytest.fixture(scope="module")
def listed() -> Callable[[bool], list[Check]]:
    """``listed(quick)`` on an H200 where every library is installed."""
    return cache(lambda quick: collected(Context(H200, quick, Path(), elsewhere=True)))


def names(found: list[Check], group: str) -> set[str]:
    return {check.name.removeprefix(group + "/") for check in found if check.name.startswith(group + "/")}


@pytest.mark.parametrize("quick", [True, False])
def test_nothing_is_left_out(listed: Callable[[bool], list[Check]], quick: bool) -> None:
    found: list[Check] = listed(quick)
    assert len({check.name for check in found}) == len(found)
    assert set().union(*(check.cases for check in found)) >= ON_A_GPU
    for pair in MAIN_PAIRS if quick else PAIRS:
        assert {f"{pair}/ratio5", f"{pair}/moe"} <= names(found, "bf16")
        assert pair in names(found, "stress") and pair in names(found, "memory")
    assert names(found, "poison") == PAIRS and {f"{pair}/dense" for pair in PAIRS} <= names(found, "bf16")
    wanted = {"attention:fa/fa3", "attention:flashinfer", "attention:cuda_decode", "attention:torch", "graph:cuda"}
    wanted |= {"kv:cuda/cpp", "kv:cuda/triton", "moe:fused", "ops:cuda/cpp", "ops:cuda/triton", "ops:flashinfer"}
    wanted |= {"ops:fused_route", "linear:skinny", "comm:torch_dist"}
    conformance = names(found, "conformance")
    assert wanted <= conformance
    assert not any("fa2" in name or "fa4" in name or "cpu" in name for name in conformance)
    assert {f"plugins/{p}/tests" for p in ("minisgl_cuda", "minisgl_fa", "minisgl_flashinfer", "minisgl_moe")} <= names(
        found, "pytest"
    )
    assert bool(names(found, "sanitizer")) is not quick
    assert {"tp/tests/llm", "launcher", "imports", "versions"} <= {check.name for check in found}


def test_quick_fits_its_budget_and_a_part_of_three_its_share(listed: Callable[[bool], list[Check]]) -> None:
    quick: list[Check] = listed(True)
    by_itself = sum(check.seconds for check in quick if check.alone)
    together = sum(check.seconds for check in quick if not check.alone)
    assert by_itself + together / JOBS_ON_CUDA < QUICK_BUDGET_S
    assert max(sum(check.seconds for check in some) for some in sessions_of(quick).values()) < QUICK_BUDGET_S / 2
    costs = [sum(check.seconds for check in part_of(listed(False), index, 3)) for index in (1, 2, 3)]
    assert max(costs) - min(costs) < 60


def test_tests_that_read_the_memory_of_the_whole_device_are_alone(listed: Callable[[bool], list[Check]]) -> None:
    reading = {path.parent for path in marked_files("gpu", ROOT) if "mem_get_info" in path.read_text()}
    alone = {check.name for check in listed(True) if check.alone}
    assert alone == {f"pytest/{folder.relative_to(ROOT)}" for folder in reading} != set()


def test_checks_of_one_session_share_its_environment(listed: Callable[[bool], list[Check]]) -> None:
    for some in sessions_of(listed(False)).values():
        assert all(check.env == some[0].env for check in some)


def test_quick_leaves_out_kernels_that_are_compiled_for_minutes() -> None:
    (spec,) = minisgl_attention_backends()
    (caps,) = prebuilt(spec, may_compile=False).caps
    assert caps.dtypes == ("bfloat16",) and caps.features == frozenset()
    assert prebuilt(spec, may_compile=True) is spec


@pytest.mark.parametrize("geometry", ["qwen3-0.6b", "qwen3-30b-a3b"])
def test_the_expected_plan_is_what_auto_chooses_on_an_h200(geometry: str, tmp_path: Path) -> None:
    """Resolved for hardware elsewhere, with the table of expectations for GPUs."""
    explained = machine.minisgl("explain", "--geometry", geometry, "--device", "sm90")
    chosen = machine.entries(explained["plan"])
    for entry, found in chosen.items():
        assert found <= machine.GPU_PLAN.get(entry, found), entry
    assert machine.GPU_PLAN.keys() - chosen.keys() <= {"moe", "ops.route"}
    assert ("moe" in chosen) == geometry.endswith("a3b")


def test_a_plan_that_is_not_expected_fails(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    real = machine.minisgl("explain", "--geometry", "qwen3-0.6b", "--device", "cpu")
    monkeypatch.setattr(test_machine, "minisgl", lambda *arguments: real)
    test_machine.test_plan("qwen3-0.6b", context)
    for bucket in real["plan"]["buckets"]:
        if bucket["role"] == "kv":
            bucket["choice"]["name"] = "torch"
    with pytest.raises(Failed, match="kv: torch, expected cpu"):
        test_machine.test_plan("qwen3-0.6b", context)
    real["plan"]["buckets"] = [bucket for bucket in real["plan"]["buckets"] if bucket["role"] != "kv"]
    with pytest.raises(Failed, match="nothing for kv"):
        test_machine.test_plan("qwen3-0.6b", context)
    monkeypatch.setattr(test_machine, "minisgl", lambda *arguments: {"plan": None, "error": "no backend"})
    with pytest.raises(Failed, match="no plan: no backend"):
        test_machine.test_plan("qwen3-0.6b", context)


def test_a_command_that_fails_is_reported_with_its_message() -> None:
    with pytest.raises(Failed, match=r"(?s)explain --geometry nothing --json` ended with 2.*qwen3"):
        machine.minisgl("explain", "--geometry", "nothing")


def test_versions_name_what_is_missing(context: Context, figures: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    test_machine.test_versions(context)
    assert figures()["minisgl-core"]
    on_gpu = replace(context, device=H200)
    monkeypatch.setattr(test_machine, "versions", lambda: {"minisgl-core": "1", "minisgl-cuda": "1"})
    with pytest.raises(Failed, match="not installed: minisgl-fa, minisgl-flashinfer, minisgl-moe"):
        test_machine.test_versions(on_gpu)


def test_the_tests_that_are_selected_by_name_exist() -> None:
    marked = "".join(path.read_text() for path in marked_files("gpu", ROOT))
    for name in test_marked.CHECKED_HERE[1:]:
        assert f"def {name}(" in marked
    assert "Suite):" in marked  # whose tests are called test_conforms
    for selection in test_marked.SELECTIONS.values():
        words = set(re.findall(r"\w+", selection.keyword)) - {"and", "or", "not", "bfloat16", "huge", "9001"}
        text = "".join((ROOT / file).read_text() for file in selection.files)
        assert words and all(re.search(rf"def test\w*{word}|def {word}", text) for word in words)
