"""The dispatch mode that records a step. It sees every call that goes through torch's dispatcher."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from .trace import Action, OpRecord, StorageUse, TensorRef, Trace, caller, describe, tensors_of
from .violation import GraphViolation

__all__ = ["HostAccess", "Recorder", "fill_garbage"]

aten = torch.ops.aten

WHOLE = frozenset(
    {"linear", "matmul", "rms_norm", "layer_norm", "scaled_dot_product_attention", "softmax", "log_softmax"}
)
"""Composite operations that are recorded as one; all others are decomposed, which exposes host reads inside."""

EMPTY = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted"})
RESIZING = frozenset({"resize_", "resize_as_", "set_", "resize"})
HOST_METHODS = frozenset(
    {"tolist", "numpy", "item", "cpu", "__bool__", "__int__", "__float__", "__index__", "__array__"}
)
BODIES = (
    torch._C.DispatchKey.CPU,
    torch._C.DispatchKey.CompositeExplicitAutograd,
    torch._C.DispatchKey.CompositeImplicitAutograd,
)
"""Dispatch keys at which a library's operation may have its body for host tensors, in the dispatcher's order."""
HOST_COPIES = frozenset({"tensor", "as_tensor", "asarray", "from_numpy", "frombuffer"})


class Recorder(TorchDispatchMode):
    """Fills ``trace`` while it is active.

    ``strict`` refuses what only an emulation could record: host reads and copies of host memory. ``checked`` keeps a
    copy of every fresh output and fills uninitialised memory with garbage that is the same in each checked run.
    ``before_write`` is called with a tensor from outside before an operation changes it.
    """

    def __init__(
        self,
        *,
        strict: bool = False,
        checked: bool = False,
        before_write: Callable[[torch.Tensor], None] | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.trace = Trace()
        self._strict, self._checked, self._before_write = strict, checked, before_write
        self._index_of: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = _base_name(func)
        if func.namespace == "aten" and name not in WHOLE and func._can_decompose():
            with self:
                return func.decompose(*args, **kwargs)
        inputs = tensors_of((args, kwargs))
        self._refuse(func, name, args, kwargs, inputs)
        written = _written(func, args, kwargs)
        if self._before_write is not None:
            for tensor in written:
                if self._is_external(tensor):
                    self._before_write(tensor)
        made: list[weakref.ref[torch.Tensor]] = []
        body = _host_body(func, inputs) if self._checked else None
        if body is not None:
            with _Watch(made):  # the body is entered directly, so that the mode sees what happens inside
                result = func._op_dk(body, *args, **kwargs)
        else:
            result = _run_without_random(func, args, kwargs)
        if self._checked and name in EMPTY:
            fill_garbage(result)
        if self._checked:
            made += [weakref.ref(tensor) for tensor in tensors_of(result)]
            self.trace.made += [(len(self.trace.ops), ref) for ref in made]
        self._note(func, name, args, kwargs, inputs, written, result)
        return result

    def _refuse(self, func: Any, name: str, args: Any, kwargs: Any, inputs: list[torch.Tensor]) -> None:
        if name in RESIZING:
            raise GraphViolation("storage", str(func), f"changes storage at {caller()}; addresses must stay fixed")
        if _shape_depends_on_data(func, name, args, kwargs):
            raise GraphViolation(
                "dynamic_shape",
                str(func),
                f"the shape of its result depends on device data at {caller()}; a graph has fixed shapes, use a mask",
            )
        if not self._strict:
            return
        if torch.Tag.data_dependent_output in func.tags:
            raise GraphViolation(
                "host_read", str(func), f"the host waits for a device value at {caller()}; keep the value on the device"
            )
        if name == "lift_fresh" and inputs[0].dim() > 0:
            raise GraphViolation(
                "host_copy",
                str(func),
                f"copies host data {describe(inputs[0])} into the step at {caller()}; upload it before the replay",
            )

    def _note(
        self,
        func: Any,
        name: str,
        args: Any,
        kwargs: Any,
        inputs: list[torch.Tensor],
        written: list[torch.Tensor],
        result: Any,
    ) -> None:
        index = len(self.trace.ops)
        outputs = tensors_of(result)
        known = {_address(t) for t in inputs}
        input_refs = tuple(self._ref(t, index, external=True) for t in inputs)
        fresh = tuple(_address(t) not in known and t.numel() > 0 for t in outputs)
        output_refs = tuple(self._ref(t, index, external=False) for t in outputs)
        for tensor in written:
            self.trace.storages[self._index_of[_address(tensor)]].written_by.append(index)
        aliases = tuple(t.detach() for t in outputs)
        keep_args, keep_kwargs = pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, (args, kwargs))
        action: Action = "run"
        if name in EMPTY:
            action = "empty"
        elif torch.Tag.data_dependent_output in func.tags:
            action = "host_read"
        elif (not any(fresh) and not written) or torch.Tag.inplace_view in func.tags:
            action = "view"
        copies = (
            tuple(t.clone() if new else None for t, new in zip(outputs, fresh, strict=True)) if self._checked else ()
        )
        self.trace.ops.append(
            OpRecord(
                index=index,
                op=func,
                args=keep_args,
                kwargs=keep_kwargs,
                inputs=input_refs,
                outputs=aliases,
                output_refs=output_refs,
                fresh=fresh,
                action=action,
                where=caller(),
                result=result if action == "host_read" else None,
                values=copies,
            )
        )

    def _is_external(self, tensor: torch.Tensor) -> bool:
        """True for memory from outside: memory that the run has not met before was not made by it."""
        index = self._index_of.get(_address(tensor))
        return index is None or self.trace.storages[index].external

    def _ref(self, tensor: torch.Tensor, op: int, *, external: bool) -> TensorRef:
        if tensor.layout is not torch.strided:
            raise GraphViolation(
                "storage", describe(tensor), f"has layout {tensor.layout} at {caller()}; use dense tensors"
            )
        address = _address(tensor)
        index = self._index_of.setdefault(address, len(self.trace.storages))
        if index == len(self.trace.storages):
            self.trace.storages.append(StorageUse(index, external, tensor.detach(), op, op))
        self.trace.storages[index].last = op
        return TensorRef(index, int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride(), tensor.dtype)


class _Watch(TorchDispatchMode):
    """Weak references to what the body of a library operation creates."""

    def __init__(self, made: list[weakref.ref[torch.Tensor]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._made = made

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._made += [weakref.ref(tensor) for tensor in tensors_of(result)]
        return result


class HostAccess(TorchFunctionMode):
    """Refuses host accesses to a tensor that bypass the dispatcher on a CPU, but would wait on a device."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in HOST_METHODS and args and isinstance(args[0], torch.Tensor):
            raise GraphViolation(
                "host_read",
                f"Tensor.{name}",
                f"the host waits for {describe(args[0])} at {caller()}; keep it on the device",
            )
        if name in HOST_COPIES and args and not _is_number(args[0]):
            raise GraphViolation(
                "host_copy",
                f"torch.{name}",
                f"copies host data into the step at {caller()}; upload it before the replay",
            )
        return func(*args, **(kwargs or {}))


