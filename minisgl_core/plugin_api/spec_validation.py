"""Is a spec sound? Every field is checked, and what a role's plan entries require of its capability sets."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any, Final, get_args

from packaging.requirements import InvalidRequirement, Requirement

from minisgl_core.errors import nearest

from .devices import DEVICE_KINDS, WORDS, device_kind
from .grammar import GRAMMAR_KINDS
from .ops import OP_NAMES
from .parser import PARSER_PARTS
from .spec import HOST_ROLES, AnyValue, BackendSpec, Caps, MultipleOf, OneOf, Phase, Role

__all__ = ["CAPS_FIELDS", "REQUIRED", "spec_problems", "undeclared", "unused_words"]

CAPS_FIELDS: Final[Mapping[str, str]] = {
    "dtype": "dtypes",
    "kv_dtype": "kv_dtypes",
    "head_dim": "head_dims",
    "gqa_ratio": "gqa_ratios",
    "page_size": "page_sizes",
    "kv_layout": "kv_layouts",
    "phase": "phases",
    "op": "ops",
    "format": "formats",
    "architecture": "architectures",
}
"""What a plan entry requires -> the field of :class:`Caps` that has to hold its value."""
REQUIRED: Final[Mapping[Role, tuple[str, ...]]] = {
    "attention": ("dtype", "kv_dtype", "head_dim", "gqa_ratio", "page_size", "kv_layout", "phase"),
    "kv": ("dtype", "kv_dtype", "head_dim", "page_size", "kv_layout"),
    "moe": ("dtype",),
    "ops": ("dtype", "op"),
    "linear": ("dtype", "format"),
    "comm": ("dtype",),
    "models": ("architecture",),
    "parser": ("op",),
}
"""The fields that every plan entry of a role requires, apart from the device."""

_MODULE: Final = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
_IMPORT_STRING: Final = re.compile(rf"{_MODULE.pattern}:[A-Za-z_]\w*")
_BACKEND_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_PREFIXED: Final = re.compile(r"(\w+):")
_PLAIN: Final = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?( *[<>=!~]=? *\d+(\.\d+)*,?)*")
"""Most requirements; the others are parsed."""

_CLOSED: Final[Mapping[str, str]] = {
    "devices": "device",
    "dtypes": "dtype",
    "kv_dtypes": "dtype",
    "kv_layouts": "KV layout",
    "phases": "phase",
    "ops": "operation",
    "grammars": "kind of grammar",
}
"""What a word in each closed field of a capability set is."""
_FEW: Final = 4
"""Up to this many words are listed even where the right one can be guessed."""
_LISTS: Final = ("kv_layouts", "phases", "ops", "formats", "architectures", "grammars")
_OPEN_LISTS: Final = ("devices", "dtypes", "kv_dtypes", "features", "templates")
_NUMBERS: Final = ("head_dims", "gqa_ratios", "page_sizes")
_FLAGS: Final = ("host_plan", "finite_tail", "per_row_seed")
_NO_SM: Final = (0, -1)


def spec_problems(spec: Any) -> Iterator[str]:
    """What is wrong with a :class:`BackendSpec`, whatever its annotations promise."""
    if not _is_text(spec.name) or not _BACKEND_NAME.fullmatch(spec.name):
        yield f"name is {spec.name!r}; use letters, digits, dots, dashes and underscores"
    elif spec.name.lower() == "auto":
        yield f"name is {spec.name!r}, which means any backend wherever one is chosen; use another"
    if not isinstance(spec.variant, str) or (spec.variant and not _BACKEND_NAME.fullmatch(spec.variant)):
        yield f"variant is {spec.variant!r}; use letters, digits, dots, dashes and underscores"
    for field in ("factory", "probe", "check", "options"):
        value = getattr(spec, field)
        optional = field != "factory" and value is None
        if not optional and not (isinstance(value, str) and _IMPORT_STRING.fullmatch(value)):
            yield f'{field} is {value!r}; use "package.module:Name"'
    yield from _requires_problems(spec.requires)
    if not isinstance(spec.tier, int):
        yield f"tier is {spec.tier!r}; use a number"
    if not isinstance(spec.caps, list | tuple) or not all(isinstance(caps, Caps) for caps in spec.caps):
        yield "caps is not a tuple of Caps"
    elif not spec.caps:
        yield "caps is empty, so it could never be chosen; say in at least one Caps what it can do"
    else:
        yield from (problem for caps in spec.caps for problem in _caps_problems(caps))


def _is_positive(value: object) -> bool:
    return isinstance(value, int) and value > 0


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value)


def _requires_problems(requires: Any) -> Iterator[str]:
    alternatives = [] if isinstance(requires, str) else [(one,) if isinstance(one, str) else one for one in requires]
    if isinstance(requires, str) or not all(
        isinstance(group, list | tuple) and group and all(map(_is_text, group)) for group in alternatives
    ):
        yield f"requires is {requires!r}; use strings, or tuples of alternatives"
        return
    for item in (item for group in alternatives for item in group):
        if problem := _requirement_problem(item):
            yield f"requires has {problem}"


def _requirement_problem(item: str) -> str:
    """Why an item of ``requires`` cannot be read; empty if it can."""
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


def _caps_problems(caps: Any) -> Iterator[str]:
    for field in (*_LISTS, *_OPEN_LISTS):
        value = getattr(caps, field)
        if value == () or (field in _OPEN_LISTS and isinstance(value, AnyValue)):
            continue
        if not isinstance(value, list | tuple | set | frozenset) or not all(map(_is_text, value)):
            yield f"caps.{field} is {value!r}; use a tuple of names" + (" or ANY" if field in _OPEN_LISTS else "")
        elif field in _CLOSED:
            yield from (f"caps.{field} has the {problem}" for word in value if (problem := _word_problem(field, word)))
    for field in _NUMBERS:
        value = getattr(caps, field)
        if value is not None and not isinstance(value, OneOf | MultipleOf | AnyValue):
            yield f"caps.{field} is {value!r}; use OneOf, MultipleOf or ANY"
        elif not all(map(_is_positive, value.values if isinstance(value, OneOf) else [getattr(value, "base", 1)])):
            yield f"caps.{field} is {value!r}; use positive whole numbers"
    yield from _sm_problems(caps.sm)
    if not isinstance(caps.tolerance, int | float) or not 0 <= caps.tolerance < 1:
        yield f"caps.tolerance is {caps.tolerance!r}; use a relative error of at least 0 and below 1"
    if caps.graph not in ("never", "decode"):
        yield f"caps.graph is {caps.graph!r}; use never or decode"
    for field in _FLAGS:
        if not isinstance(getattr(caps, field), bool):
            yield f"caps.{field} is {getattr(caps, field)!r}; use True or False"


@cache
def _known_words(field: str) -> Mapping[str, Sequence[str]]:
    if field in ("phases", "ops", "grammars"):
        words = {"phases": get_args(Phase), "ops": (*OP_NAMES, *PARSER_PARTS), "grammars": GRAMMAR_KINDS}[field]
        return dict.fromkeys(words, ())
    if field == "devices":
        return {name: kind.aliases for name, kind in DEVICE_KINDS.items()}
    found: Mapping[str, Sequence[str]] = WORDS["dtypes" if field == "kv_dtypes" else field]
    return found


def _word_problem(field: str, word: str) -> str:
    known = _known_words(field)
    if word in known:
        return ""
    usual = next((name for name, aliases in known.items() if word.lower() in aliases), None)
    hint = f"did you mean {usual!r}?" if usual else nearest(word, known)
    listed = list(known)
    use = f"use {', '.join(listed[:-1])} or {listed[-1]}" if len(listed) <= _FEW or not hint else ""
    return "; ".join(filter(None, (f"unknown {_CLOSED[field]} {word!r}", use, hint)))


def _sm_problems(value: Any) -> Iterator[str]:
    if isinstance(value, AnyValue):
        return
    if not (isinstance(value, list | tuple) and len(value) == 2 and all(isinstance(item, int) for item in value)):
        yield f"caps.sm is {value!r}; use a range such as (80, 90), or ANY"
    elif value[0] > value[1] and tuple(value) != _NO_SM:
        yield f"caps.sm is {value!r}, which holds nothing; the lower end comes first: ({value[1]}, {value[0]})"


def undeclared(spec: BackendSpec) -> list[tuple[int, list[str]]]:
    """(index, fields) of each capability set that nothing fits, because it does not declare a field that every plan
    entry of its role requires, or ``sm`` where all its devices have one.
    """
    found = []
    for index, caps in enumerate(spec.caps):
        required = [CAPS_FIELDS[name] for name in REQUIRED.get(spec.role, ())]
        if spec.role == "grammar":
            required = ["grammars"]
        if spec.role not in ("models", *HOST_ROLES):
            kinds = () if isinstance(caps.devices, AnyValue) else caps.devices
            capable = bool(kinds) and all(device_kind(kind).has_capability for kind in kinds)
            required += ["devices", *(["sm"] if capable else [])]
        if fields := [field for field in required if not _declared(getattr(caps, field))]:
            found.append((index, fields))
    return found


def _declared(value: Any) -> bool:
    return bool(value.values if isinstance(value, OneOf) else value) and value != _NO_SM


def unused_words(spec: BackendSpec) -> Iterator[str]:
    """What a spec lists in an open set although this core never requests it, each as a text with the nearest word."""
    for field in ("features", "formats"):
        known, sets = WORDS[field], [getattr(caps, field) for caps in spec.caps]
        listed = {word for some in sets if not isinstance(some, AnyValue) for word in some}
        for word in sorted(listed - {*known}):
            yield f"lists {word!r} in {field}, which this core never requests; {nearest(word, known)}".rstrip("; ")
