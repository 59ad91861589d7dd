"""Which products the kit asks a linear backend for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from minisgl_core.plugin_api import Caps
from minisgl_core.plugin_api.linear import neighbours

from .attention_cases import DTYPES
from .case import collect
from .linear import FusedLinearCase, LinearCase
from .subject import names_of

if TYPE_CHECKING:
    from .rig import Rig
    from .subject import Subject

__all__ = ["linear_cases"]


def linear_cases(subject: Subject, rig: Rig, quick: bool) -> list[LinearCase]:
    """Rows around every size at which kernels change their way, and odd widths."""
    return collect(subject, rig, lambda box: _of_box(box, quick), _beyond)


def _of_box(box: Caps, quick: bool) -> Iterator[LinearCase]:
    dtypes = names_of(box.dtypes, DTYPES)
    for dtype in dtypes:
        base = LinearCase(name=dtype, dtype=dtype)

        def case(what: str, base: LinearCase = base, **changes: Any) -> LinearCase:
            return replace(base, name=f"{base.dtype}/{what}", **changes)

        for m in (1, 16, 17, 130) if quick else (1, 2, 3, 4, 7, 8, 9, 15, 16, 17, 32, 33, 64, 65, 130, 513):
            yield case(f"m={m}", m=m)
        if quick and dtype != dtypes[0]:
            continue
        yield case("bias", bias=True)
        yield case("bias,m=1", bias=True, m=1)
        yield case("strided", strided=True)
        for n, k in ((1, 64), (5, 576), (1000, 32), (96, 1536)):
            yield case(f"n={n},k={k}", n=n, k=k, m=3)
            yield case(f"n={n},k={k},m=40", n=n, k=k, m=40)
        yield case("rewritten", how="rewritten", bias=True)
        yield case("in_turn", how="in_turn")
        yield case("growth", how="growth")
        if box.graph != "never":
            for m in (1, 40):
                yield case(f"replay,m={m}", how="replay", m=m, bias=True)
        yield from _fused(box, dtype, quick)


def _fused(box: Caps, dtype: str, quick: bool) -> Iterator[LinearCase]:
    """What the box says that its products take in, alone and together."""
    forms = [(norm, act) for norm in (False, True) for act in (False, True) if norm or act]
    for norm, act in (form for form in forms if neighbours(*form) <= set(box.ops)):
        what = "+".join(name for name, on in (("norm", norm), ("act", act)) if on)
        base = FusedLinearCase(name=dtype, dtype=dtype, norm=norm, act=act)

        def case(more: str, base: FusedLinearCase = base, what: str = what, **changes: Any) -> LinearCase:
            return replace(base, name=f"{base.dtype}/{what}/{more}", **changes)

        for m in (1, 3, 17) if quick else (1, 2, 3, 4, 8, 15, 16, 17, 33, 130):
            yield case(f"m={m}", m=m)
        for m in (1, 5):
            yield case(f"bias,strided,m={m}", m=m, bias=True, strided=True)
            yield case(f"n=50,k=1100,m={m}", m=m, n=50, k=1100)
            yield case(f"large-eps,m={m}", m=m, eps=1.0)
            yield case(f"rewritten,m={m}", how="rewritten", m=m, bias=True)
        yield case("growth", how="growth", m=1)
        if box.graph != "never":
            for m in (1, 5, 40):
                yield case(f"replay,m={m}", how="replay", m=m, bias=True)


def _beyond(box: Caps) -> Iterator[LinearCase]:
    dtypes = names_of(box.dtypes, DTYPES)
    base = LinearCase(name="outside", outside=True, dtype=(dtypes or DTYPES)[0])
    for dtype in DTYPES:
        if dtype not in dtypes:
            yield replace(base, name=f"outside/dtype={dtype}", dtype=dtype)
    if box.graph == "never":
        yield replace(base, name="outside/replay", how="replay")
