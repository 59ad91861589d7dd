"""Compiles records to the calls of a replay: each operation writes directly to its recorded outputs where possible."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from .trace import OpRecord, tensors_of

__all__ = ["Call", "compile_record"]

aten = torch.ops.aten


class Call(NamedTuple):
    """One operation of a replay: ``result = function(*args, **kwargs)``, then ``finish(result)`` unless None."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    finish: Callable[[Any], object] | None


def compile_record(record: OpRecord) -> Call | None:
    """The cheapest call with the effect of ``record``; None if there is nothing to replay."""
    if record.action != "run":
        return None
    sinks = tuple(out for out, fresh in zip(record.outputs, record.fresh, strict=True) if fresh)
    if not sinks:
        finish = _wait if record.op.namespace == "c10d" else None
        return Call(_same_function(record), record.args, record.kwargs, finish)
    if record.op in (aten.clone.default, aten._to_copy.default) and _is_plain(sinks[0]):
        return Call(sinks[0].copy_, (record.args[0],), {}, None)
    if len(sinks) == len(record.outputs) and all(_is_plain(sink) for sink in sinks):
        into = _out_call(record, sinks)
        if into is not None:
            return into
        if len(sinks) == 1:
            return Call(_same_function(record), record.args, record.kwargs, sinks[0].copy_)
    return Call(_same_function(record), record.args, record.kwargs, _Scatter(record))


class _Scatter:
    """Copies the results of an operation into those recorded outputs that own their storage."""

    def __init__(self, record: OpRecord) -> None:
        pairs = zip(record.outputs, record.fresh, strict=True)
        self._sinks = [(i, _once(out)) for i, (out, fresh) in enumerate(pairs) if fresh]

    def __call__(self, result: Any) -> None:
        results = tensors_of(result)
        for index, sink in self._sinks:
            sink.copy_(_once(results[index]))


def _once(tensor: torch.Tensor) -> torch.Tensor:
    """Each element of an expanded tensor once, so that it can be written."""
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[dim] > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def _is_plain(tensor: torch.Tensor) -> bool:
    return _once(tensor) is tensor


def _wait(result: Any) -> None:
    """Wait for the handle of a collective."""
    result[-1].wait()


# torch's own Python functions parse their arguments in half the time of the generic call of an operation, and many of
# them can write into given outputs. Which function is the recorded operation is tried out, not listed.

_HOMES = (torch, torch._C._nn, torch.Tensor)
_FACTORY = frozenset({"dtype", "layout", "device", "pin_memory"})


def _same_function(record: OpRecord) -> Callable[..., Any]:
    """A torch function equivalent to this operation, or the operation itself."""
    wanted = _bind(record.op, record.args, record.kwargs)
    for function in _candidates(record):
        seen = _first_dispatch(function, record.args, record.kwargs)
        if seen is not None and seen.op is record.op and _same(seen.given, wanted):
            return function
    return record.op  # type: ignore[no-any-return]


def _out_call(record: OpRecord, sinks: tuple[torch.Tensor, ...]) -> Call | None:
    """The form of the operation that writes into ``sinks``, if there is a function for it."""
    makes_from_nothing = any(argument.name == "pin_memory" for argument in record.op._schema.arguments)
    fixed = _FACTORY if makes_from_nothing else frozenset()
    wanted = _without(_bind(record.op, record.args, record.kwargs), fixed)
    kwargs = {**_without(record.kwargs, fixed), "out": sinks[0] if len(sinks) == 1 else sinks}
    for function in _candidates(record):
        seen = _first_dispatch(function, record.args, kwargs)
        if seen is None or seen.op.overloadpacket is not record.op.overloadpacket:
            continue
        outs = tuple(argument.name for argument in seen.op._schema.arguments if argument.is_out)
        written = tuple(seen.given[name] for name in outs)
        if _same(written, sinks) and _same(_without(seen.given, fixed.union(outs)), wanted):
            return Call(function, record.args, kwargs, None)
    return None


def _candidates(record: OpRecord) -> Iterator[Callable[..., Any]]:
    name = str(record.op._schema.name).partition("::")[2]
    if record.op.namespace == "aten":
        found = (getattr(home, name, None) for home in _HOMES)
        yield from (function for function in found if callable(function))


class _Dispatch(NamedTuple):
    """An operation that is about to run, and all arguments by name."""

    op: Any
    given: dict[str, Any]


class _Stopped(Exception):
    """Raised to end a probe before the operation runs."""


class _Probe(TorchDispatchMode):
    seen: _Dispatch | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen = _Dispatch(func, _bind(func, args, kwargs or {}))
        raise _Stopped


def _first_dispatch(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Dispatch | None:
    """The operation that a call would run first; nothing is run. None if the arguments do not fit the function."""
    probe = _Probe()  # type: ignore[no-untyped-call]
    try:
        with probe:
            function(*args, **kwargs)
    except _Stopped:
        return probe.seen
    except (TypeError, RuntimeError, ValueError):
        return None
    return None


def _bind(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """All arguments by name, with defaults."""
    given = dict(zip((argument.name for argument in op._schema.arguments), args, strict=False))
    for argument in op._schema.arguments[len(args) :]:
        given[argument.name] = kwargs.get(argument.name, argument.default_value)
    return given


def _without(given: dict[str, Any], names: frozenset[str]) -> dict[str, Any]:
    return {name: value for name, value in given.items() if name not in names}


def _same(a: Any, b: Any) -> bool:
    """The same tensors, and equal numbers of the same type."""
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        return a is b
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(_same(x, y) for x, y in zip(a, b, strict=True))
    return type(a) is type(b) and bool(a == b)
