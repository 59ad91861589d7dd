"""A plugin of pytest that writes down which kernels the tests launch: ``-p support.gpu.launched --launched FILE``.

FILE gets a name per line, without template arguments. Launches in Triton's interpreter and in the CUDA simulator count
like those on a GPU, so that a machine without one can say which tests launch what.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

__all__ = ["Recorder", "pytest_addoption", "pytest_configure"]


def pytest_addoption(parser: pytest.Parser) -> None:
    """The option."""
    parser.addoption("--launched", type=Path, metavar="FILE", help="write the names of launched kernels to this file")


def pytest_configure(config: pytest.Config) -> None:
    """Record if the option names a file."""
    path = config.getoption("--launched")
    if path is not None:
        config.pluginmanager.register(Recorder(path), "minisgl-launched-kernels")


class Recorder:
    """Wraps the three functions that start kernels, for the rest of the process."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._names: set[str] = set()

    def pytest_collection_finish(self) -> None:
        """Before the first test, and after the conftests: importing triton decides whether it interprets."""
        with contextlib.suppress(ImportError):
            from triton.runtime.jit import KernelInterface

            self._watch(KernelInterface, "__getitem__", self._by_triton)
        with contextlib.suppress(ImportError):
            from minisgl_cuda.launch import CompiledLauncher

            self._watch(CompiledLauncher, "prepare", self._by_launcher)
        simulator = sys.modules.get("minisgl_cpu_sim.cuda_sim")  # which conftests import, if tests use it at all
        if simulator is not None:
            self._watch(simulator.SimulatedProgram, "launch", self._by_simulator)

    def pytest_sessionfinish(self) -> None:
        """Write them down."""
        self._path.write_text("".join(f"{name}\n" for name in sorted(self._names)))

    def _watch(self, owner: Any, method: str, wrapped: Callable[..., Callable[..., Any]]) -> None:
        setattr(owner, method, wrapped(getattr(owner, method)))

    def _by_triton(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def bind(function: Any, grid: Any) -> Any:
            start = real(function, grid)

            def launch(*args: Any, **options: Any) -> Any:
                self._names.add(function.fn.__name__)
                return start(*args, **options)

            return launch

        return bind

    def _by_launcher(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def prepare(launcher: Any, kernel: Any, arguments: str) -> Any:
            run = real(launcher, kernel, arguments)

            def launch(*args: Any) -> None:
                self._names.add(_plain(kernel.template))
                run(*args)

            return launch

        return prepare

    def _by_simulator(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def launch(program: Any, kernel: str, *args: Any, **options: Any) -> None:
            self._names.add(_plain(kernel))
            real(program, kernel, *args, **options)

        return launch


def _plain(name: str) -> str:
    """``ns::kernel<float, 4>`` -> ``kernel``"""
    return name.partition("<")[0].rpartition("::")[2]
