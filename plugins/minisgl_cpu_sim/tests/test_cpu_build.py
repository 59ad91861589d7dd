"""Compiling the kernels (cache, concurrency, refusals) and calling them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from minisgl_core.plugin_api import CannotRun, LinearSetup
from minisgl_cpu_sim.library import prepare
from minisgl_cpu_sim.native import build
from minisgl_cpu_sim.native.linear import NativeLinear


@pytest.fixture
def trivial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A source folder that compiles in no time, in place of the kernels."""
    folder = tmp_path / "sources"
    folder.mkdir()
    (folder / "one.cpp").write_text('extern "C" int one() { return 1; }\n')
    monkeypatch.setattr(build, "_SOURCES", folder)
    return folder


def test_a_library_is_compiled_once(trivial: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    cache = tmp_path / "cache"
    first = build.build(cache)
    assert "compiling the CPU kernels" in capfd.readouterr().err
    assert build.build(cache) == first and capfd.readouterr().err == ""
    assert sorted(path.name for path in cache.iterdir()) == sorted((first.name, "lock"))


def test_a_changed_source_or_flag_compiles_anew(trivial: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = {build.build(tmp_path / "cache").name}
    (trivial / "shared.h").write_text("// new\n")
    names.add(build.build(tmp_path / "cache").name)
    monkeypatch.setattr(build, "_FLAGS", (*build._FLAGS, "-DOTHER"))
    names.add(build.build(tmp_path / "cache").name)
    assert len(names) == 3


def test_concurrent_processes_share_one_compilation(trivial: Path, tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from minisgl_cpu_sim.native import build;"
        f"build._SOURCES = Path({str(trivial)!r}); print(build.build(Path({str(tmp_path / 'cache')!r})))"
    )
    running = [
        subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    outputs = [process.communicate() for process in running]
    assert [process.returncode for process in running] == [0, 0], outputs
    assert outputs[0][0] == outputs[1][0]
    assert sum("compiling" in err for _, err in outputs) == 1


def test_a_compiler_error_is_a_reason(trivial: Path, tmp_path: Path) -> None:
    (trivial / "bad.cpp").write_text("int x = undeclared;\n")
    with pytest.raises(CannotRun, match="undeclared") as refused:
        build.build(tmp_path / "cache")
    assert refused.value.reason.code == "compile-failed" and "CXX" in refused.value.reason.fix
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["lock"]


def test_no_compiler_is_a_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(CannotRun, match=r"g\+\+"):
        build.compiler_command()


def test_cxx_names_the_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    wrapper = tmp_path / "mycc"
    wrapper.write_text('#!/bin/sh\nexec g++ "$@"\n')
    wrapper.chmod(0o755)
    monkeypatch.setenv("CXX", f"{wrapper} -DTHROUGH_CXX")
    assert build.compiler_command()[:2] == (str(wrapper), "-DTHROUGH_CXX")


def test_a_folder_that_cannot_be_made_is_replaced(trivial: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert build.build(tmp_path / "file" / "cache").exists()


def test_the_kernels_bring_no_second_openmp_runtime() -> None:
    """Two of them in one process have two thread pools that fight for the cores."""
    program = """if True:
        from pathlib import Path
        import torch
        def runtimes():
            mapped = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines()}
            return sorted(name for name in mapped if Path(name).name.startswith(("libgomp", "libomp", "libiomp")))
        torch.ones(1000) + 1
        before = runtimes()
        from minisgl_cpu_sim.native import build
        build.library()
        print(before, runtimes() == before)
    """
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "omp" in done.stdout and done.stdout.endswith(" True\n"), done.stdout


def test_importing_the_plugin_imports_nothing_heavy() -> None:
    program = (
        "import minisgl_cpu_sim.plugin, sys; print([m for m in ('torch', 'numpy', 'pydantic') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_kernels_are_one_operation_to_a_recorder() -> None:
    seen = []

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    backend = NativeLinear(LinearSetup(device=torch.device("cpu"), dtype=torch.float32, max_tokens=8))
    x, weight = torch.randn(2, 8), torch.randn(4, 8)
    outside = backend.forward(x, weight)
    with Recorder():  # type: ignore[no-untyped-call]
        inside = backend.forward(x, weight)
    assert seen[-1] == "minisgl_cpu.linear.default" and len(seen) == 2
    assert torch.equal(inside, outside)


def test_a_prepared_call_repeats_a_kernel_on_the_same_memory() -> None:
    x, weight, out = torch.randn(2, 8), torch.randn(4, 8), torch.empty(2, 4)
    call = prepare(torch.ops.minisgl_cpu.linear.default, (out, x, weight, None))
    assert call is not None
    for _ in range(2):
        x.copy_(torch.randn(2, 8))
        call()
        torch.testing.assert_close(out, x @ weight.t())


def test_other_operations_have_no_prepared_form() -> None:
    assert prepare(torch.ops.aten.add.Tensor, (torch.ones(1), torch.ones(1))) is None
