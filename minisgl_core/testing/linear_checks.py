"""The products that the kit checks on a linear backend."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from minisgl_core.plugin_api import Caps
from minisgl_core.plugin_api.linear import fused_ops

from .attention_checks import DTYPES
from .backend_under_test import names_of
from .collect import collect
from .endurance import STEPS
from .linear import FusedLinearCheck, LinearCheck
from .real_sizes import LARGEST_INTERMEDIATE, LARGEST_VOCAB

if TYPE_CHECKING:
    from .backend_under_test import BackendUnderTest
    from .check import Check
    from .device_fixture import DeviceFixture

__all__ = ["linear_checks"]


def linear_checks(under_test: BackendUnderTest, fixture: DeviceFixture, quick: bool) -> list[Check]:
    """Rows around every size at which kernels take another path, and odd widths."""
    return collect(under_test, fixture, lambda caps: _of_caps(caps, quick), _beyond)


def _of_caps(caps: Caps, quick: bool) -> Iterator[LinearCheck]:
    dtypes = names_of(caps.dtypes, DTYPES)
    for dtype in dtypes:
        base = LinearCheck(name=dtype, dtype=dtype, tolerance=caps.tolerance)

        def check(what: str, base: LinearCheck = base, **changes: Any) -> LinearCheck:
            return replace(base, name=f"{base.dtype}/{what}", **changes)

        for m in (1, 16, 17, 130) if quick else (1, 2, 3, 4, 7, 8, 9, 15, 16, 17, 32, 33, 64, 65, 130, 513):
            yield check(f"m={m}", m=m)
        if quick and dtype != dtypes[0]:
            continue
        yield check("bias", bias=True)
        yield check("bias,m=1", bias=True, m=1)
        yield check("strided", strided=True)
        for n, k in ((1, 64), (5, 576), (1000, 32), (96, 1536)):
            yield check(f"n={n},k={k}", n=n, k=k, m=3)
            yield check(f"n={n},k={k},m=40", n=n, k=k, m=40)
        for n, k in ((3, LARGEST_INTERMEDIATE), (LARGEST_VOCAB, 64)):
            yield check(f"n={n},k={k}", n=n, k=k, m=3)
        yield check("rewritten", how="rewritten", bias=True)
        yield check("in_turn", how="in_turn")
        yield check("growth", how="growth")
        yield check("endurance", how="endurance", m=STEPS)
        if caps.graph != "never":
            for m in (1, 40):
                yield check(f"replay,m={m}", how="replay", m=m, bias=True)
        yield from _fused(caps, dtype, quick)


def _fused(caps: Caps, dtype: str, quick: bool) -> Iterator[LinearCheck]:
    """The fusions that the capability set declares, alone and together."""
    forms = [(norm, act) for norm in (False, True) for act in (False, True) if norm or act]
    for norm, act in (form for form in forms if fused_ops(*form) <= set(caps.ops)):
        what = "+".join(name for name, on in (("norm", norm), ("act", act)) if on)
        base = FusedLinearCheck(name=dtype, dtype=dtype, tolerance=caps.tolerance, norm=norm, act=act)

        def check(more: str, base: FusedLinearCheck = base, what: str = what, **changes: Any) -> LinearCheck:
            return replace(base, name=f"{base.dtype}/{what}/{more}", **changes)

        for m in (1, 3, 17) if quick else (1, 2, 3, 4, 8, 15, 16, 17, 33, 130):
            yield check(f"m={m}", m=m)
        for m in (1, 5):
            yield check(f"bias,strided,m={m}", m=m, bias=True, strided=True)
            yield check(f"n=50,k=1100,m={m}", m=m, n=50, k=1100)
            yield check(f"large-eps,m={m}", m=m, eps=1.0)
            yield check(f"rewritten,m={m}", how="rewritten", m=m, bias=True)
        yield check("growth", how="growth", m=1)
        if caps.graph != "never":
            for m in (1, 5, 40):
                yield check(f"replay,m={m}", how="replay", m=m, bias=True)


def _beyond(caps: Caps) -> Iterator[LinearCheck]:
    dtypes = names_of(caps.dtypes, DTYPES)
    base = LinearCheck(name="outside", outside=True, dtype=(dtypes or DTYPES)[0])
    for dtype in DTYPES:
        if dtype not in dtypes:
            yield replace(base, name=f"outside/dtype={dtype}", dtype=dtype)
    if caps.graph == "never":
        yield replace(base, name="outside/replay", how="replay")
