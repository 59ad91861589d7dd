"""Launches past Triton's look at the arguments: the code must be the one that Triton would have chosen."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton", reason="the kernels need triton")

from triton import __version__, knobs
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature
from triton.tools.tensor_descriptor import TensorDescriptor

from minisgl_moe import executor, launch
from minisgl_moe.executor import FusedMoE
from minisgl_moe.launch import Form, Kernel, ceil_div, known, power_of_two
from minisgl_moe.routing import FusedRouting
from minisgl_moe.tiles import Tile, Tiling

Make = Callable[..., Any]
STREAM = 5


class Function:
    """Stands in for a compiling Triton function: ``choose(arguments)`` says which code it has for them."""

    def __init__(self, choose: Callable[[tuple[Any, ...]], Any]) -> None:
        self.choose = choose
        self.compiled: list[tuple[Any, ...]] = []
        self.started: list[tuple[Any, ...]] = []
        self.code: Any = None

    def __getitem__(self, grid: tuple[int, int]) -> Callable[..., Any]:
        def run(*arguments: Any, **options: Any) -> Any:
            code = self.code = self.choose(arguments)
            self.compiled.append((grid, arguments, options))

            def start(*given: Any) -> None:
                self.code = code
                self.started.append(given)

            return SimpleNamespace(run=start, function=7, packed_metadata="metadata")

        return run


@pytest.fixture(autouse=True)
def _a_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = SimpleNamespace(active=SimpleNamespace(get_current_stream=lambda device: STREAM))
    monkeypatch.setattr(launch, "driver", driver)
    monkeypatch.setattr(launch, "_DIRECT", True)


def made(block: tuple[int, int] | None = None) -> tuple[Function, Form]:
    function = Function(lambda arguments: None)
    return function, Kernel(function).form((32, 1), warps=8, stages=2, block=block)


def test_later_launches_give_addresses_to_the_code_of_the_first() -> None:
    function, form = made()
    x, y = torch.zeros(4), torch.zeros(4, dtype=torch.int32)
    form.launch((3, 2), (x, y), (9,), 48)
    assert function.compiled == [((3, 2), (x, y, 48, 9, 32, 1), {"num_warps": 8, "num_stages": 2})]
    form.launch((5, 1), (y.float(), x.int()), (11,), 64)
    assert len(function.compiled) == 1 and len(function.started) == 1
    start = function.started[0]
    assert start[:9] == (5, 1, 1, STREAM, 7, "metadata", None, None, None)
    assert start[11:] == (64, 11, 32, 1)
    form.launch((3, 2), (x, y), (9,), 48)
    assert function.started[1][9:] == (x.data_ptr(), y.data_ptr(), 48, 9, 32, 1)


@pytest.mark.parametrize(
    ("x", "stride"),
    [
        (torch.zeros(8)[1:], 48),
        (torch.zeros(8), 1),
        (torch.zeros(8), 0),
        (torch.zeros(8), 2**31),
        (torch.zeros(8), 40),
        (torch.zeros(8, dtype=torch.float16), 48),
    ],
    ids=["unaligned", "stride 1", "stride 0", "wide stride", "odd stride", "dtype"],
)
def test_arguments_of_another_kind_go_through_triton(x: torch.Tensor, stride: int) -> None:
    function, form = made()
    form.launch((1, 1), (torch.zeros(8),), (), 48)
    form.launch((1, 1), (x,), (), stride)
    assert len(function.compiled) == 2 and not function.started


def test_the_installed_triton_is_known() -> None:
    """A newer one launches slowly until a developer has compared its ``JITFunction.run`` with ours."""
    assert known(__version__)


@pytest.mark.parametrize(
    ("version", "answer"),
    [("3.3.1", False), ("3.4.0", True), ("3.9.0+git1", True), ("3.10.0", False), ("4.4.0", False)],
)
def test_a_triton_that_is_not_known_launches_all(monkeypatch: pytest.MonkeyPatch, version: str, answer: bool) -> None:
    assert known(version) is answer
    monkeypatch.setattr(launch, "_DIRECT", answer)
    function, form = made()
    for _ in range(3):
        form.launch((1, 1), (torch.zeros(8),), ())
    assert len(function.compiled) == (1 if answer else 3)


def test_launch_hooks_of_triton_see_every_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    function, form = made()
    for hook in (None, print, SimpleNamespace(calls=[print]), SimpleNamespace(calls=[])):
        monkeypatch.setattr(knobs.runtime, "launch_exit_hook", hook)
        form.launch((1, 1), (torch.zeros(8),), ())
    assert len(function.compiled) == 3 and len(function.started) == 1


def test_a_descriptor_does_not_keep_its_tensor() -> None:
    function, form = made(block=(16, 32))
    w = torch.zeros(3, 16, 64)
    form.launch((1, 1), (w,), ())
    assert function.compiled[0][1][0].shape == torch.Size([48, 64])
    form.launch((1, 1), (w,), ())
    descriptor, address = function.started[0][9], w.data_ptr()
    assert (list(descriptor.shape), list(descriptor.strides)) == ([48, 64], [64, 1])
    assert (descriptor.block_shape, descriptor.padding) == ([16, 32], "zero")
    assert descriptor.base.data_ptr() == address and descriptor.base.dtype == torch.float32
    function.compiled.clear()
    alive = weakref.ref(w)
    del w
    gc.collect()
    assert alive() is None


@given(st.integers(0, 10**6), st.integers(1, 10**4))
def test_ceil_div_rounds_up(total: int, of: int) -> None:
    assert (ceil_div(total, of) - 1) * of < total <= ceil_div(total, of) * of
    assert power_of_two(of).bit_count() == 1 and power_of_two(of) // 2 < of <= power_of_two(of)


# --- against Triton's own choice --------------------------------------------------------------------------------------

Launch = tuple[Form, tuple[int, int], tuple[torch.Tensor, ...], tuple[int, ...], int | None]


def tritons_choice(form: Form) -> Callable[[tuple[Any, ...]], Any]:
    """The look-ups in Triton's cache of compiled code, on a Hopper GPU."""
    function: Any = form._function
    jit: Any = function
    if not isinstance(function, JITFunction):
        jit = JITFunction(function.fn, do_not_specialize=function.kwargs["do_not_specialize"])
    bind = create_function_from_signature(jit.signature, jit.params, make_backend(GPUTarget("cuda", 90, 32)))
    return lambda arguments: str(bind(*arguments)[1])


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Launch]]:
    """Instead of a launch, an entry in this list."""
    found: list[Launch] = []

    def note(form: Form, grid: Any, tensors: Any, numbers: Any, stride: int | None = None) -> None:
        found.append((form, grid, tensors, numbers, stride))

    with monkeypatch.context() as context:
        context.setattr(Form, "launch", note)
        yield found