def fill_garbage(result: Any) -> None:
    """Fill uninitialised memory so that its use is visible: NaN, or the least integer."""
    for tensor in tensors_of(result):
        if tensor.is_floating_point():
            tensor.fill_(float("nan"))
        elif tensor.dtype is not torch.bool and not tensor.is_complex():
            tensor.fill_(torch.iinfo(tensor.dtype).min)
        else:
            tensor.zero_()


def _is_number(value: object) -> bool:
    return isinstance(value, bool | int | float | complex | torch.Tensor)


def _base_name(func: Any) -> str:
    name: str = func._schema.name
    return name.partition("::")[2]


def _host_body(func: Any, inputs: list[torch.Tensor]) -> Any | None:
    """The dispatch key of a library operation's body for host tensors; None where it is called like any other.

    Entering the body of a key that has none ends the process: the dispatcher is asked first.
    """
    if func.namespace in ("aten", "c10d") or any(t.device.type != "cpu" for t in inputs):
        return None
    name = func.name()
    return next((key for key in BODIES if torch._C._dispatch_has_kernel_for_dispatch_key(name, key.name)), None)


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _written(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """The tensors that the schema says are changed. Collectives of c10d do not say so: all of theirs are."""
    if func.namespace == "c10d":
        return tensors_of((args, kwargs))
    found: list[torch.Tensor] = []
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[position] if position < len(args) else kwargs.get(argument.name)
            found += tensors_of(given)
    return found


def _shape_depends_on_data(func: Any, name: str, args: Any, kwargs: Any) -> bool:
    if torch.Tag.dynamic_output_shape not in func.tags:
        return False
    if name == "index":
        return any(t is not None and t.dtype in (torch.bool, torch.uint8) for t in args[1])
    return not (name == "repeat_interleave" and kwargs.get("output_size") is not None)


def _run_without_random(func: Any, args: Any, kwargs: Any) -> Any:
    """Call; raise if that moved a random generator (attention without dropout has the tag, but draws nothing)."""
    if func.namespace == "aten" and torch.Tag.nondeterministic_seeded not in func.tags:
        return func(*args, **kwargs)
    generator = kwargs.get("generator") or torch.default_generator
    before = generator.get_state()
    result = func(*args, **kwargs)
    if not torch.equal(before, generator.get_state()):
        raise GraphViolation(
            "random",
            str(func),
            f"draws random numbers at {caller()}; noise must be a function of (seed, position, token id)",
        )
    return result
