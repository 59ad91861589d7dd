"""The products of few rows through Triton's compiler: what a dependent launch may do before it waits."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
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
    types = {arg: "constexpr" if arg in constants else "*bf16" if arg.endswith("_ptr") else "i32"
             for arg in kernel.arg_names}
    given = {(kernel.arg_names.index(arg),): value for arg, value in constants.items()}
    options = {"num_warps": 4, "num_stages": 3, "launch_pdl": constants["DEPENDENT"]}
    compiled = triton.compile(ASTSource(kernel, types, given, {}), target=GPUTarget("cuda", 90, 32), options=options)
    found.append(compiled.asm["ptx"])
print(json.dumps(found))
"""
ONE_ROW: dict[str, Any] = {"K": 3072, "BIAS": True, "BLOCK_N": 4, "BLOCK_K": 1024, "AHEAD": 2048, "LINES": 16}
ROWS: dict[str, Any] = {
    "K": 1024, "BIAS": True, "BLOCK_M": 16, "BLOCK_N": 32, "BLOCK_K": 128, "LINES": 16, "UPCAST": False,
}  # fmt: skip


@pytest.mark.skipif(not DEPENDENT_LAUNCH, reason="this Triton has no dependent launches")
def test_only_the_weight_is_asked_for_before_the_previous_kernel_is_done(tmp_path: Path) -> None:
    kernels = [
        (name, {**constants, "DEPENDENT": dependent})
        for name, constants in (("_gemv_kernel", ONE_ROW), ("_skinny_kernel", ROWS))
        for dependent in (True, False)
    ]
    settings = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    settings |= {"TRITON_CACHE_DIR": str(tmp_path), "TRITON_DEFAULT_FP_FUSION": "1"}
    done = subprocess.run(
        [sys.executable, "-c", COMPILER, json.dumps(kernels)], capture_output=True, text=True, env=settings, check=False
    )
    assert done.returncode == 0, done.stderr
    one, one_alone, rows, rows_alone = json.loads(done.stdout)
    assert "griddepcontrol" not in one_alone + rows_alone
    for code in (one, rows):
        before, after = code.split("griddepcontrol.wait")
        assert before.count("griddepcontrol.launch_dependents") == 1 and "st.global" not in before
        assert "prefetch.global.L2" in before and "st.global" in after
    before, after = one.split("griddepcontrol.wait")
    assert len(re.findall(r"ld\.global", before)) >= 4  # rows of the weight, in registers
    assert len(re.findall(r"ld\.global", after)) >= 3  # x, the rest of the weight, the bias
