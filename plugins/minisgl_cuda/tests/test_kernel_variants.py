"""Which variants of the Triton kernels a number of rows needs. A variant that is first met while serving delays its
request by the time that the compiler takes: a quarter of a second and more.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="the kernels are written in it")

RECORDER = """
import json, sys
import torch
from triton.runtime.jit import JITFunction
from minisgl_cuda.tiles import TileTable
from minisgl_cuda.triton_ops import sample, skinny

HEAD = TileTable.load("skinny-sm90")
variants = set()

def record(kernel, *args, grid, warmup, **options):
    given = dict(zip(kernel.arg_names, args)) | options
    key = [kernel.__name__]
    for param in kernel.params:
        value = given.pop(param.name)
        if param.is_constexpr:
            key.append(value)
        elif isinstance(value, torch.Tensor):
            # On a GPU every allocation begins at a multiple of 512 bytes.
            key.append((str(value.dtype), value.storage_offset() * value.element_size() % 16 == 0))
        elif isinstance(value, int) and not param.do_not_specialize:
            key.append((value == 1, value % 16 == 0))
        else:
            key.append(type(value).__name__)
    variants.add(json.dumps([key, sorted(given.items())], default=str))

JITFunction.run = record

def product(rows, act):
    n, k = 6144, 1024
    weight, x = torch.empty(n, k, dtype=torch.bfloat16), torch.empty(rows, k, dtype=torch.bfloat16)
    out = torch.empty(rows, n // 2 if act else n, dtype=torch.bfloat16)
    for tile in (skinny.default_tile(rows, n, k), HEAD.find(151936, 1024, rows)):
        skinny._skinny_linear(out, x, weight, None, *tile, True, act)

def sampled(rows, mode):
    params = torch.empty(rows, 6, dtype=torch.int32)
    floats = params.view(torch.float32)
    positions, out = torch.empty(rows, dtype=torch.int32), torch.empty(rows, dtype=torch.int32)
    logits = torch.empty(rows, 5000, dtype=torch.bfloat16)
    sample._sample(out, logits, floats[:, 0], params[:, 1], floats[:, 2], floats[:, 3], params[:, 4], params[:, 5],
                   positions, mode)

WORK = {"product": lambda rows: [product(rows, act) for act in (False, True)],
        "sampled": lambda rows: [sampled(rows, mode) for mode in (0, 1, 2)]}

found = {}
for name, most in (("product", skinny.MAX_ROWS), ("sampled", 64)):
    for rows in (1, 2, 4, *range(8, most + 1, 8)):
        WORK[name](rows)
    known = set(variants)
    for rows in range(1, most + 1):
        WORK[name](rows)
    found[name] = len(known), sorted(variants - known)
print(json.dumps(found))
"""


def test_case_115_no_number_of_rows_needs_a_kernel_that_the_start_has_not_compiled() -> None:
    # Graphs are captured, and kernels so compiled, for 1, 2, 4 and the multiples of 8. A prefill samples any number.
    settings = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", RECORDER], capture_output=True, text=True, env=settings, check=False)
    assert done.returncode == 0, done.stderr
    for known, later in json.loads(done.stdout).values():
        assert known and not later
