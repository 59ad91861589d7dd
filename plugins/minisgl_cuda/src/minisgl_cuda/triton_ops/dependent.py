"""Programmatic dependent launches: a kernel is set up, and does independent work, while the previous one still runs."""

from __future__ import annotations

import inspect

import triton
import triton.language as tl

from minisgl_core.plugin_api import CannotRun, Reason

__all__ = ["DEPENDENT_LAUNCH", "INTERPRETED", "dependent_launch", "let_next_kernel_start", "wait_for_previous_kernel"]

INTERPRETED = triton.knobs.runtime.interpret
"""True under the interpreter: kernels run one after the other, and ``tl.dot`` is wrong on bfloat16 operands."""
DEPENDENT_LAUNCH = "_semantic" in inspect.signature(getattr(tl.extra.cuda, "gdc_wait", object)).parameters
"""True if Triton supports these launches. Triton 3.4 has the names, but they do not compile."""


@triton.jit
def let_next_kernel_start(DEPENDENT: tl.constexpr):
    """The next kernel may start when all programs of this one have called this or have ended."""
    if DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_for_previous_kernel(DEPENDENT: tl.constexpr):
    """Before this call, nothing may be read that an earlier kernel writes, and nothing may be written."""
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()


def dependent_launch(sm: int, wanted: bool | None) -> bool:
    """The option's value, or by default whether it is possible. ``sm``: 90 for 9.0; 0 if there is no GPU.

    Raises :class:`CannotRun` if it was requested and is not possible.
    """
    possible = DEPENDENT_LAUNCH and sm >= 90
    if wanted is None or not wanted or possible:
        return possible if wanted is None else wanted
    gpu = f"{sm // 10}.{sm % 10}" if sm else "no known GPU"
    raise CannotRun(
        Reason(
            code="unsupported-option",
            field="dependent_launch",
            wanted="a GPU of compute capability 9.0, and a Triton with dependent launches",
            supported=f"{gpu}, and Triton {'has' if DEPENDENT_LAUNCH else 'lacks'} them",
            fix="leave it out",
        )
    )
