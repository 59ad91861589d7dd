"""Our own kernels under NVIDIA's compute-sanitizer: reads and writes out of bounds, races in shared memory."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

from minisgl_core.registry import DeviceFacts

from .checks import Check, Failed, Here, Skipped
from .folders import SHOWN, run_pytest

__all__ = ["SELECTIONS", "checks", "find_sanitizer"]

TOOLS: Final = ("memcheck", "racecheck")
FOUND_SOMETHING: Final = 9
LIMIT_S: Final = 560.0
SELECTIONS: Final[Mapping[str, Sequence[str]]] = {
    "kv": ("plugins/minisgl_cuda/tests/test_gpu_kv.py", "-k", "(test_store or test_index) and bfloat16 and not huge"),
    "ops": ("plugins/minisgl_cuda/tests/test_cuda_ops.py", "-k", "(test_norms or test_qk or test_act) and bfloat16"),
    "decode": ("plugins/minisgl_cuda/tests/test_cuda_decode.py", "-k", "window or splits or lengths"),
    "linear": ("plugins/minisgl_cuda/tests/test_cuda_linear.py", "-k", "test_product"),
    "moe": ("plugins/minisgl_moe/tests/test_gpu_moe.py", "-k", "test_other_dtypes or test_routing"),
}
"""Small tests that capture no graph: the sanitizer makes kernels up to a hundred times slower."""


def checks(device: DeviceFacts) -> list[Check]:
    """Each selection under each tool."""
    # one allocation per tensor: a read beyond its end is then a read beyond an allocation
    env = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    return [
        Check(f"sanitizer/{tool}/{name}", partial(clean, tool, name), 60.0, quick=False, env=env, limit_s=LIMIT_S + 20)
        for tool in TOOLS
        for name in SELECTIONS
    ]


def find_sanitizer() -> str | None:
    """The program, on PATH or in the CUDA toolkit."""
    home = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"))
    folders = [str(home / "bin"), str(home / "compute-sanitizer")]
    return shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path=os.pathsep.join(folders))


def clean(tool: str, name: str, here: Here) -> dict[str, Any]:
    """The tests pass and the tool has nothing to say."""
    program = find_sanitizer()
    if program is None:
        raise Skipped("compute-sanitizer is neither on PATH nor in CUDA_HOME")
    if here.kind != "cuda":
        raise Skipped("needs an NVIDIA GPU")
    log = here.scratch / f"sanitizer-{tool}-{name}.txt"
    prefix = [program, f"--tool={tool}", f"--error-exitcode={FOUND_SOMETHING}", f"--log-file={log}"]
    prefix += ["--target-processes=application-only"]
    try:
        counts, failed = run_pytest(SELECTIONS[name], here.scratch, f"{tool}-{name}", prefix, LIMIT_S)
    except Failed as problem:
        raise Failed("\n".join([str(problem), *_complaints(log)])) from None
    here.note(**counts)
    if failed:
        raise Failed("\n".join([f"{len(failed)} tests failed:", *failed[:SHOWN], *_complaints(log)]))
    if not sum(counts.values()):
        raise Failed(f"{' '.join(SELECTIONS[name])} selects no test")
    if not counts["passed"]:
        raise Skipped(f"no test could be run here, {counts['skipped']} skipped")
    return {}


def _complaints(log: Path) -> list[str]:
    if not log.exists():
        return []
    lines = [line.removeprefix("=========").strip() for line in log.read_text(errors="replace").splitlines()]
    return [line for line in lines if line][:8]
