"""Rotary position embedding: parses its many spellings, and computes the inverse frequencies of each kind.

Sources: RoPE https://arxiv.org/abs/2104.09864 section 3.4; NTK-aware and YaRN scaling https://arxiv.org/abs/2309.00071
sections 3.1 to 3.4; llama3 scaling: Llama 3.1 model card and reference code.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ..errors import CheckpointError
from ..inputs import warn_once
from .facts import RopeConfig
from .hf_keys import ROPE_GATE, check_rope_kind
from .keys import REQUIRED, Keys

__all__ = ["DEFAULT_THETA", "read_rope", "rope_inv_freq"]

DEFAULT_THETA: Final = 10_000.0
THETAS: Final = (2.0, 1e30)
"""Lowest and highest base. At 1 all frequencies would be one; the highest leaves room for scaling in float32."""
FACTORS: Final = (1e-6, 1e6)
"""Lowest and highest factor for frequencies, angles or lengths."""
_KINDS: Final = ("default", "linear", "dynamic", "llama3", "yarn")
Array = npt.NDArray[np.float32]


def read_rope(config: Keys, head_dim: int, max_position: int, family_name: str, *, partial: bool) -> RopeConfig:
    """Rope of a config.json in the spelling of transformers 4 (``rope_theta`` + ``rope_scaling``) or 5
    (``rope_parameters``). ``partial``: the family knows ``partial_rotary_factor``.

    Raises :class:`~minisgl_core.errors.CheckpointError` for a kind that is not supported, and for numbers that make no
    frequencies.
    """
    given = _merged(config)
    rope = Keys(given, config.where)
    kind = given.get("rope_type", "default")
    if kind not in _KINDS:
        raise config.error("rope_type", f"is {kind!r:.80}", f"minisgl knows the kinds {', '.join(_KINDS)}")
    ROPE_GATE.check(given, config.where)
    check_rope_kind(given, kind, config.where)
    if "rope_theta" not in given:
        warn_once(f"{config.where!r} gives no rope_theta: using {DEFAULT_THETA:g}")
    original = _original_max_position(config, rope, kind, max_position)
    low_freq, high_freq = _band(rope) if kind == "llama3" else (1.0, 4.0)
    beta_fast, beta_slow = _betas(rope)
    return RopeConfig(
        theta=rope.number("rope_theta", DEFAULT_THETA, low=THETAS[0], high=THETAS[1]),
        rotary_dim=_rotary_dim(rope, kind, head_dim, family_name, partial),
        kind=kind,
        factor=_factor(rope, kind, max_position, original),
        low_freq_factor=low_freq,
        high_freq_factor=high_freq,
        original_max_position=original,
        beta_fast=beta_fast,
        beta_slow=beta_slow,
        attention_factor=rope.optional_number("attention_factor", low=FACTORS[0], high=FACTORS[1]),
        mscale=rope.optional_number("mscale", low=0.0, high=FACTORS[1]),
        mscale_all_dim=rope.optional_number("mscale_all_dim", low=0.0, high=FACTORS[1]),
        truncate=rope.flag("truncate", True),
    )


def _merged(config: Keys) -> dict[str, Any]:
    """One flat dict of rope settings: ``rope_scaling`` over ``rope_parameters`` over top-level keys."""
    merged: dict[str, Any] = {}
    for key in ("rope_theta", "partial_rotary_factor"):
        if config.get(key) is not None:
            merged[key] = config.get(key)
    parameters, scaling = (_settings(config, key) for key in ("rope_parameters", "rope_scaling"))
    for key in sorted(parameters.keys() & scaling.keys()):
        scaled_now = key == "rope_type" and parameters[key] == "default"  # a scaling added to a new config
        if parameters[key] != scaling[key] and not scaled_now:
            raise config.error("rope_scaling", f"and `rope_parameters` disagree about `{key}`", "remove one of the two")
    return {**merged, **parameters, **scaling}


def _settings(config: Keys, key: str) -> dict[str, Any]:
    value = config.get(key)
    if value is not None and not isinstance(value, Mapping):
        raise config.wrong(key, "it must be an object or null")
    return _one_kind(config, key, value or {})


def _one_kind(config: Keys, key: str, value: Mapping[str, Any]) -> dict[str, Any]:
    """Settings without nulls and with the old key ``type`` renamed; settings per layer type only if they are equal."""
    nested = [item for item in value.values() if isinstance(item, Mapping)]
    if nested:
        if len(nested) != len(value) or any(item != nested[0] for item in nested):
            raise config.error(key, "differs between layer types", "minisgl supports one rope for all layers")
        value = nested[0]
    settings = {name: item for name, item in value.items() if item is not None}
    old = settings.pop("type", None)
    if old is not None:
        settings.setdefault("rope_type", old)
    return settings


def _rotary_dim(rope: Keys, kind: str, head_dim: int, family_name: str, partial: bool) -> int:
    factor = rope.number("partial_rotary_factor", 1.0, low=FACTORS[0], high=1.0)
    if factor != 1.0 and not partial:
        raise rope.error(
            "partial_rotary_factor",
            f"is {factor:g}, which a {family_name} model does not know: transformers ignores it or fails",
            "remove the key, or name the architecture that the weights were trained as",
        )
    rotary_dim = int(head_dim * factor)
    if rotary_dim % 2 or rotary_dim == 0:
        raise rope.error(
            "partial_rotary_factor",
            f"is {factor:g}: it would rotate {rotary_dim} of {head_dim} dimensions",
            "the number must be even and above 0",
        )
    if kind == "dynamic" and rotary_dim == 2:
        raise rope.error(
            "rope_type", "is 'dynamic', and 2 dimensions are rotated", "it is defined from 4 dimensions up"
        )
    return rotary_dim


def _band(rope: Keys) -> tuple[float, float]:
    """The numbers of rotations between which llama3 interpolates."""
    low, high = (rope.number(key, low=FACTORS[0], high=FACTORS[1]) for key in ("low_freq_factor", "high_freq_factor"))
    if np.float32(low) >= np.float32(high):
        raise rope.error("low_freq_factor", f"is {low:g}", f"it must be below high_freq_factor, which is {high:g}")
    return low, high


def _betas(rope: Keys) -> tuple[float, float]:
    """The numbers of rotations between which yarn interpolates."""
    fast = rope.number("beta_fast", 32.0, low=FACTORS[0], high=FACTORS[1])
    slow = rope.number("beta_slow", 1.0, low=FACTORS[0], high=FACTORS[1])
    if fast < slow:
        raise rope.error("beta_fast", f"is {fast:g}", f"it must be at least beta_slow, which is {slow:g}")
    return fast, slow


def _original_max_position(config: Keys, rope: Keys, kind: str, max_position: int) -> int:
    if kind not in ("llama3", "yarn"):
        return max_position
    outside = config.get("original_max_position_embeddings")
    return (
        config.integer("original_max_position_embeddings")
        if outside is not None
        else rope.integer("original_max_position_embeddings", max_position)
    )


def _factor(rope: Keys, kind: str, max_position: int, original: int) -> float:
    if kind == "default":
        return 1.0
    absent = max_position / original if kind == "yarn" else REQUIRED
    return rope.number("factor", absent, low=FACTORS[0], high=FACTORS[1])


def rope_inv_freq(rope: RopeConfig, max_seq_len: int) -> tuple[Array, float]:
    """``(rotary_dim / 2,)`` float32 inverse frequencies, and the factor that cosines and sines are multiplied by.

    The angle of pair i at position p is ``p * inv_freq[i]``. ``max_seq_len`` matters to ``dynamic`` only: keys in a
    paged cache are shared and never rotated again, so one set of frequencies must hold for the engine's life. It is the
    unscaled one while ``max_seq_len`` stays within the trained length, which is what transformers uses for every prompt
    of that length; beyond it, the set for ``max_seq_len`` itself.
    """
    base = rope.theta
    if rope.kind == "dynamic" and max_seq_len > rope.original_max_position:
        stretch = rope.factor * max_seq_len / rope.original_max_position - (rope.factor - 1)
        base *= stretch ** (rope.rotary_dim / (rope.rotary_dim - 2))
    wavelength_over_2pi = _powers(base, rope.rotary_dim)
    inv_freq = np.float32(1.0) / wavelength_over_2pi
    if rope.divisors:
        return inv_freq / _checked_divisors(rope, len(inv_freq)), 1.0
    if rope.kind == "linear":
        return inv_freq / np.float32(rope.factor), 1.0
    if rope.kind == "llama3":
        return _llama3(rope, inv_freq), 1.0
    if rope.kind == "yarn":
        return _yarn(rope, wavelength_over_2pi), _yarn_attention_factor(rope)
    return inv_freq, 1.0


def _powers(base: float, rotary_dim: int) -> Array:
    """base ** (2i / rotary_dim): exponents in float32 as the models were trained with, each power rounded once."""
    exponents = np.arange(0, rotary_dim, 2, dtype=np.float32) / np.float32(rotary_dim)
    with np.errstate(over="ignore"):  # a wavelength too long for float32 is never rotated
        return np.power(base, exponents.astype(np.float64)).astype(np.float32)


def _checked_divisors(rope: RopeConfig, count: int) -> Array:
    if len(rope.divisors) != count:
        raise CheckpointError(
            f"the file lists {len(rope.divisors)} rope frequency divisors for {count} frequencies",
            field="rope_freqs",
            value=len(rope.divisors),
            remedy="convert the model again",
        )
    return np.asarray(rope.divisors, dtype=np.float32)


def _llama3(rope: RopeConfig, inv_freq: Array) -> Array:
    """Divide the frequency of long wavelengths by ``factor``, keep that of short ones, and interpolate between."""
    wavelength = np.float32(2 * math.pi) / inv_freq
    longest_kept = rope.original_max_position / rope.high_freq_factor
    shortest_slowed = rope.original_max_position / rope.low_freq_factor
    turns = np.float32(rope.original_max_position) / wavelength
    span = np.float32(rope.high_freq_factor - rope.low_freq_factor)
    keep = (turns - np.float32(rope.low_freq_factor)) / span
    slowed = inv_freq / np.float32(rope.factor)
    blended = (1 - keep) * inv_freq / np.float32(rope.factor) + keep * inv_freq
    result = np.where(wavelength > shortest_slowed, slowed, inv_freq)
    between = (wavelength >= longest_kept) & (wavelength <= shortest_slowed)
    return np.where(between, blended, result).astype(np.float32)


def _yarn(rope: RopeConfig, wavelength_over_2pi: Array) -> Array:
    """Pairs with many rotations keep their frequency, those with few are divided by ``factor``, with a ramp between."""
    low, high = (_turning_dim(rope, turns) for turns in (rope.beta_fast, rope.beta_slow))
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.rotary_dim - 1)
    if low == high:
        high += 0.001  # an empty ramp would divide by zero
    steps = np.arange(rope.rotary_dim // 2, dtype=np.float32)
    keep = 1 - np.clip((steps - np.float32(low)) / np.float32(high - low), 0, 1)
    slowed = np.float32(1.0) / (np.float32(rope.factor) * wavelength_over_2pi)
    kept = np.float32(1.0) / wavelength_over_2pi
    result: Array = (slowed * (1 - keep) + kept * keep).astype(np.float32)
    return result


def _turning_dim(rope: RopeConfig, turns: float) -> float:
    """The (fractional) pair with this number of full rotations within the trained length."""
    ratio = rope.original_max_position / (turns * 2 * math.pi)
    return rope.rotary_dim * math.log(ratio) / (2 * math.log(rope.theta))


def _yarn_attention_factor(rope: RopeConfig) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return _mscale(rope.factor, rope.mscale) / _mscale(rope.factor, rope.mscale_all_dim)
    return _mscale(rope.factor, 1.0)


def _mscale(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0
