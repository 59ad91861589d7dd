"""Tests elsewhere in the checkout: those that are marked ``gpu`` or ``multi_gpu``, folder by folder, and small tests of
our own kernels under NVIDIA's compute-sanitizer.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import pytest

from support.gpu.check import ROOT, Context, Failed, Skipped, expect
from support.gpu.collect import context_of
from support.gpu.inner_pytest import LIMIT_S, judge_counts, marked_files, run_pytest
from support.gpu.kernels import kernels_of

pytestmark = [pytest.mark.gpu, pytest.mark.check(limit_s=LIMIT_S + 20)]
SECONDS = {True: 25.0, False: 80.0}
"""With ``--quick``, and without"""
LONGER = {"minisgl_cuda": 6.0, "minisgl_moe": 2.0}
"""Factors for plugins whose tests take longer: measured on an H200, next to other checks"""
CASES = {"minisgl_cuda": (1, 2, 38, 45, 68, 70), "minisgl_moe": (71, 72, 74, 75), "minisgl_cpu_sim": (89,)}
"""By plugin: the reported faults that its tests name or hold kernels to"""
ALONE = ("tests/engine",)
"""Folders whose tests read how much memory the whole device has left"""
CHECKED_HERE = ("test_conforms", "test_every_pairing_follows_the_reference")
"""The kit and the pairs of attention backends have checks of their own, which ``--quick`` does not repeat."""
TOOLS = ("memcheck", "racecheck")
FOUND_SOMETHING = 9
CUDA_TESTS = "plugins/minisgl_cuda/tests/"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Folders with marked files, or the sanitizer's tools and selections."""
    quick = context_of(metafunc.config).quick
    if "tool" in metafunc.fixturenames:
        pairs = product(TOOLS, SELECTIONS)
        metafunc.parametrize(("tool", "name"), [pytest.param(*pair, id="/".join(pair)) for pair in pairs])
        return
    mark = "multi_gpu" if metafunc.function.__name__ == "test_tp" else "gpu"
    parameters = []
    for folder in sorted({str(path.parent.relative_to(ROOT)) for path in marked_files(mark, ROOT)}):
        plugin = next((plugin for plugin in {**CASES, **LONGER} if plugin in folder), "")
        cost = pytest.mark.check(
            seconds=SECONDS[quick] * LONGER.get(plugin, 1.0), cases=CASES.get(plugin, ()), alone=folder in ALONE
        )
        parameters.append(pytest.param(folder, id=folder, marks=cost))
    metafunc.parametrize("folder", parameters)


def run_marked(mark: str, folder: str, context: Context, more: Sequence[str] = ()) -> None:
    files = [str(path.relative_to(ROOT)) for path in marked_files(mark, ROOT) if path.parent == ROOT / folder]
    name = f"{mark}-{folder.replace('/', '-')}"
    marks = "multi_gpu" if mark == "multi_gpu" else "gpu and not multi_gpu" + (" and not slow" if context.quick else "")
    judge_counts(context, *run_pytest(["-m", marks, *more, *files], context.scratch, name))


def test_pytest(folder: str, context: Context) -> None:
    """The tests that are marked ``gpu``."""
    others = " and ".join(f"not {name}" for name in CHECKED_HERE)
    run_marked("gpu", folder, context, ["-k", others] if context.quick else [])


@pytest.mark.check(needs=("two NVIDIA GPUs",))
def test_tp(folder: str, context: Context) -> None:
    """The tests that are marked ``multi_gpu``: tensor parallelism over two devices answers as one device does."""
    if context.device.count < 2:
        raise Skipped("needs two NVIDIA GPUs")
    run_marked("multi_gpu", folder, context)


@dataclass(frozen=True)
class Selection:
    """Tests, chosen with pytest's ``-k``, that together launch every kernel of ``sources``."""

    files: tuple[str, ...]
    keyword: str
    sources: tuple[str, ...]
    """Files of kernels, as :func:`support.gpu.kernels.kernels_by_file` names them"""

    @property
    def arguments(self) -> tuple[str, ...]:
        return (*self.files, "-k", self.keyword)


def _cuda(*names: str) -> tuple[str, ...]:
    """Sources of minisgl-cuda, in Triton or CUDA C++."""
    return tuple(f"minisgl_cuda/{'csrc' if name.endswith('.cuh') else 'triton_ops'}/{name}" for name in names)


SELECTIONS: Mapping[str, Selection] = {
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


@pytest.mark.check(
    seconds=60.0,
    quick=False,
    # one allocation per tensor: a read beyond its end is then a read beyond an allocation
    env={"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
    needs=("an NVIDIA GPU", "compute-sanitizer"),
)
def test_sanitizer(tool: str, name: str, context: Context) -> None:
    """The tests pass, they launch the kernels of their sources, and the tool reports nothing."""
    program = find_sanitizer()
    if program is None:
        raise Skipped("compute-sanitizer is neither on PATH nor in CUDA_HOME")
    if context.kind != "cuda":
        raise Skipped("needs an NVIDIA GPU")
    log = context.scratch / f"sanitizer-{tool}-{name}.txt"
    prefix = [program, f"--tool={tool}", f"--error-exitcode={FOUND_SOMETHING}", f"--log-file={log}"]
    prefix += ["--target-processes=application-only"]
    selection = SELECTIONS[name]
    try:
        counts, failed, launched = launched_by(selection, context.scratch, f"{tool}-{name}", prefix)
        expect(sum(counts.values()) > 0, f"{' '.join(selection.arguments)} selects no test")
        judge_counts(context, counts, failed)
    except Failed as problem:
        raise Failed("\n".join([str(problem), *_complaints(log)]), pytrace=False) from None
    # without nvcc the tests of CUDA C++ are skipped
    compiled = [source for source in selection.sources if source.endswith(".py") or shutil.which("nvcc") is not None]
    missed = sorted(kernels_of(compiled) - launched)
    expect(not missed, f"the tests launch no {', '.join(missed)}")


def find_sanitizer() -> str | None:
    """The program, on PATH or in the CUDA toolkit."""
    home = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"))
    folders = [str(home / "bin"), str(home / "compute-sanitizer")]
    return shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path=os.pathsep.join(folders))


def launched_by(
    selection: Selection, scratch: Path, name: str, prefix: Sequence[str] = ()
) -> tuple[dict[str, int], list[str], frozenset[str]]:
    """The result of :func:`run_pytest`, and the names of all kernels that the tests launched."""
    names = scratch / f"launched-{name}.txt"
    plugin = ["-p", "support.gpu.launched", f"--launched={names}"]
    counts, failed = run_pytest([*plugin, *selection.arguments], scratch, name, prefix)
    return counts, failed, frozenset(names.read_text().split() if names.exists() else ())


def _complaints(log: Path) -> list[str]:
    if not log.exists():
        return []
    lines = [line.removeprefix("=========").strip() for line in log.read_text(errors="replace").splitlines()]
    return [line for line in lines if line][:8]
