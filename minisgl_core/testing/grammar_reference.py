"""Small languages whose texts are known without any grammar library: listed, or judged by a few lines of Python."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

from minisgl_core.plugin_api import Grammar, GrammarKind

__all__ = ["WRONG", "Language", "languages"]


@dataclass(frozen=True)
class Language:
    """A grammar and its meaning. ``prefix``: can these bytes be continued to a complete text? None: not known."""

    grammar: Grammar
    complete: Callable[[bytes], bool]
    prefix: Callable[[bytes], bool] | None = None
    good: tuple[str, ...] = ()
    bad: tuple[str, ...] = ()


def languages(kind: GrammarKind) -> list[Language]:
    """The languages of a kind, of which the first is the simplest."""
    return _LANGUAGES[kind]()


def _listed(grammar: Grammar, texts: list[str], *bad: str) -> Language:
    """A finite language."""
    complete = {text.encode() for text in texts}
    prefixes = {text[:end] for text in complete for end in range(len(text) + 1)}
    return Language(grammar, complete.__contains__, prefixes.__contains__, tuple(texts[:5]), bad)


def _by_re(pattern: str, alphabet: str, longest: int, *bad: str) -> Language:
    """All texts over an alphabet that Python's own ``re`` matches as a whole."""
    some = ("".join(letters) for n in range(longest + 1) for letters in itertools.product(alphabet, repeat=n))
    return _listed(Grammar.regex(pattern), [text for text in some if re.fullmatch(pattern, text)], *bad)


@cache
def _regexes() -> list[Language]:
    return [
        _by_re("ab?", "ab", 3, "b", "abb", ""),
        _by_re("(a|bc){1,3}x?", "abcx", 7, "x", "b", "aaaa"),
        _by_re("[0-2]{2}-(a|é)", "012-aé", 4, "0-a", "00-b"),
        _by_re("(ab|a)(c|bc)", "abc", 4, "ab"),
        Language(Grammar.regex("(a*)*b"), lambda t: re.fullmatch(b"a*b", t) is not None, _stars, ("b", "aab"), ("a",)),
    ]


def _stars(text: bytes) -> bool:
    return re.fullmatch(b"a*b?", text) is not None


@cache
def _choices() -> list[Language]:
    texts = ["yes", "no", "nothing", 'say "hi"\n\\', "日本", "日曜"]
    return [
        _listed(Grammar.choice(["a"]), ["a"], "", "b"),
        _listed(Grammar.choice(texts), texts, "y", "nope", "日"),
    ]


@cache
def _ebnfs() -> list[Language]:
    rules = 'root ::= item ("," item){0,1}\nitem ::= "a" [xy] | "b"\n# a comment\n'
    items = ["ax", "ay", "b"]
    return [
        _listed(Grammar.ebnf(rules), [*items, *(f"{a},{b}" for a in items for b in items)], "a", "b,", "b,b,b"),
        Language(Grammar.ebnf('root ::= "(" root ")" | "x"'), _balanced, _opening, ("x", "((x))"), ("(x", "()")),
    ]


def _balanced(text: bytes) -> bool:
    found = re.fullmatch(rb"(\(*)x(\)*)", text)
    return found is not None and len(found[1]) == len(found[2])


def _opening(text: bytes) -> bool:
    found = re.fullmatch(rb"(\(*)(x(\)*))?", text)
    return found is not None and len(found[3] or b"") <= len(found[1])


def _json(schema: Any, valid: Callable[[Any], bool], good: tuple[str, ...], bad: tuple[str, ...]) -> Language:
    grammar = Grammar.json_object() if schema is None else Grammar.json_schema(schema)
    return Language(grammar, lambda text: _holds(text, valid), None, good, bad)


def _holds(text: bytes, valid: Callable[[Any], bool]) -> bool:
    try:
        return valid(json.loads(text.decode()))
    except (ValueError, RecursionError):
        return False


_PERSON: Final = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
_TREE: Final = {
    "$ref": "#/$defs/tree",
    "$defs": {
        "tree": {
            "type": "object",
            "properties": {"v": {"enum": ["a", 1, None]}, "t": {"type": "array", "items": {"$ref": "#/$defs/tree"}}},
            "required": ["v"],
            "additionalProperties": False,
        }
    },
}


