"""From records to the calls of a replay: each operation writes straight into its recorded outputs where it can."""

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
    """The cheapest call with the effect of ``record``; None if a replay has nothing to do."""
    if record.action != "run":
        return None
    sinks = [out for out, fresh in zip(record.outputs, record.fresh, strict=True) if fresh]
    if not sinks:
        function = _method(record) or record.op
        return Call(function, record.args, record.kwargs, _wait if record.op.namespace == "c10d" else None)
    if len(record.outputs) == 1 and _is_plain(sinks[0]):
        if record.op in (aten.clone.default, aten._to_copy.default):
            return Call(sinks[0].copy_, (record.args[0],), {}, None)
        direct = _out_function(record, sinks[0])
        if direct is not None:
            return Call(direct, record.args, {**_without_factory(record.kwargs), "out": sinks[0]}, None)
        return Call(record.op, record.args, record.kwargs, sinks[0].copy_)
    return Call(record.op, record.args, record.kwargs, _Scatter(record))


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
    """A collective is done when its handle says so."""
    result[-1].wait()


def _method(record: OpRecord) -> Callable[..., Any] | None:
    """The Tensor method of an in-place operation: its argument parser costs half of the generic one."""
    name = _base_name(record)
    candidate = getattr(torch.Tensor, name, None) if record.op.namespace == "aten" and name.endswith("_") else None
    if candidate is not None and _leads_to(candidate, record.args, record.kwargs, record, out=None):
        return candidate  # type: ignore[no-any-return]
    return None


def _out_function(record: OpRecord, sink: torch.Tensor) -> Callable[..., Any] | None:
    """A torch function that takes ``out=`` and is this very operation, writing into ``sink``."""
    if record.op.namespace != "aten":
        return None
    kwargs = {**_without_factory(record.kwargs), "out": sink}
    for module in (torch, torch._C._nn):
        candidate = getattr(module, _base_name(record), None)
        if candidate is not None and _leads_to(candidate, record.args, kwargs, record, out=sink):
            return candidate  # type: ignore[no-any-return]
    return None


def _base_name(record: OpRecord) -> str:
    name: str = record.op._schema.name
    return name.partition("::")[2]


def _without_factory(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Keyword arguments that an output given by the caller settles already."""
    return {key: value for key, value in kwargs.items() if key not in _FACTORY}


_FACTORY = frozenset({"dtype", "layout", "device", "pin_memory"})


class _Seen(Exception):
    """Carries what reached the dispatcher, instead of running it."""

    def __init__(self, func: Any, args: Any, kwargs: Any) -> None:
        self.func, self.args_seen, self.kwargs_seen = func, args, kwargs
        super().__init__()


class _Probe(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise _Seen(func, args, kwargs or {})


def _leads_to(
    candidate: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    record: OpRecord,
    out: torch.Tensor | None,
) -> bool:
    """Would the call dispatch exactly one operation: the recorded one, or its ``out`` form with the same arguments?"""
    try:
        with _Probe():  # type: ignore[no-untyped-call]
            candidate(*args, **kwargs)
    except _Seen as seen:
        if out is None and seen.func is not record.op:
            return False
        if seen.func.overloadpacket is not record.op.overloadpacket:
            return False
        got = dict(_bind(seen.func, seen.args_seen, seen.kwargs_seen))
        if out is not None and not any(got.pop(name, None) is out for name in ("out", "result")):
            return False
        wanted = dict(_bind(record.op, record.args, record.kwargs))
        if out is not None:
            wanted = _without_factory(wanted)
            got = _without_factory(got)
        return got.keys() == wanted.keys() and all(_same(got[key], wanted[key]) for key in wanted)
    except (TypeError, RuntimeError, ValueError):
        return False
    return False


def _bind(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Every argument by name, defaults filled in."""
    for position, argument in enumerate(op._schema.arguments):
        if position < len(args):
            yield argument.name, args[position]
        elif argument.name in kwargs:
            yield argument.name, kwargs[argument.name]
        else:
            yield argument.name, argument.default_value if argument.has_default_value() else None


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        return a is b
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(_same(x, y) for x, y in zip(a, b, strict=True))
    return type(a) is type(b) and bool(a == b)
