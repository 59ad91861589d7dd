"""What a spec claims, word by word: closed sets, ranges, requirements, and boxes that nothing can lie in."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from packaging.requirements import InvalidRequirement, Requirement

from minisgl_core.errors import nearest
from minisgl_core.plugin_api import OP_NAMES, AnyValue, BackendSpec, MultipleOf, OneOf, Role

__all__ = ["box_problems", "requirement_problem", "undeclared", "unused_words"]

_DTYPES: Final = (
    *("float64", "float32", "bfloat16", "float16"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2"),
    *("int64", "int32", "int16", "int8", "uint8"),
)
"""Torch's names."""
_PHASES: Final = ("prefill", "decode")
_WORDS: Final[Mapping[str, tuple[str, tuple[str, ...]]]] = {
    "devices": ("device", ("cpu", "cuda")),
    "dtypes": ("dtype", _DTYPES),
    "kv_dtypes": ("dtype", _DTYPES),
    "kv_layouts": ("KV layout", ("NHD", "HND")),
    "phases": ("phase", _PHASES),
    "ops": ("operation", OP_NAMES),
}
"""What a word in each closed field of a box is, and the words there are."""
_USUAL: Final[Mapping[str, str]] = {
    **dict.fromkeys(("gpu", "nvidia"), "cuda"),
    **dict.fromkeys(("fp32", "float", "f32"), "float32"),
    **dict.fromkeys(("fp16", "half", "f16"), "float16"),
    **dict.fromkeys(("bf16", "bfloat"), "bfloat16"),
    **dict.fromkeys(("fp8", "float8", "fp8_e4m3", "float8_e4m3"), "float8_e4m3fn"),
}
"""What people write elsewhere, and the word here."""
_FEW: Final = 4
"""So many words are listed even where the right one can be guessed."""
_OPEN_WORDS: Final[Mapping[str, tuple[str, ...]]] = {"features": ("window", "softcap"), "formats": ("plain",)}
"""The words that this core asks for in open sets, where others may be listed."""

_LISTS: Final = ("kv_layouts", "phases", "ops", "formats", "architectures")
_FLAGS: Final = ("host_plan", "finite_tail", "per_row_seed")
_OPEN_LISTS: Final = ("devices", "dtypes", "kv_dtypes", "features")
_NUMBERS: Final = ("head_dims", "gqa_ratios", "page_sizes")
_LIKE_LISTS: Final = (list, tuple, set, frozenset)
_LIKE_NUMBERS: Final = (OneOf, MultipleOf, AnyValue)
_NO_SM: Final = (0, -1)

_ASKED: Final[Mapping[Role, tuple[str, ...]]] = {
    "attention": ("dtypes", "kv_dtypes", "head_dims", "gqa_ratios", "page_sizes", "kv_layouts", "phases"),
    "kv": ("dtypes", "kv_dtypes", "head_dims", "page_sizes", "kv_layouts"),
    "moe": ("dtypes",),
    "ops": ("dtypes", "ops"),
    "linear": ("dtypes", "formats"),
    "comm": ("dtypes",),
    "models": ("architectures",),
}
"""What every query of a role asks of a box, beside the device."""

_MODULE: Final = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
_PREFIXED: Final = re.compile(r"(\w+):")
_PLAIN: Final = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?( *[<>=!~]=? *\d+(\.\d+)*,?)*")
"""Most requirements; the others are parsed."""