def _is_person(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and set(value) == {"name", "age"}
        and isinstance(value["name"], str)
        and len(value["name"]) <= 5
        and type(value["age"]) is int
        and value["age"] >= 0
    )


def _is_tree(value: Any) -> bool:
    if not isinstance(value, dict) or not {"v"} <= set(value) <= {"v", "t"}:
        return False
    trees = value.get("t", [])
    return value["v"] in ("a", 1, None) and isinstance(trees, list) and all(map(_is_tree, trees))


@cache
def _schemas() -> list[Language]:
    return [
        _json({"enum": ["a", 12, True, None]}, _is_listed, ('"a"', "12", "true", "null"), ('"b"', "1", "false", "nul")),
        _json(
            _PERSON,
            _is_person,
            ('{"name": "Zoé", "age": 3}', '{"name":"","age":0}'),
            ('{"age": 3}', '{"name": "a", "age": -1}', '{"name": "a", "age": 1, "x": 1}', "[]", '{"name": "abcdef"'),
        ),
        _json(_TREE, _is_tree, ('{"v": "a", "t": [{"v": 1}, {"v": null, "t": []}]}',), ('{"t": []}', '{"v": 2}')),
        _json(
            {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 2},
            lambda value: isinstance(value, list) and 1 <= len(value) <= 2 and all(type(one) is bool for one in value),
            ("[true]", "[true, false]"),
            ("[]", "[true, true, true]", "[1]"),
        ),
    ]


def _is_listed(value: Any) -> bool:
    return value == "a" or (type(value) is int and value == 12) or value is True or value is None


@cache
def _objects() -> list[Language]:
    return [_json(None, lambda value: isinstance(value, dict), ("{}", '{"a": [1, {"b": null}]}'), ("[1]", '"a"', "1"))]


_TAGS: Final = [
    {"begin": "<f>", "schema": {"type": "integer"}, "end": "</f>"},
    {"begin": "<g>", "schema": {"enum": ["x"]}, "end": "</g>"},
]
_TAG: Final = rb"<f>\s*-?(0|[1-9][0-9]*)\s*</f>|<g>\s*\"x\"\s*</g>"


@cache
def _structural_tags() -> list[Language]:
    # free text holds no trigger
    free = re.compile(rb"(?:(?!<f|<g).)*(?:(?:" + _TAG + rb")(?:(?!<f|<g).)*)*", re.DOTALL)
    one = re.compile(_TAG)
    return [
        Language(
            Grammar.structural_tag(_TAGS, ["<f", "<g"]),
            lambda text: free.fullmatch(text) is not None,
            None,
            ("free text", 'a <f>12</f> b <g>"x"</g>', ""),
            ("<f>x</f>", "<f>1</g>", "<fx"),
        ),
        Language(
            Grammar.structural_tag(_TAGS, ["<"], at_least_one=True, stop_after_first=True),
            lambda text: one.fullmatch(text) is not None,
            None,
            ("<f>1</f>", '<g>"x"</g>'),
            ("x", "<f>1</f> ", "<h>"),
        ),
    ]


_LANGUAGES: Final[Mapping[GrammarKind, Callable[[], list[Language]]]] = {
    "regex": _regexes,
    "choice": _choices,
    "ebnf": _ebnfs,
    "json_schema": _schemas,
    "json_object": _objects,
    "structural_tag": _structural_tags,
}

_WRONG_TAG: Final = {
    "structures": [{"begin": "<f>", "schema": {"type": "foo"}, "end": ""}],
    "triggers": ["<"],
    "at_least_one": False,
    "stop_after_first": False,
}
WRONG: Final[Mapping[GrammarKind, tuple[str, ...]]] = {
    "regex": ("(ab", "[a", "a{3,1}", "*a"),
    "choice": (),
    "ebnf": ("root ::= x", "root ::= ((", "start = 1", 'other ::= "a"'),
    "json_schema": ('{"type": "foo"}', '{"$ref": "#/nope"}', "false", '{"items":' * 5000 + "{}" + "}" * 5000),
    "json_object": (),
    "structural_tag": (
        json.dumps({**_WRONG_TAG, "structures": [{"begin": "<f>", "schema": {"type": "foo"}, "end": ""}]}),
    ),
}
"""Texts of each kind that must be refused"""
