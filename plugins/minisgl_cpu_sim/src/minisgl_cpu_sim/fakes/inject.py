"""Injects fakes of vendors' libraries, and adapts specs to this machine."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from importlib import import_module
from typing import Any, Final, Protocol

from minisgl_core.plugin_api import BackendSpec, Caps, Phase

__all__ = ["FAKES", "inject", "on_cpu", "with_attention"]

FAKES: Final[Mapping[str, str]] = {
    "flashinfer": "flashinfer",
    "flash_attn_interface": "flash_attn_interface",
    "flash_attn.cute": "flash_attn_cute",
    "flash_attn.flash_attn_interface": "flash_attn",
}
"""Vendor module -> the fake's module in this package."""


class _MonkeyPatch(Protocol):
    def setitem(self, dic: Any, name: Any, value: Any) -> None: ...


def inject(monkeypatch: _MonkeyPatch, *names: str) -> None:
    """Make ``import_module(name)`` find the fake of each vendor module, or of all if none is named.

    ``monkeypatch`` is pytest's fixture (or anything with its ``setitem``), which removes the fakes again. A plugin that
    imports its library when a backend is constructed then runs unchanged on the fake. Raises :class:`KeyError` for a
    module without a fake.
    """
    for name in names or FAKES:
        monkeypatch.setitem(sys.modules, name, import_module(f"{__package__}.{FAKES[name]}"))


def on_cpu(spec: BackendSpec) -> BackendSpec:
    """The spec for a fake: on the CPU, with the dtypes of each capability set, and with float32 in addition."""
    return replace(spec, requires=(), caps=tuple(_cpu_caps(spec.caps)))


def _cpu_caps(caps: tuple[Caps, ...]) -> Iterator[Caps]:
    on_cpu = [replace(one, devices=("cpu",)) for one in caps]
    yield from dict.fromkeys(replace(one, dtypes=("float32",), kv_dtypes=("float32",)) for one in on_cpu)
    yield from on_cpu


def with_attention(
    plan: Mapping[str, Any], backends: Mapping[Phase, BackendSpec], distribution: str = "fakes"
) -> dict[str, Any]:
    """A resolved CPU plan as JSON, with these attention backends instead of its own.

    Resolving would refuse them, because their specs require CUDA devices. ``EngineConfig(plan=...)`` accepts the
    result.
    """
    buckets = [dict(bucket) for bucket in plan["buckets"]]
    for bucket in buckets:
        spec = backends.get(bucket["phase"]) if bucket["role"] == "attention" else None
        if spec is not None:
            bucket["choice"] = {**bucket["choice"], **_choice(spec, distribution, plan["page_size"])}
    return {**plan, "buckets": buckets}


def _choice(spec: BackendSpec, distribution: str, page_size: int) -> dict[str, Any]:
    caps = spec.caps[0]
    return {
        "name": spec.name,
        "variant": spec.variant,
        "distribution": distribution,
        "factory": spec.factory,
        "options_model": spec.options,
        "options": {},
        "page_size": page_size,
        "host_plan": caps.host_plan,
        "finite_tail": caps.finite_tail,
        "graph": caps.graph,
    }
