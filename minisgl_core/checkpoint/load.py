"""Fills a model's weight targets from a source, file by file, reading only this rank's slices."""

from __future__ import annotations

import logging
import re
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from minisgl_core.progress import progress_bar

from ..errors import CheckpointError
from .targets import WeightSource, WeightTarget

__all__ = ["LoadReport", "load_weights"]

log = logging.getLogger(__name__)

_BUFFERS: Final = re.compile(r".*(rotary_emb\.inv_freq|rotary_emb\.(cos|sin)_cached|\.masked_bias)")
"""Tensors of old checkpoints that every model computes itself."""
_FLOATS: Final = frozenset({"float64", "float32", "bfloat16", "float16"})
_NAMES_SHOWN: Final = 8


@dataclass(frozen=True, slots=True)
class LoadReport:
    """Result of loading. ``extra``: tensors of the checkpoint that no target uses, except known buffers."""

    num_tensors: int
    num_bytes: int
    """Bytes copied into the targets, in their dtypes."""
    seconds: float
    extra: tuple[str, ...]


def load_weights(
    targets: Iterable[WeightTarget],
    source: WeightSource,
    *,
    progress: bool = False,
    unused: Iterable[str] = (),
) -> LoadReport:
    """Copy each slice into its storage, and convert dtype and device.

    ``unused`` names tensors that the model deliberately leaves out, such as a head equal to the embedding. Names,
    shapes and dtypes are checked before anything is read. A missing or misshapen tensor, or integers where the model
    has floating-point numbers, raise :class:`~minisgl_core.errors.CheckpointError` with the names; an extra tensor is a
    warning.
    """
    begin = time.perf_counter()
    wanted: dict[str, list[WeightTarget]] = defaultdict(list)
    for target in targets:
        wanted[target.name].append(target)
    # Reading takes minutes, so everything that a header can reveal is checked before it.
    names = source.names()
    _check_missing(wanted, names)
    order = source.order(wanted)
    _check_shapes(order, wanted, source)
    _check_dtypes(order, wanted, source)
    extra = tuple(sorted(name for name in names - wanted.keys() - set(unused) if not _BUFFERS.fullmatch(name)))
    if extra:
        log.warning("the checkpoint has %d tensors that the model does not use: %s", len(extra), _shown(extra))
    total = sum(target.storage.nbytes for group in wanted.values() for target in group)
    with progress_bar("Loading weights", total, shown=progress, leave=True, unit="B") as bar:
        for name in order:
            for target in wanted[name]:
                _copy(target, source)
                bar.update(target.storage.nbytes)
    return LoadReport(len(order), total, time.perf_counter() - begin, extra)


def _copy(target: WeightTarget, source: WeightSource) -> None:
    part = source.read(target.name, target.index)
    if part.shape != target.storage.shape:
        shapes = f"index selects {tuple(part.shape)}, storage has {tuple(target.storage.shape)}"
        raise ValueError(f"target of {target.name}: {shapes}")
    target.storage.copy_(part)


def _check_missing(wanted: Mapping[str, object], names: frozenset[str]) -> None:
    missing = sorted(wanted.keys() - names)
    if missing:
        raise CheckpointError(
            f"the checkpoint lacks {len(missing)} of {len(wanted)} tensors: {_shown(missing)}",
            field="model",
            value=missing,
            remedy="check that the files belong to this config.json and are complete",
        )


def _check_shapes(order: Sequence[str], wanted: Mapping[str, Sequence[WeightTarget]], source: WeightSource) -> None:
    wrong = [
        f"{name}: expected {wanted[name][0].shape}, found {found}"
        for name in order
        if (found := source.shape(name)) != wanted[name][0].shape
    ]
    if wrong:
        raise CheckpointError(
            f"{len(wrong)} tensors have another shape than config.json requires: {_shown(wrong, '; ')}",
            field="model",
            value=wrong,
            remedy="check that the files belong to this config.json",
        )


def _check_dtypes(order: Sequence[str], wanted: Mapping[str, Sequence[WeightTarget]], source: WeightSource) -> None:
    """Raise if a tensor is not floating-point: integers are meaningful only with a quantisation scheme."""
    wrong = []
    for name in order:
        stored = source.dtype(name)
        dtypes = {str(target.storage.dtype).removeprefix("torch.") for target in wanted[name]}
        if any(dtype != stored and not {dtype, stored} <= _FLOATS for dtype in dtypes):
            wrong.append(f"{name}: {stored}")
    if wrong:
        raise CheckpointError(
            f"{len(wrong)} tensors hold other numbers than the model computes with: {_shown(wrong)}",
            field="model",
            value=wrong,
            remedy="the checkpoint seems to be quantised: use one in float32, bfloat16 or float16, or a GGUF file",
        )


def _shown(names: Sequence[str], separator: str = ", ") -> str:
    """The first few names, and the number of further ones."""
    more = len(names) - _NAMES_SHOWN
    return separator.join(names[:_NAMES_SHOWN]) + (f"{separator}and {more} more" if more > 0 else "")
