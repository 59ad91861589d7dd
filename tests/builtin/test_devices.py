"""Which device this machine has, found without touching it in this process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from minisgl_core.builtin.devices import cuda_devices, cuda_facts, cuda_use, detect_device
from minisgl_core.errors import BackendError
from minisgl_core.sandbox import Sandbox, SandboxError


def test_without_a_driver_the_device_is_a_cpu_and_no_process_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minisgl_core.builtin.devices._TRACES", ((Path("/nowhere/at/all"), "*"),))
    monkeypatch.setattr("minisgl_core.builtin.devices.Sandbox", None)
    assert detect_device().kind == "cpu"
    assert detect_device("cpu").kind == "cpu"


H200 = {"kind": "cuda", "sm": 90, "name": "H200", "total_bytes": 141 << 30, "count": 1}


@pytest.fixture
def child(monkeypatch: pytest.MonkeyPatch) -> Callable[[object], list[str]]:
    """``child(answer)``: the process answers so, or raises it; returns the functions that are called from then on."""

    def give(given: object) -> list[str]:
        called: list[str] = []

        def ask(self: Sandbox, request: dict[str, str], timeout_s: float) -> object:
            called.append(request["call"])
            if isinstance(given, Exception):
                raise given
            return given

        monkeypatch.setattr(Sandbox, "_ask", ask)
        return called

    return give


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "version"
    file.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06  Sun Jul 27\n")
    monkeypatch.setattr("minisgl_core.builtin.devices._DRIVER", file)
    monkeypatch.setattr("minisgl_core.builtin.devices._TRACES", ((tmp_path, "version"),))
    monkeypatch.setenv("MINISGL_CACHE_DIR", str(tmp_path / "cache"))


def test_device_facts_come_from_the_child_once_and_then_from_the_cache(
    driver: None, child: Callable[[object], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    called = child({"ok": True, "value": H200})
    first, second = detect_device(), detect_device("cuda")
    assert first == second and (first.sm, first.driver, str(first)) == (90, "580.65.06", "cuda sm90")
    assert called == ["minisgl_core.builtin.devices:cuda_facts"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    detect_device()
    assert len(called) == 2


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"ok": False, "error": "RuntimeError: torch sees none"}, "torch sees none"),
        (SandboxError("died (exit code -11)"), r"died \(exit code -11\)"),
    ],
)
def test_a_driver_without_a_usable_device_means_cpu_unless_cuda_was_requested(
    driver: None, child: Callable[[object], list[str]], given: object, text: str
) -> None:
    child(given)
    assert detect_device().kind == "cpu"
    with pytest.raises(BackendError, match=f"no CUDA device can be used: .*{text}"):
        detect_device("cuda")


def test_without_a_device_torch_sees_none() -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is one")
    assert cuda_devices({}) == [] and cuda_use() == ""
    with pytest.raises(RuntimeError, match="torch sees none"):
        cuda_facts({})
