"""The CUDA sources before any kernel runs: compiling, caching, refusals, the calling convention, the two headers."""

from __future__ import annotations

import ctypes
import re
import shutil
import struct
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import minisgl_cpu_sim.cuda_sim as simulator
from minisgl_core.plugin_api import CannotRun
from minisgl_cuda import kv_build, kv_host, launch
from minisgl_cuda.kv_build import probe
from minisgl_cuda.kv_cpp import CudaKVKernels
from minisgl_cuda.kv_cpp.launch import INDEX, STORE, UNITS
from minisgl_cuda.launch import Alive, CompiledLauncher, Shape
from minisgl_cuda.ops_cpp import ACT, ADD_NORM, INSTANCES, NORM, ROPE, CompiledOps

HEADER = "minisgl/device.h"
FAKE_LIBRARY = """
#include <cstdint>
#include <cstring>
extern "C" int64_t last[32];
int64_t last[32];
extern "C" int minisgl_cuda_find(const char* name, const void** kernel) {
    *kernel = reinterpret_cast<const void*>(std::strlen(name));
    return 0;
}
extern "C" int minisgl_cuda_launch(const int64_t* request) {
    std::memcpy(last, request, sizeof last);
    return request[1] == 666 ? 700 : 0;
}
extern "C" const char* minisgl_cuda_error(int) { return "what CUDA says"; }
"""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MINISGL_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "cuda"


