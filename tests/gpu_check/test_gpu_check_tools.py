"""Folders of marked tests and the sanitizer: the records contain what the programs report."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from gpu import test_marked
from gpu.test_marked import Selection
from minisgl_core.registry import DeviceFacts
from support.gpu import inner_pytest, kernels
from support.gpu.check import Context, Failed, Skipped

TESTS = """
import pytest
@pytest.mark.gpu
def test_right(): pass
@pytest.mark.gpu
@pytest.mark.parametrize("n", [1, 2])
def test_wrong(n): assert n == 3, "two\\nlines"
@pytest.mark.gpu
def test_elsewhere(): pytest.skip("not here")
@pytest.fixture
def broken(): raise RuntimeError("no fixture")
@pytest.mark.gpu
def test_without_its_fixture(broken): pass
def test_unmarked(): raise AssertionError("this one is not selected")
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout with one folder of tests and this checkout's strict settings."""
    root = tmp_path / "project"
    folder = root / "plugins" / "some" / "tests"
    folder.mkdir(parents=True)
    (folder / "test_some.py").write_text(TESTS)
    (folder / "test_other.py").write_text("def test_nothing(): pass\n")
    (root / "pyproject.toml").write_text(
        "[tool.pytest.ini_options]\n"
        'addopts = ["--import-mode=importlib", "--strict-config", "--strict-markers", "-ra"]\n'
        'timeout = 600\nmarkers = ["gpu: a", "multi_gpu: b", "slow: c"]\nfilterwarnings = ["error"]\n'
    )
    monkeypatch.setattr(inner_pytest, "ROOT", root)
    monkeypatch.setattr(test_marked, "ROOT", root)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))  # for the plugin support.gpu.launched
    return root


def run_folder(project: Path, context: Context) -> None:
    test_marked.run_marked("gpu", "plugins/some/tests", context)


def test_a_folder_is_run_and_counted(project: Path, context: Context, figures: Any) -> None:
    assert [path.name for path in inner_pytest.marked_files("gpu", project)] == ["test_some.py"]
    with pytest.raises(Failed) as failed:
        run_folder(project, context)
    lines = str(failed.value).splitlines()
    assert lines[0] == "3 of 5 tests failed:"
    assert lines[1].startswith("test_wrong[1]: AssertionError: two")
    assert any("test_without_its_fixture" in line and "no fixture" in line for line in lines)
    assert figures() == {"passed": 1, "failed": 3, "skipped": 1}


def test_without_the_timeout_plugin_its_setting_does_not_matter(
    project: Path, context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inner_pytest, "find_spec", lambda name: None)
    arguments = ["-p", "no:timeout", "-k", "right or elsewhere", "plugins"]
    assert inner_pytest.run_pytest(arguments, context.scratch, "x") == ({"passed": 1, "failed": 0, "skipped": 1}, [])


def test_a_folder_where_nothing_can_run_is_skipped(project: Path, context: Context) -> None:
    (project / "plugins/some/tests/test_some.py").write_text(
        "import pytest\npytestmark = pytest.mark.gpu\ndef test_elsewhere(): pytest.skip('not here')\n"
    )
    with pytest.raises(Skipped, match="no test could be run here, 1 skipped"):
        run_folder(project, context)


def test_a_run_that_pytest_cannot_do_is_a_failure(project: Path, context: Context) -> None:
    with pytest.raises(Failed, match="pytest ended with 4"):
        inner_pytest.run_pytest(["nothing_there.py"], context.scratch, "x")
    (project / "conftest.py").write_text("raise RuntimeError('broken conftest')\n")
    with pytest.raises(Failed, match="broken conftest"):
        inner_pytest.run_pytest(["plugins"], context.scratch, "y")


def _sanitizer(folder: Path, body: str) -> None:
    folder.mkdir()
    program = folder / "compute-sanitizer"
    program.write_text(f"#!{sys.executable}\nimport os, sys\n{body}\n")
    program.chmod(0o755)


@pytest.fixture
def on_gpu(context: Context) -> Context:
    return replace(context, device=DeviceFacts("cuda", sm=90), quick=False)


FINDS = """
log = [a.partition("=")[2] for a in sys.argv if a.startswith("--log-file=")][0]
open(log, "w").write("========= Invalid __global__ write of size 16 bytes\\n=========     at store_rows+0x90\\n")
sys.exit(9)
"""
PASSES = """
start = next(i for i, a in enumerate(sys.argv) if a == sys.executable)
assert sys.argv[1:4:2] == ["--tool=memcheck", sys.argv[3]] and sys.argv[2] == "--error-exitcode=9"
os.execv(sys.executable, sys.argv[start:])
"""