def box_problems(box: Any) -> Iterator[str]:
    """What is wrong with a :class:`Caps`, whatever its annotations promise."""
    for field in (*_LISTS, *_OPEN_LISTS):
        value = getattr(box, field)
        if value == () or (field in _OPEN_LISTS and isinstance(value, AnyValue)):
            continue
        if not isinstance(value, _LIKE_LISTS) or not all(map(_is_text, value)):
            yield f"caps.{field} is {value!r}; use a tuple of names" + (" or ANY" if field in _OPEN_LISTS else "")
        elif field in _WORDS:
            yield from (f"caps.{field} has the {problem}" for word in value if (problem := _word_problem(field, word)))
    for field in _NUMBERS:
        value = getattr(box, field)
        if value is not None and not isinstance(value, _LIKE_NUMBERS):
            yield f"caps.{field} is {value!r}; use OneOf, MultipleOf or ANY"
        elif not all(isinstance(number, int) and number > 0 for number in _listed(value)):
            yield f"caps.{field} is {value!r}; use positive whole numbers"
    if not isinstance(box.sm, AnyValue):
        yield from _sm_problems(box.sm)
    if not isinstance(box.tolerance, int | float) or not 0 <= box.tolerance < 1:
        yield f"caps.tolerance is {box.tolerance!r}; use a relative error of at least 0 and below 1"
    if box.graph not in ("never", "decode"):
        yield f"caps.graph is {box.graph!r}; use never or decode"
    for field in _FLAGS:
        if not isinstance(getattr(box, field), bool):
            yield f"caps.{field} is {getattr(box, field)!r}; use True or False"


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value)


def _word_problem(field: str, word: str) -> str:
    kind, known = _WORDS[field]
    if word in known:
        return ""
    usual = _USUAL.get(word.lower())
    hint = f"did you mean {usual!r}?" if usual in known else nearest(word, known)
    use = f"use {', '.join(known[:-1])} or {known[-1]}" if len(known) <= _FEW or not hint else ""
    return "; ".join(filter(None, (f"unknown {kind} {word!r}", use, hint)))


def _sm_problems(value: Any) -> Iterator[str]:
    if not (isinstance(value, list | tuple) and len(value) == 2 and all(isinstance(item, int) for item in value)):
        yield f"caps.sm is {value!r}; use a range such as (80, 90), or ANY"
    elif value[0] > value[1] and tuple(value) != _NO_SM:
        yield f"caps.sm is {value!r}, which holds nothing; the lower end comes first: ({value[1]}, {value[0]})"


def _listed(value: Any) -> tuple[Any, ...]:
    if isinstance(value, MultipleOf):
        return (value.base,)
    return value.values if isinstance(value, OneOf) else ()


def requirement_problem(item: str) -> str:
    """Why an item of ``requires`` can be read by nobody; empty if it can."""
    found = _PREFIXED.match(item)
    if found is None:
        if _PLAIN.fullmatch(item) or _is_pep_508(item):
            return ""
        return f'{item!r}, which is no requirement; use one such as "torch>=2.9", "import:MODULE" or "exec:PROGRAM"'
    kind, rest = found[1], item[found.end() :]
    if kind not in ("import", "exec"):
        hint = nearest(item, (f"import:{rest}", f"exec:{rest}")) or "use import: or exec:"
        return f"{item!r}, which is of an unknown kind; {hint}"
    if kind == "import" and not _MODULE.fullmatch(rest):
        return f"{item!r}, which names no module"
    return "" if rest else f"{item!r}, which names no program"


def _is_pep_508(item: str) -> bool:
    try:
        Requirement(item)
    except InvalidRequirement:
        return False
    return True


def undeclared(spec: BackendSpec) -> list[tuple[int, list[str]]]:
    """(index, fields) of each box in which nothing can lie, because a field that its role is always asked about, or
    ``sm`` on a CUDA device, is not declared.
    """
    found = []
    for index, box in enumerate(spec.caps):
        fields = [field for field in _ASKED.get(spec.role, ()) if not _declared(getattr(box, field))]
        if spec.role != "models":
            only_cuda = not isinstance(box.devices, AnyValue) and set(box.devices) == {"cuda"}
            fields += [] if _declared(box.devices) else ["devices"]
            fields += ["sm"] if only_cuda and box.sm == _NO_SM else []
        if fields:
            found.append((index, fields))
    return found


def _declared(value: Any) -> bool:
    return bool(value.values if isinstance(value, OneOf) else value)


def unused_words(spec: BackendSpec) -> Iterator[str]:
    """What a spec lists in an open set although this core never asks for it, each as a text with the nearest word."""
    for field, known in _OPEN_WORDS.items():
        sets = [getattr(box, field) for box in spec.caps]
        listed = {word for words in sets if not isinstance(words, AnyValue) for word in words}
        for word in sorted(listed - {*known}):
            yield f"lists {word!r} in {field}, which this core never asks for; {nearest(word, known)}".rstrip("; ")
