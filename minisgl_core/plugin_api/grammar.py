"""Role ``grammar``: which tokens may come next, so that an answer has a given form."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol, Self, cast, get_args

if TYPE_CHECKING:
    import numpy as np

__all__ = [
    "GRAMMAR_KINDS",
    "CompiledGrammar",
    "Grammar",
    "GrammarBackend",
    "GrammarError",
    "GrammarKind",
    "GrammarSetup",
    "Matcher",
    "mask_words",
]

GrammarKind = Literal["json_schema", "json_object", "regex", "ebnf", "structural_tag", "choice"]
GRAMMAR_KINDS: Final[tuple[GrammarKind, ...]] = get_args(GrammarKind)


class GrammarError(Exception):
    """A grammar that cannot be compiled or matched: the text says what is wrong with it. It ends one request."""


@dataclass(frozen=True, slots=True)
class Grammar:
    """The form of an answer: plain, hashable data. The constructors below check the form of their arguments.

    ``text`` by kind: ``json_schema`` a JSON schema as JSON text; ``json_object`` empty; ``regex`` a regular expression
    that the whole answer matches; ``ebnf`` rules in GBNF, the dialect of llama.cpp, of which ``root`` is the start;
    ``choice`` a JSON list of texts; ``structural_tag`` JSON as :meth:`structural_tag` describes.
    """

    kind: GrammarKind
    text: str = ""

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Self:
        """From data such as ``{"json_schema": {...}}``, ``{"json_object": True}``, ``{"regex": "..."}``, ``{"ebnf":
        "..."}``, ``{"choice": [...]}`` or ``{"structural_tag": {"structures": [...], "triggers": [...]}}``.
        """
        if len(given) != 1 or (kind := next(iter(given))) not in GRAMMAR_KINDS:
            named = ", ".join(map(repr, given)) or "nothing"
            raise GrammarError(f"a grammar has one of {', '.join(GRAMMAR_KINDS)}; this has {named:.80}")
        value = given[kind]
        if kind == "json_object":
            if value is not True:
                raise GrammarError(f"json_object is true; this is {value!r:.60}")
            return cls.json_object()
        if kind == "structural_tag":
            return cls._tag_of(value)
        made: Self = getattr(cls, kind)(value)
        return made

    @classmethod
    def _tag_of(cls, given: object) -> Self:
        known = {"structures", "triggers", "at_least_one", "stop_after_first"}
        if not isinstance(given, Mapping) or not {"structures", "triggers"} <= set(given) <= known:
            raise GrammarError(f"a structural tag has {', '.join(sorted(known))}; this is {given!r:.80}")
        lists = (given["structures"], given["triggers"])
        flags = {name: given[name] for name in sorted(known & set(given)) if name not in ("structures", "triggers")}
        if not all(isinstance(value, list | tuple) for value in lists) or not all(
            isinstance(flag, bool) for flag in flags.values()
        ):
            raise GrammarError("`structures` and `triggers` of a structural tag are lists, its other keys are flags")
        return cls.structural_tag(*lists, **flags)

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | bool | str) -> Self:
        """JSON that a schema accepts. ``schema``: as data, or as JSON text."""
        text = schema if isinstance(schema, str) else _json(schema)
        if not isinstance(_parsed(text), dict | bool):
            raise GrammarError(f"a JSON schema is an object, true or false; this is {text!r:.60}")
        return cls("json_schema", text)

    @classmethod
    def json_object(cls) -> Self:
        """Any JSON object."""
        return cls("json_object")

    @classmethod
    def regex(cls, pattern: str) -> Self:
        """A text that ``pattern`` matches as a whole."""
        return cls("regex", _text(pattern, "a regular expression"))

    @classmethod
    def ebnf(cls, rules: str) -> Self:
        """A text that the rule ``root`` of a GBNF grammar derives."""
        return cls("ebnf", _text(rules, "an EBNF grammar"))

    @classmethod
    def choice(cls, texts: Sequence[str]) -> Self:
        """One of ``texts``."""
        listed = [] if isinstance(texts, str) else list(texts)
        if not listed or not all(isinstance(text, str) for text in listed):
            raise GrammarError(f"a choice is a list of at least one text; this is {texts!r:.60}")
        return cls("choice", _json(listed))

    @classmethod
    def structural_tag(
        cls,
        structures: Sequence[Mapping[str, Any]],
        triggers: Sequence[str],
        *,
        at_least_one: bool = False,
        stop_after_first: bool = False,
    ) -> Self:
        """Free text in which each of ``triggers`` opens one of ``structures``.

        A structure is ``{"begin": text, "schema": JSON schema, "end": text}``; its ``begin`` starts with a trigger.
        ``at_least_one``: the answer starts with a structure. ``stop_after_first``: the answer ends behind it.
        """
        parts = [_structure(part) for part in structures]
        starts = tuple(_text(trigger, "a trigger") for trigger in triggers)
        if not parts or not starts or not all(starts):
            raise GrammarError("a structural tag needs at least one structure and one trigger, none of them empty")
        for part in parts:
            if not part["begin"].startswith(starts):
                raise GrammarError(f"no trigger opens the structure that begins with {part['begin']!r:.60}")
        flags = {"at_least_one": at_least_one, "stop_after_first": stop_after_first}
        return cls("structural_tag", _json({"structures": parts, "triggers": list(starts), **flags}))


def _structure(part: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(cast("object", part), Mapping) or set(part) != {"begin", "schema", "end"}:
        raise GrammarError(f"a structure has `begin`, `schema` and `end`; this is {part!r:.60}")
    if not isinstance(part["schema"], Mapping | bool):
        raise GrammarError(f"the schema of a structure is an object, true or false; this is {part['schema']!r:.60}")
    begin, end = _text(part["begin"], "`begin` of a structure"), _text(part["end"], "`end` of a structure")
    return {"begin": begin, "schema": part["schema"], "end": end}


def _text(value: object, what: str) -> str:
    if not isinstance(value, str):
        raise GrammarError(f"{what} is a text; this is {value!r:.60}")
    return value


def _json(value: object) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except RecursionError:
        raise GrammarError("it is nested too deeply") from None
    except (TypeError, ValueError) as error:
        raise GrammarError(f"it is not JSON: {error}") from error


def _parsed(text: str) -> object:
    try:
        return json.loads(text)
    except RecursionError:
        raise GrammarError("it is nested too deeply") from None
    except ValueError as error:
        raise GrammarError(f"it is not JSON: {error}") from error


def mask_words(vocab_size: int) -> int:
    """Number of int32 words that hold one bit per token."""
    return -(-vocab_size // 32)


@dataclass(frozen=True, slots=True)
class GrammarSetup:
    """What a grammar backend is constructed with: one model's vocabulary."""

    vocab_size: int
    """V, that of the logits; a tokenizer may have fewer tokens."""
    tokens: tuple[bytes | None, ...]
    """(V,) The bytes of each token; None for one that writes nothing: special tokens and unused ids."""
    end_ids: tuple[int, ...]
    """Tokens that end an answer, ascending. They are allowed where the grammar may end, and nowhere else."""


