"""Versions, plans, imports, and the process that starts the ranks."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
import torch

from minisgl_core.registry import discover
from support.child_env import child_env
from support.driver import greedy
from support.gpu.check import Context, Failed, expect
from support.gpu.machine import CPU_PLAN, GPU_PLAN, entries, file_of, minisgl, nvcc_release, versions
from support.gpu.serving import answers, serve
from support.make_checkpoints import ensure_checkpoint

pytestmark = pytest.mark.gpu
NEEDED = {"minisgl-core", "minisgl-cuda", "minisgl-fa", "minisgl-flashinfer", "minisgl-moe"}
IMPORTS = """
import importlib, json, pkgutil, sys
import torch
from minisgl_core.registry import discover
failed, imported = {}, 0
modules = [record.entry_point.partition("=")[2].strip() for record in discover().plugins]
for root in dict.fromkeys(["minisgl_core", *(name.partition(".")[0] for name in modules)]):
    package = importlib.import_module(root)
    for module in pkgutil.walk_packages(package.__path__, root + ".", onerror=lambda name: None):
        if module.name.endswith("__main__"):
            continue
        try:
            importlib.import_module(module.name)
            imported += 1
        except ImportError as error:
            failed[module.name] = str(error)
print(json.dumps({"initialized": torch.cuda.is_initialized(), "imported": imported, "failed": failed}))
"""
LAUNCHER = """
import json, subprocess, sys
import torch
from minisgl_core.llm import LLM, ranks

model, device = sys.argv[1:]
seen, start = [], subprocess.Popen

class Observed(start):
    def __init__(self, command, **options):
        if "minisgl_core.llm.worker" in command:
            seen.append(torch.cuda.is_initialized())
        super().__init__(command, **options)

ranks.subprocess.Popen = Observed
prompt, tokens, error = [5, 6, 7], None, ""
try:
    with LLM(model, tp_size=2, device=device, dtype="float32", num_page_override=64, max_running_req=2,
             max_seq_len_override=128, progress=False, backends={"attention": "torch"}) as llm:
        tokens = llm.generate([prompt], progress=False)[0]["token_ids"][:4]
except Exception as problem:
    error = f"{type(problem).__name__}: {problem}"
print(json.dumps({"initialized": seen, "tokens": tokens, "error": error}))
"""


def last_line_of(program: str, *arguments: str) -> dict[str, Any]:
    """The JSON that a program prints as its last line, in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        env=child_env(), capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        errors = done.stderr.strip().splitlines()[-8:]
        raise Failed("\n".join([f"exit code {done.returncode}", *errors]), pytrace=False)
    printed: dict[str, Any] = json.loads(lines[-1])
    return printed


@pytest.mark.check(seconds=10.0)
def test_versions(context: Context) -> None:
    """All of our plugins load, and the libraries name their versions."""
    failures = [f"{plugin.distribution}: {plugin.failure}" for plugin in discover().failures()]
    expect(not failures, "plugins that did not load:\n" + "\n".join(failures))
    found = versions()
    context.note(device=context.device.name or context.kind, driver=context.device.driver or "none", **found)
    context.note(cuda=torch.version.cuda or "none", nvcc=nvcc_release())
    if context.kind == "cuda":
        missing = sorted(NEEDED - found.keys())
        expect(not missing, f"not installed: {', '.join(missing)}")
        context.note(flash_attn_interface=file_of("flash_attn_interface"))


@pytest.mark.check(seconds=5.0)
@pytest.mark.parametrize(
    "geometry", ["qwen3-0.6b", pytest.param("qwen3-30b-a3b", marks=pytest.mark.check(cases=(76,)))]
)
def test_plan(geometry: str, context: Context) -> None:
    """`minisgl explain` gives every plan entry a backend that is made for this device."""
    explained = minisgl("explain", "--geometry", geometry, "--device", context.kind, "--no-calibrated")
    expect(explained["plan"] is not None, f"no plan: {explained['error']}")
    chosen = entries(explained["plan"])
    expected = GPU_PLAN if context.kind == "cuda" else CPU_PLAN
    wrong = [
        f"{entry}: {', '.join(sorted(found))}, expected {' or '.join(sorted(expected[entry]))}"
        for entry, found in chosen.items()
        if entry in expected and not found <= expected[entry]
    ]
    names = {entry: "+".join(sorted(found)) for entry, found in chosen.items()}
    context.note(page_size=explained["plan"]["page_size"], **names)
    expect(not wrong, "\n".join([f"the plan of {geometry}:", *wrong]))
    absent = sorted(entry for entry in expected if entry not in chosen and entry not in ("moe", "ops.route"))
    expect(not absent, f"the plan of {geometry} has nothing for {', '.join(absent)}")


@pytest.mark.check(seconds=20.0, cases=(88,))
def test_imports(context: Context) -> None:
    """Importing every module of every installed plugin and of the core leaves CUDA alone."""
    printed = last_line_of(IMPORTS)
    expect(not printed["initialized"], "CUDA is initialised after importing our packages")
    failed = printed["failed"]
    context.note(modules=printed["imported"], without_their_library=len(failed), failed=failed)


@pytest.mark.check(seconds=30.0, cases=(88,))
def test_launcher(context: Context) -> None:
    """``LLM(tp_size=2)`` starts its ranks before it touches CUDA; with two devices the answer is that of one."""
    model = ensure_checkpoint("q3")
    printed = last_line_of(LAUNCHER, str(model), context.kind)
    count = len(printed["initialized"])
    expect(count == 1, f"{count} ranks were started, expected 1 in addition to the first")
    expect(not any(printed["initialized"]), "CUDA was initialised in the launcher before the ranks were started")
    if context.kind == "cuda" and context.device.count < 2:
        context.note(answers="not compared: one device")
        return
    expect(not printed["error"], printed["error"])
    with serve(context, model) as llm:
        (alone,) = answers(llm, [[5, 6, 7]], greedy(4))
    expect(printed["tokens"] == alone, f"two ranks answer {printed['tokens']}, one answers {alone}")
    context.note(answers="equal")
