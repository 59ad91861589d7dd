"""The products of few rows through Triton's compiler: what a dependent launch may do before it waits."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton.backends.nvidia", reason="the skinny products need triton, and its NVIDIA part to compile")

from minisgl_cuda.triton_ops.dependent import DEPENDENT_LAUNCH

COMPILER = """
import json, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from minisgl_cuda.triton_ops import skinny

found = []
for name, constants in json.loads(sys.argv[1]):
    kernel = getattr(skinny, name)
    scalars = {"eps": "fp32"}
    types = {arg: "constexpr" if arg in constants else "*bf16" if arg.endswith("_ptr") else scalars.get(arg, "i32")
             for arg in kernel.arg_names}
    given = {(kernel.arg_names.index(arg),): value for arg, value in constants.items()}
    options = {"num_warps": 4, "num_stages": 3, "launch_pdl": constants["DEPENDENT"]}
    compiled = triton.compile(ASTSource(kernel, types, given, {}), target=GPUTarget("cuda", 90, 32), options=options)
    found.append(compiled.asm["ptx"])
print(json.dumps(found))
"""
ONE_ROW: dict[str, Any] = {"K": 3072, "BIAS": True, "BLOCK_N": 4, "BLOCK_K": 1024, "AHEAD": 2048, "CACHE_LINES": 16}
ROWS: dict[str, Any] = {
    "K": 1024, "BIAS": True, "BLOCK_M": 16, "BLOCK_N": 32, "BLOCK_K": 128, "CACHE_LINES": 16, "UPCAST": False,
}  # fmt: skip
FORMS = ((False, True), (False, False), (True, True))
"""Fused or not; launched dependently or not"""

POINTERS = ("x", "weight", "bias", "out", "residual", "norm_weight", "total")
"""The first parameters of the kernels; that for several rows has no norm, and the first four"""


def accesses(code: str) -> Counter[str]:
    """How often PTX reads, writes or prefetches global memory through each pointer, which addresses are followed to."""
    origin: dict[str, str] = {}
    found: Counter[str] = Counter()
    for line in code.splitlines():
        registers = re.findall(r"%rd\d+", line)
        known = [origin[register] for register in registers if register in origin]
        if parameter := re.search(r"ld\.param\.[bu]64\s+(%rd\d+), \[\w+_param_([0-6])\]", line):
            origin[parameter[1]] = POINTERS[int(parameter[2])]
        elif re.search(r"\.global.*\[\s*%rd", line):
            found.update(known[:1] or ["unknown"])
        elif known:
            origin[registers[0]] = known[-1]
    return found


@pytest.mark.skipif(not DEPENDENT_LAUNCH, reason="this Triton has no dependent launches")
def test_only_the_weight_is_read_before_the_previous_kernel_is_done(tmp_path: Path) -> None:
    kernels = [
        (name, {**constants, "ACT": fused, "DEPENDENT": dependent} | ({"NORM": fused} if constants is ONE_ROW else {}))
        for name, constants in (("_gemv_kernel", ONE_ROW), ("_skinny_kernel", ROWS))
        for fused, dependent in FORMS
    ]
    settings = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    settings |= {"TRITON_CACHE_DIR": str(tmp_path), "TRITON_DEFAULT_FP_FUSION": "1"}
    done = subprocess.run(
        [sys.executable, "-c", COMPILER, json.dumps(kernels)], capture_output=True, text=True, env=settings, check=False
    )
    assert done.returncode == 0, done.stderr
    for (name, constants), code in zip(kernels, json.loads(done.stdout), strict=True):
        before, wait, _ = code.partition("griddepcontrol.wait")
        assert accesses(code).keys() == set(POINTERS if constants.get("NORM") else POINTERS[:4])
        assert bool(wait) == constants["DEPENDENT"] and before.count("griddepcontrol.launch_dependents") == bool(wait)
        if wait:
            assert "prefetch.global.L2" in before and accesses(before).keys() == {"weight"}
            ahead = len(re.findall(r"ld\.global", before))
            assert ahead >= 4 if name == "_gemv_kernel" else ahead == 0  # rows of the weight, in registers
