"""The installed backends that claim a device, and the pairs of attention backends among them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from typing import Any, Final

import pytest

from minisgl_core.installation import Installed, check_requires
from minisgl_core.plugin_api import BackendSpec, OneOf, Phase, Role
from minisgl_core.registry import Candidate, discover
from minisgl_core.registry.matching import match
from minisgl_core.registry.query import Requirement

from .check import Context, Skipped

__all__ = ["AttentionPair", "attention_pairs", "backends_of", "parameter", "prebuilt", "require_installed"]


def _half_without_features(spec: BackendSpec) -> BackendSpec:
    caps = tuple(
        replace(caps, head_dims=OneOf(64, 128), features=frozenset())
        for caps in spec.caps
        if caps.dtypes == ("bfloat16",)
    )
    return replace(spec, caps=caps)


PREBUILT: Final[Mapping[tuple[str, str], Callable[[BackendSpec], BackendSpec]]] = {
    ("attention", "flashinfer"): _half_without_features
}
"""(role, name) -> the part of its caps whose kernels come with the library; the others are compiled for minutes."""


def prebuilt(spec: BackendSpec, may_compile: bool) -> BackendSpec:
    """The spec; unless kernels ``may_compile`` for minutes, only the part of its caps that needs no compilation."""
    narrow = PREBUILT.get((spec.role, spec.name))
    return spec if may_compile or narrow is None else narrow(spec)


_installed: Final = cache(discover)


def backends_of(role: Role, context: Context) -> list[Candidate]:
    """The backends of a role whose caps claim the device, with or without their libraries."""
    requirement = Requirement(device=context.device)
    return [item for item in _installed().candidates(role) if match(item.spec, requirement)[0] is not None]


def parameter(candidate: Candidate, **fields: Any) -> Any:
    """A test's parameter, called such as ``attention:fa/fa3``."""
    spec = candidate.spec
    name = f"{spec.role}:{spec.name}" + (f"/{spec.variant}" if spec.variant else "")
    return pytest.param(candidate, id=name, marks=pytest.mark.check(needs=_needs(candidate), **fields))


def _needs(candidate: Candidate) -> tuple[str, ...]:
    """What must be installed for the backend, such as ``flashinfer`` or ``nvcc``."""
    every = [(item,) if isinstance(item, str) else item for item in candidate.spec.requires]
    return tuple(" or ".join(one.removeprefix("import:").removeprefix("exec:") for one in item) for item in every)


def require_installed(candidate: Candidate) -> None:
    """Skip unless all that the backend requires is installed."""
    missing = [str(reason) for reason in check_requires(candidate.spec, Installed())]
    if missing:
        raise Skipped(f"not installed: {'; '.join(missing)}")


@dataclass(frozen=True)
class AttentionPair:
    """A backend for prefill and one for decode. The ``main`` pairs together have each backend in each of its phases."""

    prefill: str
    decode: str
    main: bool
    needs: tuple[str, ...]
    """What must be installed for them"""

    @property
    def name(self) -> str:
        """Such as ``fa+cuda_decode``."""
        return f"{self.prefill}+{self.decode}"

    @property
    def backends(self) -> dict[str, str]:
        """As a config names them."""
        return {"prefill": self.prefill, "decode": self.decode}


def attention_pairs(context: Context) -> list[AttentionPair]:
    """Every pairing that the caps allow in bfloat16 and whose libraries are here (or may be, elsewhere); on a GPU
    without stand-ins.
    """
    environment = None if context.elsewhere else Installed()
    names: dict[Phase, dict[str, tuple[str, ...]]] = {"prefill": {}, "decode": {}}
    for phase, found in names.items():
        requirement = Requirement(
            device=context.device, dtype="bfloat16", kv_dtype="bfloat16", head_dim=128, phase=phase
        )
        for item in backends_of("attention", context):
            fits = match(item.spec, requirement)[0] is not None and not check_requires(item.spec, environment)
            if fits and not (item.spec.stand_in and context.kind == "cuda"):
                found.setdefault(item.spec.name, _needs(item))
    first = next(iter(names["prefill"]), "")
    pairs = []
    for (prefill, needs), (decode, more) in product(names["prefill"].items(), names["decode"].items()):
        partner = decode if decode in names["prefill"] else first
        pairs.append(AttentionPair(prefill, decode, prefill == partner, tuple(dict.fromkeys((*needs, *more)))))
    return pairs
