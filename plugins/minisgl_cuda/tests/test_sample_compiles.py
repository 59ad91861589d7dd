"""The sampling kernels through Triton's compiler: what the interpreter does not check, on a machine without a GPU."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton.backends.nvidia", reason="sampling needs triton, and its NVIDIA part to compile")

COMPILER = """
import json, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from minisgl_cuda.triton_ops import filter, nucleus, sample

FLOATS = ("top_ptr", "group_ptr", "temperature_ptr", "top_p_ptr", "min_p_ptr", "near_x_ptr", "score_ptr")
found = []
for name, sm, dtype, warps, constants in json.loads(sys.argv[1]):
    kernel = next(vars(m)[name] for m in (filter, nucleus, sample) if name in vars(m))
    known = dict.fromkeys(FLOATS, "*fp32") | dict.fromkeys(constants, "constexpr")
    known |= {"logits_ptr": dtype, "mass_ptr": "*i64"}
    types = {arg: known.get(arg, "*i32" if arg.endswith("_ptr") else "i32") for arg in kernel.arg_names}
    given = {(kernel.arg_names.index(arg),): value for arg, value in constants.items()}
    source = ASTSource(kernel, types, given, {})
    found.append(triton.compile(source, target=GPUTarget("cuda", sm, 32), options={"num_warps": warps}).asm["ptx"])
print(json.dumps(found))
"""

MAXIMA: dict[str, Any] = {"FILTER": True, "BLOCK": 4096, "PER_SLICE": 16}
GATHER: dict[str, Any] = {"BLOCK": 4096, "SLICES": 64, "PER_SLICE": 16, "GROUPS": 1024, "ROOM": 2048}
FINISH: dict[str, Any] = {"BLOCK": 4096, "SLICES": 64, "ROOM": 2048, "BITS": 16}
SCORE: dict[str, Any] = {"FILTER": True, "AGAIN": False, "BLOCK": 4096, "STEP": 1024, "SLICES": 64}
WEIGH: dict[str, Any] = {"BLOCK": 4096, "SLICES": 64}
PICK: dict[str, Any] = {"RANDOM": True, "FILTER": True, "BLOCK": 4096, "STEP": 1024, "SLICES": 64}
# A part asks where its tokens go, or whether it is the last to add to a sum, which is not read before that.
ATOMICS = {
    ("gather_kernel", None): {"atom.global.gpu.relaxed.add.u32"},
    ("score_kernel", False): {"red.global.gpu.relaxed.add.u64"},
    ("weigh_kernel", None): {"red.global.gpu.relaxed.add.u64", "atom.global.gpu.acq_rel.add.u32"},
}


def test_every_kernel_compiles_and_counts_without_waiting(tmp_path: Path) -> None:
    kernels = [
        ("_max_kernel", 90, "*bf16", 4, MAXIMA),
        ("gather_kernel", 90, "*bf16", 8, GATHER),
        ("finish_kernel", 90, "*bf16", 16, FINISH),
        ("score_kernel", 90, "*bf16", 4, SCORE),
        ("score_kernel", 90, "*bf16", 4, SCORE | {"AGAIN": True}),
        ("score_kernel", 90, "*bf16", 4, SCORE | {"FILTER": False}),
        ("weigh_kernel", 90, "*bf16", 8, WEIGH),
        ("_pick_kernel", 90, "*bf16", 8, PICK),
        ("_pick_kernel", 90, "*bf16", 1, PICK | {"FILTER": False}),
        ("gather_kernel", 80, "*fp32", 8, GATHER),
        ("finish_kernel", 80, "*fp32", 16, FINISH | {"BITS": 32}),
        ("score_kernel", 80, "*fp32", 4, SCORE),
        ("weigh_kernel", 80, "*fp32", 8, WEIGH),
        ("_pick_kernel", 80, "*fp32", 8, PICK),
    ]
    settings = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    settings |= {"TRITON_CACHE_DIR": str(tmp_path), "TRITON_DEFAULT_FP_FUSION": "1"}
    done = subprocess.run(
        [sys.executable, "-c", COMPILER, json.dumps(kernels)], capture_output=True, text=True, env=settings, check=False
    )
    assert done.returncode == 0, done.stderr
    for (name, *_, constants), code in zip(kernels, json.loads(done.stdout), strict=True):
        atomics = set(re.findall(r"(?:atom|red)\.global\S*", code))
        if name == "weigh_kernel":
            atomics.discard("atom.global.gpu.relaxed.add.u64")  # of zero: newer compilers make it a load
        wanted = ATOMICS.get((name, constants.get("AGAIN")), set()) if constants.get("FILTER", True) else set()
        assert atomics == wanted, (name, constants, atomics)
