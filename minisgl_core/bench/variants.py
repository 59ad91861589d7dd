"""The variants of an ablation: each optimisation switched off, or each backend replaced, alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

from minisgl_core.errors import UsageError, nearest

if TYPE_CHECKING:
    from minisgl_core.engine import EngineConfig

__all__ = ["DEFAULT", "VARIANTS", "Variant", "choose_variants"]


@dataclass(frozen=True, slots=True)
class Variant:
    """One change to the default. ``config`` replaces fields of EngineConfig, ``backends`` single roles, ``options``
    single options of a backend.
    """

    name: str
    config: Mapping[str, Any] = field(default_factory=dict)
    backends: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    overlap: bool = True
    mode: str | None = None
    """The mode in which the change is visible, if it is not the requested one."""
    needs_experts: bool = False
    repeats: bool = False
    """The default once more, which shows the noise of the measurement."""

    def applied_to(self, config: EngineConfig) -> EngineConfig:
        """The config of the variant's engine."""
        options = {**config.backend_options}
        for backend, changed in self.options.items():
            options[backend] = {**options.get(backend, {}), **changed}
        backends = {**config.backends, **self.backends}
        return replace(config, **self.config, backends=backends, backend_options=options)


def _attention(name: str, prefill: str, decode: str) -> Variant:
    return Variant(f"attention {name}", backends={"attention": {"prefill": prefill, "decode": decode}})


DEFAULT: Final = Variant("default")
_SKINNY: Final = "linear:skinny"

VARIANTS: Final[tuple[Variant, ...]] = (
    Variant("overlap off", overlap=False),
    Variant("graphs off", {"cuda_graph_max_bs": 0}),
    Variant("prefix-cache off", {"cache": "naive"}, mode="shared-prefix"),
    _attention("flashinfer", "flashinfer", "flashinfer"),
    _attention("fa", "fa", "fa"),
    _attention("fa+flashinfer", "fa", "flashinfer"),
    _attention("flashinfer+fa", "flashinfer", "fa"),
    _attention("fa+cuda_decode", "fa", "cuda_decode"),
    Variant("kv cpp", backends={"kv": "cuda/cpp"}),
    Variant("kv triton", backends={"kv": "cuda/triton"}),
    Variant("kv torch", backends={"kv": "torch"}),
    Variant("ops composed", backends={"ops": "composed"}),
    # products of few rows: small batches
    Variant("linear plain", backends={"linear": "plain"}, mode="latency"),
    Variant("linear unfused", options={_SKINNY: {"fuse": []}}, mode="latency"),
    Variant("linear waits", options={_SKINNY: {"dependent_launch": False}}, mode="latency"),
    # a loop over the experts that were chosen cannot be recorded, and takes minutes where most of them are
    Variant("moe loop (no graphs)", {"cuda_graph_max_bs": 0}, {"moe": "torch"}, mode="latency", needs_experts=True),
    *(Variant(f"chunk {tokens}", {"max_prefill_tokens": tokens}) for tokens in (2048, 8192, 16384)),
    *(Variant(f"page {size}", {"page_size": size}) for size in (1, 16, 64, 256)),
    Variant("default again", repeats=True),
)
"""All variants. Names are ``what value``; two backends of attention are prefill's and decode's."""


def choose_variants(
    names: Iterable[str], part: tuple[int, int] = (1, 1), among: Sequence[Variant] = VARIANTS
) -> tuple[Variant, ...]:
    """Choose variants by name or by first word; all if no name is given. Of these, part i of n, counted from 1.

    Raises :class:`UsageError` for a name that matches nothing.
    """
    wanted, known = list(names), {name for variant in among for name in (variant.name, variant.name.split()[0])}
    for name in wanted:
        if name not in known:
            hint = nearest(name, known) or f"the rows are {', '.join(variant.name for variant in among)}"
            raise UsageError(f"no row {name!r}", field="--rows", value=name, remedy=hint)
    fitting = [v for v in among if not wanted or v.name in wanted or v.name.split()[0] in wanted]
    number, of = part
    return tuple(fitting[number - 1 :: of])
