"""The global state of a process, which a backend must not change."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FunctionType
from typing import Any, Final
from unittest import SkipTest

import numpy as np
import torch

from minisgl_core.sandbox.imports import changed_variables

from .compare import Mismatch

__all__ = ["same_process"]

CORE: Final = "minisgl_core"
_METHODS: Final = (FunctionType, property, classmethod, staticmethod)


def _shown(before: Any, now: Any) -> str:
    return "" if now == before else f" from {before} to {now}"


def _unnamed(before: Any, now: Any) -> str:
    return "" if now == before else " "


def _variables(before: Mapping[str, str], now: Mapping[str, str]) -> str:
    changed = changed_variables(before, now)
    return f" ({', '.join(changed)})" if changed else ""


@dataclass(frozen=True, slots=True)
class _Setting:
    """One global setting. ``put`` accepts what ``get`` returned. ``difference`` of two such values is empty if they are
    equal.
    """

    name: str
    get: Callable[[], Any]
    put: Callable[[Any], object]
    difference: Callable[[Any, Any], str] = _shown


def _deterministic() -> str:
    if not torch.are_deterministic_algorithms_enabled():
        return "off"
    return "warn" if torch.is_deterministic_algorithms_warn_only_enabled() else "on"


def _set_deterministic(value: str) -> None:
    torch.use_deterministic_algorithms(value != "off", warn_only=value == "warn")


def _set_default_device(device: torch.device) -> None:
    """Set torch's default device."""
    # None is the initial value. A device, even the CPU, installs a mode that every factory call goes through.
    torch.set_default_device(None if device.type == "cpu" else device)


def _torch_random() -> bytes:
    return torch.get_rng_state().numpy().tobytes()


def _set_torch_random(state: bytes) -> None:
    torch.set_rng_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))


def _numpy_random() -> dict[str, Any]:
    state: dict[str, Any] = np.random.get_state(legacy=False)
    inner = state["state"]
    return {**state, "state": {**inner, "key": inner["key"].tolist()}}


def _set_environment(values: Mapping[str, str]) -> None:
    os.environ.clear()
    os.environ.update(values)


def _core_code() -> dict[tuple[Any, str], Any]:
    """(module or class, name) -> a function, class or method of the core."""
    found: dict[tuple[Any, str], Any] = {}
    # Copies of the dictionaries, because reading a lazy attribute may import a module.
    for module_name, module in list(sys.modules.items()):
        if module_name.partition(".")[0] != CORE:
            continue
        for name, value in list(vars(module).items()):
            if isinstance(value, FunctionType | type) and getattr(value, "__module__", "").startswith(CORE):
                found[module, name] = value
                members = vars(value).items() if isinstance(value, type) else ()
                found.update({(value, key): member for key, member in members if isinstance(member, _METHODS)})
    return found


def _replaced(before: Mapping[tuple[Any, str], Any], now: Mapping[tuple[Any, str], Any]) -> str:
    changed = sorted(
        {f"{owner.__name__}.{name}" for (owner, name), value in before.items() if now.get((owner, name)) is not value}
    )
    return f" ({', '.join(changed)})" if changed else ""


def _put_core_code(before: Mapping[tuple[Any, str], Any]) -> None:
    now = _core_code()
    for (owner, name), value in before.items():
        if now.get((owner, name)) is not value:
            setattr(owner, name, value)


SETTINGS: Final[Sequence[_Setting]] = (
    _Setting("torch's default dtype", torch.get_default_dtype, torch.set_default_dtype),
    _Setting("torch's default device", torch.get_default_device, _set_default_device),
    _Setting("torch's number of threads", torch.get_num_threads, torch.set_num_threads),
    _Setting("torch's deterministic algorithms", _deterministic, _set_deterministic),
    _Setting("torch's grad mode", torch.is_grad_enabled, torch.set_grad_enabled),
    _Setting(
        "the precision of float32 products", torch.get_float32_matmul_precision, torch.set_float32_matmul_precision
    ),
    _Setting("the environment", lambda: dict(os.environ), _set_environment, _variables),
    _Setting("the working directory", os.getcwd, os.chdir),
    _Setting("code of minisgl_core", _core_code, _put_core_code, _replaced),
    _Setting("torch's random state", _torch_random, _set_torch_random, _unnamed),
    _Setting("Python's random state", random.getstate, random.setstate, _unnamed),
    _Setting("NumPy's random state", _numpy_random, np.random.set_state, _unnamed),
)
"""All settings. Random states are the host's, because reading a GPU's would synchronize."""


@contextmanager
def same_process() -> Iterator[None]:
    """Restore all :data:`SETTINGS` that the block changes, and raise :class:`Mismatch` with their names.

    An exception of the block itself is included, because it may follow from the change.
    """
    grad_mode = torch.is_grad_enabled()
    torch.set_grad_enabled(True)  # inference mode ignores it, so it is visible only outside
    before = [setting.get() for setting in SETTINGS]
    try:
        try:
            yield
        finally:
            changes = _undo(before)
            torch.set_grad_enabled(grad_mode)
    except SkipTest:
        raise  # a skipped check made no call to judge
    except Exception as error:
        if not changes:
            raise
        failure = str(error) if isinstance(error, Mismatch) else f"{type(error).__name__}: {error}"
        raise Mismatch(f"{_listed(changes)}; then: {failure}") from error
    if changes:
        raise Mismatch(_listed(changes))


def _undo(before: Sequence[Any]) -> list[str]:
    """Restore everything; returns what had changed."""
    changes = []
    for setting, value in zip(SETTINGS, before, strict=True):
        difference = setting.difference(value, setting.get())
        if difference:
            setting.put(value)
            changes.append(f"{setting.name}{difference}".rstrip())
    return changes


def _listed(changes: Sequence[str]) -> str:
    return f"it changed what the whole process shares: {', '.join(changes)}"
