"""What must not be left behind, and what must not happen too early."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any, Final

from .checks import Check, Failed, Here, expect
from .parity import AttentionPair

__all__ = ["checks"]

ROUNDS: Final = 3
GROWTH_BYTES: Final = 2**20
"""Between the second engine and the last: nothing but the allocator's rounding."""
WORKSPACE_BYTES: Final = 256 * 2**20
"""What libraries may keep after the first engine."""
POOL_TOKENS: Final = {"cuda": 1 << 19, "cpu": 1 << 12}
"""On a GPU the pool is far larger than any workspace, so that one that stays is seen."""

_IMPORTS = """
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
_LAUNCHER = """
import json, subprocess, sys
import torch
from minisgl_core.llm import LLM, ranks

model, device = sys.argv[1:]
seen, start = [], subprocess.Popen

class Watched(start):
    def __init__(self, command, **options):
        if "minisgl_core.llm.worker" in command:
            seen.append(torch.cuda.is_initialized())
        super().__init__(command, **options)

ranks.subprocess.Popen = Watched
prompt, tokens, error = [5, 6, 7], None, ""
try:
    with LLM(model, tp_size=2, device=device, dtype="float32", num_page_override=64, max_running_req=2,
             max_seq_len_override=128, progress=False, backends={"attention": "torch"}) as llm:
        tokens = llm.generate([prompt], progress=False)[0]["token_ids"][:4]
except Exception as problem:
    error = f"{type(problem).__name__}: {problem}"
print(json.dumps({"initialized": seen, "tokens": tokens, "error": error}))
"""


def checks(pairs: Sequence[AttentionPair]) -> list[Check]:
    """Imports, the launcher, and memory with each pair of attention backends."""
    found = [
        Check("imports", untouched_by_imports, 20.0, cases=(88,)),
        Check("launcher", untouched_by_the_launcher, 30.0, cases=(88,)),
        Check("memory/torch", partial(memory_comes_back, {"prefill": "torch", "decode": "torch"}, "float32"), 20.0),
    ]
    for pair in pairs:
        run, name = partial(memory_comes_back, pair.backends, "bfloat16"), f"memory/{pair.name}"
        found.append(Check(name, run, 12.0, session="memory/pairs", quick=pair.main, needs=pair.needs))
    return found


def _told_by(program: str, *arguments: str) -> dict[str, Any]:
    """What a program prints as its last line, in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:] = {sys.path!r}\n{program}", *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        raise Failed("\n".join([f"exit code {done.returncode}", *done.stderr.strip().splitlines()[-8:]]))
    told: dict[str, Any] = json.loads(lines[-1])
    return told


def untouched_by_imports(here: Here) -> dict[str, Any]:
    """Importing every module of every installed plugin and of the core leaves CUDA alone."""
    told = _told_by(_IMPORTS)
    expect(not told["initialized"], "CUDA is initialised after importing our packages")
    return {"modules": told["imported"], "without_their_library": len(told["failed"]), "failed": told["failed"]}


def untouched_by_the_launcher(here: Here) -> dict[str, Any]:
    """``LLM(tp_size=2)`` starts its ranks before it touches CUDA; with two devices the answer is that of one."""
    from .models import tiny_checkpoint
    from .serving import answers, greedy, serve

    model = tiny_checkpoint("q3")
    told = _told_by(_LAUNCHER, str(model), here.kind)
    expect(len(told["initialized"]) == 1, f"{len(told['initialized'])} ranks were started, expected 1 beside the first")
    expect(not any(told["initialized"]), "CUDA was initialised in the launcher before the ranks were started")
    if here.kind == "cuda" and here.device.count < 2:
        return {"answers": "not compared: one device"}
    expect(not told["error"], told["error"])
    with serve(here, model) as llm:
        (alone,) = answers(llm, [[5, 6, 7]], greedy(4))
    expect(told["tokens"] == alone, f"two ranks answer {told['tokens']}, one answers {alone}")
    return {"answers": "equal"}


def _forget_workspaces(here: Here) -> None:
    """cuBLAS keeps a workspace for every stream that it has seen, and each engine has streams of its own."""
    if here.kind == "cuda":
        import torch

        torch._C._cuda_clearCublasWorkspaces()


def memory_comes_back(pair: dict[str, str], dtype: str, here: Here) -> dict[str, Any]:
    """Engines one after the other in one process: equal answers, and after each shutdown no more memory than before."""
    from minisgl_core.testing import DeviceFixture

    from .models import tiny_checkpoint
    from .serving import answers, greedy, serve

    model, prompts = tiny_checkpoint("q3-bf16"), [[7, 8, 9], list(range(3, 60))]
    left, given = [], []
    with DeviceFixture(here.device).memory_watch() as in_use:
        before = in_use()

        def grown() -> int:
            _forget_workspaces(here)
            return in_use() - before

        for _ in range(ROUNDS):
            settings: dict[str, Any] = {
                "pool_tokens": POOL_TOKENS[here.kind],
                "max_running_req": 4,
                "backends": {"attention": pair},
            }
            with serve(here, model, dtype=dtype, **settings) as llm:
                given.append(answers(llm, prompts, greedy(8)))
                during = in_use()
            del llm
            left.append(grown())
            here.note(engine_mib=(during - before) >> 20, left_kib=[size >> 10 for size in left])
    expect(given.count(given[0]) == ROUNDS, f"the engines answer differently: {given}")
    growth = left[-1] - left[1]
    expect(growth <= GROWTH_BYTES, f"{growth} bytes more are in use after engine {ROUNDS} than after engine 2")
    expect(left[0] <= WORKSPACE_BYTES, f"{left[0]} bytes stay in use after the first engine")
    return {}