def test_without_the_program_it_is_skipped(on_gpu: Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    with pytest.raises(Skipped, match="neither on PATH nor in CUDA_HOME"):
        test_marked.test_sanitizer("memcheck", "kv", on_gpu)


def test_what_the_sanitizer_finds_is_reported(on_gpu: Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _sanitizer(tmp_path / "bin", FINDS)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    with pytest.raises(Failed, match=r"(?s)ended with 9.*Invalid __global__ write.*store_rows"):
        test_marked.test_sanitizer("memcheck", "kv", on_gpu)


def test_a_clean_selection_is_counted(
    project: Path, on_gpu: Context, figures: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _sanitizer(tmp_path / "bin", PASSES)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))

    def select(keyword: str, *sources: str) -> None:
        monkeypatch.setattr(
            test_marked, "SELECTIONS", {"kv": Selection(("plugins/some/tests/test_some.py",), keyword, sources)}
        )

    select("right")
    test_marked.test_sanitizer("memcheck", "kv", on_gpu)
    select("nothing")
    with pytest.raises(Failed, match="-k nothing selects no test"):
        test_marked.test_sanitizer("memcheck", "kv", on_gpu)
    select("elsewhere")
    with pytest.raises(Skipped, match="1 skipped"):
        test_marked.test_sanitizer("memcheck", "kv", on_gpu)
    assert figures() == {"passed": 0, "failed": 0, "skipped": 1}


@pytest.mark.parametrize(
    ("launched", "nvcc", "missed"),
    [
        ({"_store_kernel", "_index_kernel", "kv_store", "another"}, True, ""),
        ({"_store_kernel", "kv_store"}, True, "_index_kernel"),
        ({"_store_kernel", "_index_kernel"}, True, "kv_store"),
        ({"_store_kernel", "_index_kernel"}, False, ""),  # where the tests of CUDA C++ are skipped
        (set(), False, "_index_kernel, _store_kernel"),
    ],
)
def test_kernels_that_were_not_launched_were_not_checked(
    on_gpu: Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, launched: set[str], nvcc: bool, missed: str
) -> None:
    _sanitizer(tmp_path / "bin", PASSES)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    if nvcc:
        (tmp_path / "bin" / "nvcc").touch(0o755)
    selection = Selection((), "any", ("minisgl_cuda/triton_ops/kv.py", "minisgl_cuda/csrc/kv_store.cuh"))
    monkeypatch.setattr(test_marked, "SELECTIONS", {"kv": selection})
    counts = {"passed": 2, "failed": 0, "skipped": 1}
    monkeypatch.setattr(test_marked, "launched_by", lambda *args: (counts, [], frozenset(launched)))
    if not missed:
        test_marked.test_sanitizer("memcheck", "kv", on_gpu)
        return
    with pytest.raises(Failed, match=f"the tests launch no {missed}$"):
        test_marked.test_sanitizer("memcheck", "kv", on_gpu)


# Which kernels there are, and which tests launch them.


def test_kernels_are_found_in_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "planted_kernels"
    (package / "csrc").mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "one.py").write_text(
        "import triton\n@triton.jit\ndef helper(x):\n    return x\n"
        "@triton.jit(do_not_specialize=['n'])\ndef first(n):\n    helper(n), shared(n)\n"
        "def launch():\n    first[(1,)](1)\n"
    )
    (package / "two.py").write_text("import triton\n@triton.jit\ndef shared(x):\n    return x\n")
    (package / "csrc" / "k.cuh").write_text(
        "__device__ void part() {}\ntemplate <class T>\n__global__ void plain(int n) {}\n"
        "__global__ void __launch_bounds__(256) bounded(const A a) {}\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(kernels, "PACKAGES", ("planted_kernels", "no_such_package"))
    assert kernels.kernels_by_file() == {
        "planted_kernels/one.py": {"first"},
        "planted_kernels/csrc/k.cuh": {"plain", "bounded"},
    }
    assert kernels.kernels_of(["planted_kernels/one.py", "planted_kernels/two.py"]) == {"first"}


def test_every_kernel_of_ours_is_in_one_selection() -> None:
    selected = [source for selection in test_marked.SELECTIONS.values() for source in selection.sources]
    assert sorted(selected) == sorted(kernels.kernels_by_file())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there the checks say so themselves")
@pytest.mark.parametrize("name", ["sample", "ops"])
@pytest.mark.slow
def test_selected_tests_launch_all_kernels_that_they_are_there_for(name: str, tmp_path: Path) -> None:
    """Interpreted and simulated. Of the other selections some take long so, and some need a GPU."""
    selection = test_marked.SELECTIONS[name]
    counts, failed, launched = test_marked.launched_by(selection, tmp_path, name)
    assert counts["passed"] > 0 and not failed and counts["skipped"] == 0
    assert launched == kernels.kernels_of(selection.sources)
