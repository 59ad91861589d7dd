"""FlashInfer compiles a kernel at its first use. With ``FLASHINFER_DISABLE_JIT=1`` a missing one is an error."""

from __future__ import annotations

from minisgl_core.plugin_api import CannotRun, Reason

__all__ = ["refuse_if_missing"]

_MISSING = "MissingJITCacheError"
"""By name: not every release has the class."""


def refuse_if_missing(error: RuntimeError) -> None:
    """Raise :class:`CannotRun` if the library says that a kernel is missing and must not be compiled."""
    if type(error).__name__ != _MISSING:
        return
    kernel = getattr(getattr(error, "spec", None), "name", "")
    found = f"{kernel or 'it'} is not prebuilt, and FLASHINFER_DISABLE_JIT forbids to compile it"
    fix = "unset FLASHINFER_DISABLE_JIT, or install a flashinfer-jit-cache that has it"
    raise CannotRun(Reason("no-kernel", "kernel", "a prebuilt kernel", found, fix)) from error
