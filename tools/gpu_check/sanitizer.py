"""Our own kernels under NVIDIA's compute-sanitizer: reads and writes out of bounds, races in shared memory."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from .checks import Check, Failed, Here, Skipped
from .folders import SHOWN, run_pytest
from .kernels import kernels_of

__all__ = ["SELECTIONS", "Selection", "checks", "find_sanitizer", "launched_by"]

TOOLS: Final = ("memcheck", "racecheck")
FOUND_SOMETHING: Final = 9
LIMIT_S: Final = 560.0
CUDA_TESTS: Final = "plugins/minisgl_cuda/tests/"


@dataclass(frozen=True)
class Selection:
    """Tests, chosen with pytest's ``-k``, that together launch every kernel of ``sources``."""

    files: tuple[str, ...]
    keyword: str
    sources: tuple[str, ...]
    """Files of kernels, as :func:`gpu_check.kernels.kernels_by_file` names them"""

    @property
    def arguments(self) -> tuple[str, ...]:
        """For pytest."""
        return (*self.files, "-k", self.keyword)


def _cuda(*names: str) -> tuple[str, ...]:
    """Sources of minisgl-cuda, in Triton or CUDA C++."""
    return tuple(f"minisgl_cuda/{'csrc' if name.endswith('.cuh') else 'triton_ops'}/{name}" for name in names)


SELECTIONS: Final[Mapping[str, Selection]] = {
    "kv": Selection(
        (CUDA_TESTS + "test_gpu_kv.py",),
        "(test_store or test_index) and bfloat16 and not huge",
        _cuda("kv.py", "kv_store.cuh", "kv_index.cuh"),
    ),
    "ops": Selection(
        (CUDA_TESTS + "test_cuda_ops.py",),
        "(test_norms or test_qk or test_act) and bfloat16",
        _cuda("norm.py", "act.py", "rope.py", "norm.cuh", "act.cuh", "rope.cuh"),
    ),
    "sample": Selection(
        tuple(CUDA_TESTS + name for name in ("test_cuda_ops.py", "test_sample_filters.py", "test_sample_nucleus.py")),
        "(test_greedy_and_random and 9001 or test_flat_rows) and bfloat16 or test_rows_whose_first_tokens",
        _cuda("sample.py", "filter.py", "nucleus.py"),
    ),
    "decode": Selection((CUDA_TESTS + "test_cuda_decode.py",), "window or splits or lengths", _cuda("decode.py")),
    "linear": Selection(
        (CUDA_TESTS + "test_cuda_linear.py", CUDA_TESTS + "test_linear_fused.py"),
        "(test_product or test_fused) and bfloat16",
        _cuda("skinny.py"),
    ),
    "pages": Selection(
        ("plugins/minisgl_flashinfer/tests/test_gpu_flashinfer.py",),
        "test_the_page_list",
        ("minisgl_flashinfer/triton_ops/pages.py",),
    ),
    "moe": Selection(
        ("plugins/minisgl_moe/tests/test_gpu_moe.py",),
        "test_other_dtypes or test_routing",
        tuple(f"minisgl_moe/triton_ops/{name}.py" for name in ("align", "grouped", "pairs", "route")),
    ),
}
"""Small tests that capture no graph: the sanitizer makes kernels up to a hundred times slower. Every kernel of ours is
in one of them.
"""


def checks() -> list[Check]:
    """Each selection under each tool."""
    # one allocation per tensor: a read beyond its end is then a read beyond an allocation
    env = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    needs = ("an NVIDIA GPU", "compute-sanitizer")
    return [
        Check(
            f"sanitizer/{tool}/{name}",
            partial(clean, tool, name),
            60.0,
            quick=False,
            env=env,
            limit_s=LIMIT_S + 20,
            needs=needs,
        )
        for tool in TOOLS
        for name in SELECTIONS
    ]


def find_sanitizer() -> str | None:
    """The program, on PATH or in the CUDA toolkit."""
    home = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"))
    folders = [str(home / "bin"), str(home / "compute-sanitizer")]
    return shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path=os.pathsep.join(folders))


def clean(tool: str, name: str, here: Here) -> dict[str, Any]:
    """The tests pass, they launch the kernels that they are there for, and the tool has nothing to say."""
    program = find_sanitizer()
    if program is None:
        raise Skipped("compute-sanitizer is neither on PATH nor in CUDA_HOME")
    if here.kind != "cuda":
        raise Skipped("needs an NVIDIA GPU")
    log = here.scratch / f"sanitizer-{tool}-{name}.txt"
    prefix = [program, f"--tool={tool}", f"--error-exitcode={FOUND_SOMETHING}", f"--log-file={log}"]
    prefix += ["--target-processes=application-only"]
    selection = SELECTIONS[name]
    try:
        counts, failed, launched = launched_by(selection, here.scratch, f"{tool}-{name}", prefix)
    except Failed as problem:
        raise Failed("\n".join([str(problem), *_complaints(log)])) from None
    here.note(**counts)
    if failed:
        raise Failed("\n".join([f"{len(failed)} tests failed:", *failed[:SHOWN], *_complaints(log)]))
    if not sum(counts.values()):
        raise Failed(f"{' '.join(selection.arguments)} selects no test")
    if not counts["passed"]:
        raise Skipped(f"no test could be run here, {counts['skipped']} skipped")
    missed = sorted(kernels_of(_compiled_here(selection.sources)) - launched)
    if missed:
        raise Failed(f"the tests launch no {', '.join(missed)}")
    return {}


def _compiled_here(sources: Sequence[str]) -> list[str]:
    """Without nvcc the tests of CUDA C++ are skipped."""
    return [source for source in sources if source.endswith(".py") or shutil.which("nvcc") is not None]


def launched_by(
    selection: Selection, scratch: Path, name: str, prefix: Sequence[str] = ()
) -> tuple[dict[str, int], list[str], frozenset[str]]:
    """As :func:`~gpu_check.folders.run_pytest`, and the names of all kernels that the tests launched."""
    names = scratch / f"launched-{name}.txt"
    plugin = ["-p", "gpu_check.launched", f"--launched={names}"]
    counts, failed = run_pytest([*plugin, *selection.arguments], scratch, name, prefix, LIMIT_S)
    return counts, failed, frozenset(names.read_text().split() if names.exists() else ())


def _complaints(log: Path) -> list[str]:
    if not log.exists():
        return []
    lines = [line.removeprefix("=========").strip() for line in log.read_text(errors="replace").splitlines()]
    return [line for line in lines if line][:8]