@pytest.fixture
def nvcc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A compiler of that name, which writes its arguments where a library should be."""
    program = tmp_path / "bin" / "nvcc"
    program.parent.mkdir()
    program.write_text('#!/bin/sh\nif [ "$1" = --version ]; then echo release 99; exit; fi\necho "$@" > "${@: -1}"\n')
    program.write_text(program.read_text().replace("#!/bin/sh", f"#!{shutil.which('bash')}"))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{Path('/usr/bin')}:{Path('/bin')}")
    return program


def test_a_library_is_compiled_once_per_architecture(
    cache: Path, nvcc: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    first = kv_build.compile_kernels(90)
    assert "arch=compute_90,code=sm_90" in first.read_text() and "launch.cu" in first.read_text()
    assert "compiling the CUDA kernels for sm_90 with nvcc" in capfd.readouterr().err
    assert kv_build.compile_kernels(90) == first and capfd.readouterr().err == ""
    other = kv_build.compile_kernels(80)
    assert other != first and sorted(p.name for p in cache.iterdir()) == sorted((first.name, other.name, "lock"))


def test_a_changed_source_or_compiler_compiles_anew(
    cache: Path, nvcc: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = {kv_build.compile_kernels(90).name}
    nvcc.write_text(nvcc.read_text().replace("release 99", "release 100"))
    names.add(kv_build.compile_kernels(90).name)
    changed = tmp_path / "csrc"
    shutil.copytree(kv_build.CSRC, changed)
    with open(changed / HEADER, "a") as header:
        header.write("// new\n")
    monkeypatch.setattr(kv_build, "CSRC", changed)
    names.add(kv_build.compile_kernels(90).name)
    assert len(names) == 3


def test_a_compiler_error_is_a_reason(cache: Path, nvcc: Path) -> None:
    nvcc.write_text(nvcc.read_text() + "echo 'nvcc fatal   : Unsupported gpu architecture' >&2; exit 1\n")
    with pytest.raises(CannotRun, match="Unsupported gpu architecture") as refused:
        probe({"device": {"kind": "cuda", "sm": 130}})
    assert "triton" in refused.value.reason.fix
    assert [path.name for path in cache.iterdir()] == ["lock"]


def test_no_compiler_is_a_reason(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(CannotRun, match="nvcc"):
        probe({"device": {"kind": "cuda", "sm": 90}})


def test_a_backend_without_a_platform_is_refused(kv_setup: Any) -> None:
    with pytest.raises(ValueError, match="platform"):
        CudaKVKernels(kv_setup())
    setup: Any = SimpleNamespace(platform=None)
    with pytest.raises(ValueError, match="platform"):
        CompiledOps(setup)


def test_tokens_are_compared_with_numpy_where_there_is_no_compiler(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    match_len = kv_host.match_function.__wrapped__()
    assert match_len is kv_host.numpy_match_len
    assert "tokens are compared with NumPy" in capfd.readouterr().err
    assert match_len(np.array([1, 2, 3], np.int32), np.array([1, 2], np.int32)) == 2


@pytest.fixture
def fake_library(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    source = tmp_path / "fake.cpp"
    source.write_text(FAKE_LIBRARY)
    path = kv_build.compile_source("fake", ("g++", "-shared", "-fPIC"), source, [source])
    monkeypatch.setattr(launch, "compile_kernels", lambda sm: path)
    return ctypes.CDLL(str(path))


def last_request(library: Any) -> tuple[int, ...]:
    return struct.unpack("32q", bytes((ctypes.c_char * 256).in_dll(library, "last")))


@pytest.mark.parametrize(("sm", "asked", "dependent"), [(90, None, 1), (90, False, 0), (80, None, 0)])
def test_a_launch_is_one_packed_struct(fake_library: Any, sm: int, asked: bool | None, dependent: int) -> None:
    platform: Any = SimpleNamespace(sm=sm, stream_handle=lambda: 77)
    launcher = CompiledLauncher(platform, asked)
    out, table, ids = torch.empty(2, 8), torch.empty(4, 8), torch.empty(2, dtype=torch.int32)
    pointers = (out.data_ptr(), table.data_ptr(), ids.data_ptr())
    name = INDEX.instance(UNITS[16])
    launcher.prepare(INDEX, UNITS[16])(Shape(3, 64, 4), (out, table, ids), (*pointers, -5, 4, 32, 2, 2))
    assert last_request(fake_library)[:14] == (len(name), 77, 3, 64, 4, dependent, *pointers, -5, 4, 32, 2, 2)


def test_floats_are_doubles_in_the_struct(fake_library: Any) -> None:
    platform: Any = SimpleNamespace(sm=90, stream_handle=lambda: 77)
    CompiledLauncher(platform).prepare(NORM, "float, 4")(Shape(1, 32, 1), (), (*range(9), 1e-6))
    sent = last_request(fake_library)[6:16]
    assert sent[:9] == tuple(range(9)) and struct.unpack("d", struct.pack("q", sent[9])) == (1e-6,)


def test_a_failed_launch_says_what_cuda_says(fake_library: Any) -> None:
    platform: Any = SimpleNamespace(sm=90, stream_handle=lambda: 666)
    with pytest.raises(RuntimeError, match="minisgl::kv_index: CUDA error 700: what CUDA says"):
        CompiledLauncher(platform).prepare(INDEX, UNITS[16])(Shape(1, 32, 1), (), (0,) * 8)


def test_things_live_as_long_as_their_owners() -> None:
    class Owner:
        pass

    alive: Alive[str] = Alive()
    first, second = Owner(), Owner()
    numbers = [alive.add(first, "a"), alive.add(second, "b")]
    assert [alive.find(number) for number in numbers] == ["a", "b"]
    del first
    with pytest.raises(KeyError):
        alive.find(numbers[0])
    assert alive.find(numbers[1]) == "b"


def _struct_fields(name: str, kind: str = "") -> list[str]:
    """Of a struct in the CUDA sources, in order; only those whose declaration begins with ``kind``."""
    text = "".join(path.read_text() for path in sorted(kv_build.CSRC.glob("*.cu*")))
    body = re.search(rf"struct {name} {{(.*?)}};", text, re.DOTALL)
    assert body is not None
    lines = [line.partition("//")[0].strip() for line in body[1].splitlines()]
    declared = [part.strip() for part in " ".join(lines).replace("*", "* ").split(";")]
    chosen = [part for part in declared if part and part.startswith(kind)]
    return [field for part in chosen for field in re.findall(r"(\w+)(?:,|$)", part)]


@pytest.mark.parametrize(
    ("struct_name", "kernels"),
    [
        ("StoreArgs", [STORE]),
        ("IndexArgs", [INDEX]),
        ("NormArgs", [NORM, ADD_NORM]),
        ("ActArgs", [ACT]),
        ("RopeArgs", [ROPE]),
    ],
)
def test_the_structs_of_both_languages_agree(struct_name: str, kernels: list[Any]) -> None:
    for kernel in kernels:
        assert _struct_fields(struct_name) == list(kernel.fields)
        assert _struct_fields(struct_name, "double ") == [name for name in kernel.fields if name in kernel.floats]


def test_the_launch_struct_is_as_python_packs_it() -> None:
    assert _struct_fields("Launch") == ["kernel", "stream", "blocks", "threads_x", "threads_y", "dependent"]


def test_every_kernel_is_in_the_launchers_table() -> None:
    text = (kv_build.CSRC / "launch.cu").read_text()
    arguments = re.findall(r"MINISGL_ENTRY\(kernel<([^>]+)>\)", text)
    assert sorted(arguments) == sorted(kind for both in INSTANCES.values() for kind in both)
    entries = re.findall(r"MINISGL_ENTRY\((minisgl::[^)]+)\)", text)
    assert sorted(entries) == sorted(kernel.instance(unit) for kernel in (STORE, INDEX) for unit in UNITS.values())
    templates = re.findall(r"MINISGL_ENTRIES\((minisgl::[^)]+)\)", text)
    assert sorted(templates) == sorted(kernel.template for kernel in (NORM, ADD_NORM, ACT, ROPE))


def _helpers(header: Path) -> set[str]:
    """What a header offers to kernels: functions and types in namespace minisgl, macros for shared memory."""
    text = header.read_text()
    inside = text[text.rindex("namespace minisgl {") :]
    functions = re.findall(r"^(?:__device__|inline|void|Unit|\w+ )[^;{}=]*?(\w+)\(", inside, re.MULTILINE)
    return {*functions, *re.findall(r"struct (?:alignas\(\d+\) )?(\w+)", inside)} | set(
        re.findall(r"#define (MINISGL_\w*SHARED)\(", text)
    )


def test_the_simulators_header_offers_what_the_gpus_does() -> None:
    ours = _helpers(kv_build.CSRC / HEADER)
    assert ours == _helpers(Path(simulator.__file__).parent / "include" / HEADER)
    assert {
        "load_once",
        "store",
        "widen",
        "narrow",
        "inverse_sqrt",
        "Bytes16",
        "wait_for_previous_kernel",
        "MINISGL_SHARED",
    } <= ours


@pytest.mark.parametrize("path", sorted(kv_build.CSRC.glob("*.cuh")), ids=lambda path: path.name)
def test_kernels_include_only_the_header_and_hold_no_ptx(path: Path) -> None:
    text = path.read_text()
    included = re.findall(r"#include (.*)", text)
    assert included[0] == f"<{HEADER}>" and set(included[1:]) <= {"<minisgl/vectors.h>"}
    assert "asm" not in text and "__global__" in text


def test_what_kernels_share_holds_no_ptx() -> None:
    text = (kv_build.CSRC / "minisgl/vectors.h").read_text()
    assert re.findall(r"#include (.*)", text) == [f"<{HEADER}>"] and "asm" not in text


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
@pytest.mark.skipif(torch.cuda.is_available(), reason="test_gpu_kv.py does more")
def test_nvcc_compiles_the_sources(cache: Path) -> None:
    platform: Any = SimpleNamespace(sm=90, stream_handle=lambda: 0)
    with pytest.raises(RuntimeError, match="kv_store<minisgl::Bytes16>: CUDA error"):  # there is no GPU to load it on
        CompiledLauncher(platform).prepare(STORE, UNITS[16])
