"""Compiling the kernels (cache, concurrency, refusals) and calling them."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from minisgl_core.errors import ConfigError
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
    monkeypatch.setattr(build.library, "cache_info", lambda: SimpleNamespace(currsize=0))  # not loaded yet
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return folder


@pytest.fixture
def broken_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A g++ that is the first on PATH and fails."""
    program = tmp_path / "bin" / "g++"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=os.pathsep)
    return program


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


def test_a_compiler_that_fails_in_silence_is_a_reason(trivial: Path, tmp_path: Path, broken_compiler: Path) -> None:
    with pytest.raises(CannotRun, match=r"g\+\+ failed: exit code 1, without a word"):
        build.build(tmp_path / "cache")


def test_what_another_compiler_has_made_will_do_where_none_works(
    trivial: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    request: pytest.FixtureRequest,
) -> None:
    monkeypatch.setenv("MINISGL_CACHE_DIR", str(tmp_path / "cache"))
    made = build.build(build.kernels_dir())
    capfd.readouterr()
    request.getfixturevalue("broken_compiler")
    assert build.build(build.kernels_dir()) == made
    build.check()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert build.build(build.kernels_dir()) == made
    build.check()
    assert capfd.readouterr().err == ""
    (trivial / "one.cpp").write_text('extern "C" int one() { return 2; }\n')
    with pytest.raises(CannotRun, match="none on PATH"):
        build.build(build.kernels_dir())


def test_a_compiler_named_by_cxx_is_meant(trivial: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINISGL_CACHE_DIR", str(tmp_path / "cache"))
    build.build(build.kernels_dir())
    monkeypatch.setenv("CXX", "/nope/g++")
    for use in (build.check, lambda: build.build(build.kernels_dir())):
        with pytest.raises(ConfigError, match="CXX is '/nope/g\\+\\+', which is no program"):
            use()
    monkeypatch.setenv("CXX", "false")
    for use in (build.check, lambda: build.build(build.kernels_dir())):
        with pytest.raises(CannotRun, match=r"CXX: .* false failed: exit code 1"):
            use()


def test_the_check_compiles_little_and_only_while_the_kernels_are_not_there(
    trivial: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MINISGL_CACHE_DIR", str(tmp_path / "cache"))
    (trivial / "one.cpp").write_text("not C++ at all")
    build.check()
    assert not (tmp_path / "cache").exists()
    (trivial / "one.cpp").write_text("")
    build.build(build.kernels_dir())
    monkeypatch.setattr(build, "_try", None)
    build.check()


def test_a_library_of_another_system_is_a_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "kernels.so").write_bytes(b"no library")
    monkeypatch.setattr(build, "build", lambda folder: tmp_path / "kernels.so")
    with pytest.raises(CannotRun, match=r"kernels\.so.*\(delete "):
        build.library.__wrapped__()


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
