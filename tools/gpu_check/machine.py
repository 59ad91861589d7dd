"""Versions, and the plans that this machine gets without any wish."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

from minisgl_core.registry import DeviceFacts, discover

from .checks import Check, Failed, Here, expect

__all__ = ["checks", "minisgl", "versions"]

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
GEOMETRIES: Final = ("qwen3-0.6b", "qwen3-30b-a3b")


def checks(device: DeviceFacts) -> list[Check]:
    """Versions and plans."""
    plans = [
        Check(f"plan/{name}", partial(plan, name), 5.0, cases=(76,) if "-a" in name else ()) for name in GEOMETRIES
    ]
    return [Check("versions", check_versions, 10.0), *plans]


def versions() -> dict[str, str]:
    """Of Python, of our distributions, and of the libraries that are installed as distributions."""
    found = {"python": platform.python_version()}
    ours = sorted({plugin.distribution for plugin in discover().plugins})
    for name in (*ours, *LIBRARIES):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def check_versions(here: Here) -> dict[str, Any]:
    """All of our plugins load; the libraries say who they are."""
    import torch

    registry = discover()
    failures = [f"{plugin.distribution}: {plugin.failure}" for plugin in registry.failures()]
    expect(not failures, "plugins that did not load:\n" + "\n".join(failures))
    figures: dict[str, Any] = {"device": here.device.name or here.kind, "driver": here.device.driver or "none"}
    figures |= versions() | {"cuda": torch.version.cuda or "none", "nvcc": _nvcc()}
    if here.kind == "cuda":
        wanted = {"minisgl-core", "minisgl-cuda", "minisgl-fa", "minisgl-flashinfer", "minisgl-moe"}
        missing = sorted(wanted - figures.keys())
        expect(not missing, f"not installed: {', '.join(missing)}")
        figures["flash_attn_interface"] = _file_of("flash_attn_interface")
    return figures


def _nvcc() -> str:
    program = shutil.which("nvcc")
    if program is None:
        return "none"
    told = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=30, check=False).stdout
    release = re.search(r"release (\S+),", told)
    return release[1] if release else "unknown"


def _file_of(module: str) -> str:
    from importlib.util import find_spec

    spec = find_spec(module)
    return "none" if spec is None else Path(spec.origin or module).name


def minisgl(*arguments: str, env: Mapping[str, str] | None = None, limit: float = 120.0) -> Any:
    """What a ``minisgl ... --json`` command prints. Raises :class:`Failed` with its complaint."""
    beside = Path(sys.executable).with_name("minisgl")
    program = str(beside) if beside.exists() else shutil.which("minisgl")
    expect(program is not None, "no `minisgl` program beside the interpreter or on PATH")
    command = [str(program), *arguments, "--json"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=limit, check=False, stdin=subprocess.DEVNULL, env=env
    )
    try:
        return json.loads(done.stdout)
    except ValueError:
        told = (done.stderr or done.stdout).strip().splitlines()[-8:]
        text = "\n".join([f"`{' '.join(command)}` ended with {done.returncode}", *told])
        raise Failed(text) from None


def plan(geometry: str, here: Here) -> dict[str, Any]:
    """`minisgl explain` gives every plan entry a backend that is made for this device."""
    told = minisgl("explain", "--geometry", geometry, "--device", here.kind, "--no-calibrated")
    expect(told["plan"] is not None, f"no plan: {told['error']}")
    chosen = entries(told["plan"])
    expected = GPU_PLAN if here.kind == "cuda" else CPU_PLAN
    wrong = [
        f"{entry}: {', '.join(sorted(found))}, expected {' or '.join(sorted(expected[entry]))}"
        for entry, found in chosen.items()
        if entry in expected and not found <= expected[entry]
    ]
    here.note(
        page_size=told["plan"]["page_size"], **{entry: "+".join(sorted(found)) for entry, found in chosen.items()}
    )
    expect(not wrong, "\n".join([f"the plan of {geometry}:", *wrong]))
    absent = sorted(entry for entry in expected if entry not in chosen and entry not in ("moe", "ops.route"))
    expect(not absent, f"the plan of {geometry} has nothing for {', '.join(absent)}")
    return {}


def entries(plan: Mapping[str, Any]) -> dict[str, set[str]]:
    """Plan entry, such as ``attention.decode`` -> names of its backends, whatever the number of rows or the shape."""
    found: dict[str, set[str]] = {}
    for bucket in plan["buckets"]:
        name = ".".join(filter(None, (bucket["role"], bucket["phase"] or bucket["op"])))
        found.setdefault(name, set()).add(bucket["choice"]["name"])
    return found
