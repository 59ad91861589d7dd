"""The variants of an ablation: each optimisation switched off, or each backend replaced, alone."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.resources import files
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


DEFAULT: Final = Variant("default")
_LISTED: Final = json.loads(files(__package__).joinpath("variants.json").read_text(encoding="utf-8"))
VARIANTS: Final = tuple(Variant(**fields) for fields in _LISTED)
"""Names are ``what value``; two backends of attention are prefill's and decode's. Products of few rows show in small
batches (``latency``). A loop over the chosen experts cannot be recorded, and takes minutes where most are chosen.
"""


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
