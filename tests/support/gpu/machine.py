"""Versions of this installation, and the plans that ``minisgl explain`` gives."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from minisgl_core.registry import discover

from .check import Failed, expect

__all__ = ["CPU_PLAN", "GPU_PLAN", "entries", "file_of", "minisgl", "nvcc_release", "versions"]

LIBRARIES: Final = (
    "torch",
    "triton",
    "transformers",
    "flashinfer-python",
    "flash-attn",
    "flash-attn-3",
    "flash-attn-4",
    "apache-tvm-ffi",
)
CPU_PLAN: Final[Mapping[str, frozenset[str]]] = {
    "attention.prefill": frozenset({"cpu"}),
    "attention.decode": frozenset({"cpu"}),
    "kv": frozenset({"cpu"}),
    "graph": frozenset({"eager"}),
    "moe": frozenset({"cpu"}),
}
GPU_PLAN: Final[Mapping[str, frozenset[str]]] = {
    "attention.prefill": frozenset({"fa", "flashinfer"}),
    "attention.decode": frozenset({"fa", "flashinfer", "cuda_decode"}),
    "kv": frozenset({"cuda"}),
    "graph": frozenset({"cuda"}),
    "moe": frozenset({"fused"}),
    "linear": frozenset({"skinny"}),
    "ops.add_rms_norm": frozenset({"cuda"}),
    "ops.qk_norm_rope_store": frozenset({"cuda"}),
    "ops.act_and_mul": frozenset({"cuda"}),
    "ops.sample": frozenset({"cuda", "flashinfer"}),
    "ops.route": frozenset({"fused_route"}),
}
"""By plan entry: the backends that ``auto`` may choose with all of our plugins installed."""


def versions() -> dict[str, str]:
    """Versions of Python, our distributions, and the libraries that are installed as distributions."""
    found = {"python": platform.python_version()}
    ours = sorted({plugin.distribution for plugin in discover().plugins})
    for name in (*ours, *LIBRARIES):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def nvcc_release() -> str:
    program = shutil.which("nvcc")
    if program is None:
        return "none"
    printed = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=30, check=False).stdout
    release = re.search(r"release (\S+),", printed)
    return release[1] if release else "unknown"


def file_of(module: str) -> str:
    from importlib.util import find_spec

    spec = find_spec(module)
    return "none" if spec is None else Path(spec.origin or module).name


def minisgl(*arguments: str, env: Mapping[str, str] | None = None, limit: float = 120.0) -> Any:
    """The JSON that a ``minisgl ... --json`` command prints. Fails with the command's message."""
    installed = Path(sys.executable).with_name("minisgl")
    program = str(installed) if installed.exists() else shutil.which("minisgl")
    expect(program is not None, "no `minisgl` program next to the interpreter or on PATH")
    command = [str(program), *arguments, "--json"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=limit, check=False, stdin=subprocess.DEVNULL, env=env
    )
    try:
        return json.loads(done.stdout)
    except ValueError:
        lines = (done.stderr or done.stdout).strip().splitlines()[-8:]
        text = "\n".join([f"`{' '.join(command)}` ended with {done.returncode}", *lines])
        raise Failed(text, pytrace=False) from None


def entries(plan: Mapping[str, Any]) -> dict[str, set[str]]:
    """Plan entry, such as ``attention.decode`` -> names of its backends, for any number of rows and any shape."""
    found: dict[str, set[str]] = {}
    for bucket in plan["buckets"]:
        name = ".".join(filter(None, (bucket["role"], bucket["phase"] or bucket["op"])))
        found.setdefault(name, set()).add(bucket["choice"]["name"])
    return found