def check_choices(launches: list[Launch]) -> int:
    """Launch anew, on code that knows what it was compiled for; how many launches did not go through Triton?"""
    twins: dict[int, tuple[Function, Form]] = {}
    for form, grid, tensors, numbers, stride in launches:
        if id(form) not in twins:
            function = Function(tritons_choice(form))
            twins[id(form)] = function, Form(function, form._constants, 4, 3, form._block)
        function, twin = twins[id(form)]
        LAUNCH(twin, grid, tensors, numbers, stride)
        first: Any = tensors[0]
        if form._block is not None:
            first = TensorDescriptor.from_tensor(first.view(-1, first.shape[-1]), list(form._block))
        lead = () if stride is None else (stride,)
        wanted = function.choose((first, *tensors[1:], *lead, *numbers, *form._constants))
        assert function.code == wanted
    return sum(len(function.started) for function, _ in twins.values())


LAUNCH = Form.launch
PAIRS = Tiling(False, Tile(1, 16, 32), Tile(1, 16, 16))
PLAIN = Tiling(True, Tile(16, 32, 32), Tile(16, 16, 16))
DESCRIPTORS = Tiling(True, Tile(32, 32, 32, tma=1), Tile(32, 32, 32, swap=1, tma=1))


@pytest.mark.parametrize("tiling", [PAIRS, PLAIN, DESCRIPTORS], ids=["pairs", "plain", "descriptors"])
def test_experts_run_the_code_that_triton_would_choose(
    layer: Make, monkeypatch: pytest.MonkeyPatch, launches: list[Launch], tiling: Tiling
) -> None:
    """All sizes, inputs with odd strides and addresses, and layers that differ in their number of experts alone."""
    monkeypatch.setattr(executor, "tiling_at", lambda *args: tiling)
    for experts in (13, 16):
        made = layer(experts, top_k=2, hidden=32, inner=16, max_tokens=10_000)
        moe = FusedMoE(made.setup())
        weights = moe.prepare_weights(0, made.w13, made.w2)
        for tokens in (1, 2, 8, 16, 17, 100, 1024, 10_000, 16, 17):
            ids, shares = made.ids(tokens), made.shares(tokens)
            for first, width in ((0, 32), (0, 33), (1, 48), (16, 48)):
                moe.forward(made.randn(tokens, width)[:, first:][:, :32], ids, shares, weights, 0)
            moe.forward(made.randn(1, 32).expand(tokens, 32), ids, shares, weights, 0)
    assert len(launches) >= 2 * 10 * 5 * 2
    assert check_choices(launches) >= len(launches) // 2


@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_routing_runs_the_code_that_triton_would_choose(data: st.DataObject) -> None:
    setup: Any = None
    routing, found = FusedRouting(setup), []
    with pytest.MonkeyPatch.context() as context:
        context.setattr(Form, "launch", lambda *arguments: found.append(arguments))
        for _ in range(6):
            tokens, experts = data.draw(st.integers(1, 40)), data.draw(st.sampled_from([1, 60, 64, 128]))
            width = experts + data.draw(st.sampled_from([0, 1, 4, 64]))
            dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16]))
            routing.route(torch.zeros(tokens, width, dtype=dtype)[:, width - experts :], 1, True)
    check_choices(found)