class Matcher(Protocol):
    """The state of one answer. It is used by one thread at a time, and shares nothing that changes with others."""

    def fill_mask(self, row: np.ndarray) -> bool:
        """Write which tokens may come next into ``row`` (W,) int32, W = :func:`mask_words`: bit i % 32 of word i // 32
        is set if token i is allowed; bits from V on are 0. It may hold anything before, and all of it is written.

        A token is allowed if its text keeps some complete answer possible; the end tokens are allowed if the text so
        far is complete. False: every token is allowed, and ``row`` need not be read. Raises :class:`GrammarError`
        where a limit of the library is hit.
        """
        ...

    def accept(self, token: int) -> bool:
        """Append a token to the text; False, and nothing changes, if it is not allowed. Not called with end tokens."""
        ...


class CompiledGrammar(Protocol):
    """Immutable, and usable from several threads at once."""

    def matcher(self) -> Matcher:
        """The state before the first token."""
        ...


class GrammarBackend(Protocol):
    """Built as ``Class(setup, options)`` in the process of rank 0 when the first grammar arrives, and in a child
    process that tries each grammar under limits of time and memory first.
    """

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        """Raises :class:`GrammarError` for a grammar that is wrong or unsupported. Called from several threads."""
        ...

    def close(self) -> None: ...
