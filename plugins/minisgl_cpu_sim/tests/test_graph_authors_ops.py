"""Operations as authors of kernels register them: each way is captured as one operation, checked, and replayed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from minisgl_core.plugin_api import KernelLibrary
from minisgl_cpu_sim.graph import EmulatedGraph, GraphViolation, Rows, StrictReplay, strict_check

NAMESPACE = "graph_authors_test"
KEPT: list[torch.Tensor] = []
"""What the body keeps while :data:`HOARDS` is set."""
HOARDS = {"on": False}


def twice_plus_one(x: torch.Tensor) -> torch.Tensor:
    made = x * 2
    if HOARDS["on"]:
        KEPT.append(made)
    return made + 1


def twice_plus_one_(x: torch.Tensor) -> None:
    x.copy_(twice_plus_one(x))


def _custom_op(name: str, body: Any = twice_plus_one, mutates_args: tuple[str, ...] = (), **more: Any) -> Any:
    return torch.library.custom_op(f"{NAMESPACE}::{name}", body, mutates_args=mutates_args, **more)


_LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")
_LIBRARY.define("bodiless(Tensor x) -> Tensor")


def _library_impl(name: str, key: str) -> Any:
    _LIBRARY.define(f"{name}(Tensor x) -> Tensor")
    _LIBRARY.impl(name, twice_plus_one, key)
    return getattr(torch.ops.graph_authors_test, name)


def _with_autograd() -> Any:
    op = _custom_op("autograd")
    op.register_autograd(lambda _, grad: grad * 2)
    return op


def _of_a_kernel_library() -> Any:
    return KernelLibrary(NAMESPACE).register("of_kernel_library(Tensor x) -> Tensor", twice_plus_one)


def _in_numpy(x: torch.Tensor) -> torch.Tensor:
    """As a launch does, it works on the memory without torch."""
    return torch.from_numpy(x.numpy() * 2 + 1)


def _without_result() -> Any:
    mutating = _custom_op("mutating", twice_plus_one_, ("x",))

    def call(x: torch.Tensor) -> torch.Tensor:
        out = x.clone()
        mutating(out)
        return out

    return call


OPS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "plain": _custom_op("plain"),
    "for_the_cpu": _custom_op("for_the_cpu", device_types="cpu"),
    "mutating": _without_result(),
    "autograd": _with_autograd(),
    "impl_cpu": _library_impl("impl_cpu", "CPU"),
    "impl_explicit": _library_impl("impl_explicit", "CompositeExplicitAutograd"),
    "impl_implicit": _library_impl("impl_implicit", "CompositeImplicitAutograd"),
    "in_numpy": _custom_op("in_numpy", _in_numpy),
    "of_kernel_library": _of_a_kernel_library(),
}


@pytest.fixture(params=["no_grad", "inference"], autouse=True)
def _mode(request: pytest.FixtureRequest) -> Any:
    HOARDS["on"] = False
    with torch.no_grad(), torch.inference_mode(request.param == "inference"):
        yield
    KEPT.clear()


@pytest.mark.parametrize("name", OPS)
def test_case_106_an_authors_operation_is_captured_and_checked(name: str) -> None:
    x, op = torch.arange(6.0).view(2, 3), OPS[name]
    step = lambda: op(x + 1) * 10  # noqa: E731
    graph = EmulatedGraph.capture(step, strict=True)
    for start in (0.0, 5.0):
        x.fill_(start)
        assert torch.equal(strict_check(graph, step), torch.full((2, 3), (2 * (start + 1) + 1) * 10))
        assert torch.equal(graph.replay(), torch.full((2, 3), (2 * (start + 1) + 1) * 10))


@pytest.mark.parametrize("name", [name for name in OPS if name != "in_numpy"])
def test_case_106_memory_that_an_authors_operation_hoards_is_found(name: str) -> None:
    """The body is entered in such a way that what it makes is seen."""
    x, op = torch.arange(6.0), OPS[name]
    step = lambda: op(x + 1)  # noqa: E731
    HOARDS["on"] = True
    check = StrictReplay(EmulatedGraph.capture(step), step, {})
    check({}, {}, Rows(0, 0), {})
    check({}, {}, Rows(0, 0), {})
    with pytest.raises(GraphViolation, match="growing_memory"):
        check({}, {}, Rows(0, 0), {})


def test_case_106_an_operation_without_a_body_for_the_host_is_an_error_of_torch() -> None:
    with pytest.raises(NotImplementedError, match="bodiless"):
        EmulatedGraph.capture(lambda: torch.ops.graph_authors_test.bodiless(torch.ones(2)), strict=True, warmup=0)
