"""The decode kernels through Triton's compiler: what the interpreter does not check, on a machine without a GPU."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton.backends.nvidia", reason="cuda_decode needs triton, and its NVIDIA part to compile")

from minisgl_core.plugin_api import CannotRun
from minisgl_cuda.attention import _keys_per_step, shared_bytes
from minisgl_cuda.options import DecodeOptions
from minisgl_cuda.triton_ops.dependent import DEPENDENT_LAUNCH

COMPILER = """
import json, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from minisgl_cuda.triton_ops import decode

POINTERS = {"acc_ptr": "*fp32", "log_ptr": "*fp32"} | dict.fromkeys(
    ("table_ptr", "table_idx_ptr", "kv_lens_ptr", "arrived_ptr"), "*i32")
NUMBERS = {"scale_log2": "fp32", "softcap": "fp32"}
found = []
for name, sm, constants, dtype in json.loads(sys.argv[1]):
    kernel = getattr(decode, name)
    known = POINTERS | NUMBERS | dict.fromkeys(constants, "constexpr")
    types = {arg: known.get(arg, f"*{dtype}" if arg.endswith("_ptr") else "i32") for arg in kernel.arg_names}
    given = {(kernel.arg_names.index(arg),): value for arg, value in constants.items()}
    source = ASTSource(kernel, types, given, {})
    options = {"num_warps": 4, "num_stages": 3, "launch_pdl": constants["DEPENDENT"]}
    compiled = triton.compile(source, target=GPUTarget("cuda", sm, 32), options=options)
    found.append((compiled.asm["ptx"], compiled.metadata.shared))
print(json.dumps(found))
"""

SPLIT: dict[str, Any] = {
    "G": 2, "DIM": 128, "SPLITS": 16, "CAP": False, "BLOCK_G": 16, "BLOCK_D": 128, "BLOCK_T": 64, "UPCAST": False,
    "JOIN": True, "JOIN_HEADS": 2, "AT_ONCE": 16, "DEPENDENT": False,
}  # fmt: skip
DEPENDENT = {"DEPENDENT": DEPENDENT_LAUNCH}
COMBINE: dict[str, Any] = {"G": 2, "DIM": 128, "SPLITS": 16, "BLOCK_D": 128, "AT_ONCE": 16, "DEPENDENT": False}


def compiled(tmp_path: Path, *kernels: tuple[str, int, dict[str, Any]], dtype: str = "bf16") -> list[tuple[str, int]]:
    """PTX of each (kernel, compute capability, constants), and the bytes of shared memory that it takes."""
    settings = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    settings |= {"TRITON_CACHE_DIR": str(tmp_path), "TRITON_DEFAULT_FP_FUSION": "1"}
    done = subprocess.run(
        [sys.executable, "-c", COMPILER, json.dumps([(*kernel, dtype) for kernel in kernels])],
        capture_output=True,
        text=True,
        env=settings,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [(code, shared) for code, shared in json.loads(done.stdout)]


def test_what_the_order_of_the_join_rests_on_is_in_the_machine_code(tmp_path: Path) -> None:
    kernels = compiled(
        tmp_path,
        ("_split_kernel", 90, SPLIT | DEPENDENT),
        ("_split_kernel", 80, SPLIT | {"G": 5, "JOIN_HEADS": 8, "AT_ONCE": 8, "CAP": True}),
        ("_split_kernel", 90, SPLIT | DEPENDENT | {"JOIN": False}),
        ("_split_kernel", 90, SPLIT | {"SPLITS": 1, "AT_ONCE": 1}),
        ("_combine_kernel", 90, COMBINE | DEPENDENT),
    )
    inside, uneven, apart, direct, combine = (code for code, _ in kernels)
    for code in (inside, uneven):
        steps = re.findall(r"st\.global|bar\.sync|atom\.global\.gpu\.acq_rel\.add|ld\.global\S*", code)
        counts = [at for at, step in enumerate(steps) if step.startswith("atom")]
        assert len(counts) == 1
        before, after = steps[: counts[0]], steps[counts[0] + 1 :]
        assert "st.global" not in before[len(before) - before[::-1].index("bar.sync") :]  # barrier after all parts
        assert after[0] == "bar.sync"  # all threads learn the count, before any reads a part
        reads = [step for step in after if step.startswith("ld.global")]
        assert reads and all(".cg" in step for step in reads)  # past the first-level cache
    assert "atom." not in apart + direct + combine
    # No memory is touched before the previous kernel is done.
    for code in (inside, apart, combine) if DEPENDENT_LAUNCH else ():
        assert code.index("griddepcontrol.launch_dependents") < code.index("griddepcontrol.wait")
        assert code.index("griddepcontrol.wait") < code.index("ld.global")
    assert "griddepcontrol" not in uneven + direct


@pytest.mark.parametrize(("dtype", "itemsize", "keys"), [("bf16", 2, 64), ("fp32", 4, 64), ("fp32", 4, 16)])
def test_the_shared_memory_is_bounded(tmp_path: Path, dtype: str, itemsize: int, keys: int) -> None:
    ((_, shared),) = compiled(tmp_path, ("_split_kernel", 89, SPLIT | {"BLOCK_T": keys}), dtype=dtype)
    assert 0.25 * shared_bytes(keys, 128, itemsize) < shared <= shared_bytes(keys, 128, itemsize)


@pytest.mark.parametrize(
    ("sm", "dtype", "head_dim", "keys"),
    [
        (90, torch.float32, 256, 64),
        (80, torch.float32, 256, 64),
        (89, torch.float32, 256, 32),
        (120, torch.bfloat16, 256, 64),
    ],
)
def test_keys_per_step_fit_the_device(sm: int, dtype: torch.dtype, head_dim: int, keys: int) -> None:
    setup: Any = SimpleNamespace(
        device=torch.device("cuda"), platform=SimpleNamespace(sm=sm), kv_dtype=dtype, head_dim=head_dim
    )
    assert _keys_per_step(setup, DecodeOptions()) == keys
    assert _keys_per_step(setup, DecodeOptions(block_tokens=16)) == 16
    with pytest.raises(CannotRun, match=f"at most block_tokens = {keys}"):
        _keys_per_step(setup, DecodeOptions(block_tokens=128))
