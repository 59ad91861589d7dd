"""Both libraries on a vocabulary of bytes: texts that are and are not of a form, worked out by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from minisgl_core.plugin_api import Grammar, GrammarError, GrammarSetup, Matcher, mask_words

TEXTS = (b'{"', b'": ', b"true", b"ab", b"<f>", b"</f>", "é".encode(), "é".encode()[:1] + b"x", b"aab", b"12")
END = 299
SETUP = GrammarSetup(
    300, (*(bytes([byte]) for byte in range(256)), *TEXTS, *(None,) * (300 - 256 - len(TEXTS))), (END,)
)
"""All bytes, some longer tokens, and ids without text at the end"""


@pytest.fixture(scope="module", params=["llguidance", "xgrammar"])
def backend(request: pytest.FixtureRequest) -> Any:
    from minisgl_grammar.options import GrammarOptions

    pytest.importorskip(request.param)
    if request.param == "llguidance":
        from minisgl_grammar.by_llguidance import LLGuidanceGrammars

        return LLGuidanceGrammars(SETUP, GrammarOptions())
    from minisgl_grammar.by_xgrammar import XGrammarGrammars

    return XGrammarGrammars(SETUP, GrammarOptions())


def allowed(matcher: Matcher) -> set[int]:
    """Tokens of the mask; what lies beyond the vocabulary counts too."""
    row = np.full(mask_words(SETUP.vocab_size), 0x5A5A5A5A, dtype=np.int32)
    if not matcher.fill_mask(row):
        return set(range(SETUP.vocab_size))
    return set(np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist())


def accepts(matcher: Matcher, text: bytes) -> bool:
    """Is ``text``, byte by byte, a complete answer? Each byte must be in the mask if and only if it is accepted."""
    for byte in text:
        in_mask = byte in allowed(matcher)
        assert matcher.accept(byte) == in_mask
        if not in_mask:
            return False
    return END in allowed(matcher)


PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
TAG = {"begin": "<f>", "schema": {"type": "integer"}, "end": "</f>"}
PAIRS = 'root ::= pair ("," pair)*\npair ::= [a-c]+ "=" ("x" | "y")\n'

CASES: list[tuple[Grammar, list[str], list[str]]] = [
    (Grammar.regex("[ab]{1,3}"), ["a", "abb"], ["", "abab", "c"]),
    (Grammar.regex("(a*)*b"), ["b", "aaab"], ["a", "ba"]),
    (Grammar.choice(["yes", "no", 'say "hi"\n']), ["yes", "no", 'say "hi"\n'], ["y", "nope", ""]),
    (Grammar.ebnf(PAIRS), ["a=x", "ab=y,c=x"], ["a=", "a=x,", "d=x"]),
    (Grammar.ebnf('root ::= "(" root ")" | "x"'), ["x", "((x))"], ["(x", "()"]),
    (
        Grammar.json_schema(PERSON),
        ['{"name": "é", "age": 3}', '{"name":"","age":0}'],
        ['{"age": 3}', '{"name": 1', '{"name": "a", "age": -1', '{"name": "a", "age": 1, "x"', "[]", '{"name": "a"'],
    ),
    (
        Grammar.json_schema({"type": "array", "items": {"enum": ["a", 1, None]}}),
        ['["a", 1, null]', "[]"],
        ["[2", "[true"],
    ),
    (
        Grammar.json_schema(
            {
                "$ref": "#/$defs/n",
                "$defs": {
                    "n": {"type": "object", "properties": {"n": {"$ref": "#/$defs/n"}}, "additionalProperties": False}
                },
            }
        ),
        ['{"n": {"n": {}}}'],
        ['{"n": 1'],
    ),
    (Grammar.json_schema(True), ["1", '{"a": [null, "b"]}'], ["x", "{1"]),
    (Grammar.json_object(), ['{"a": [1, {}]}', "{}"], ["[1]", "1", '"a"']),
    (
        Grammar.structural_tag([TAG], ["<f"]),
        ["free text", "a <f>12</f> b <f>3</f>", ""],
        ["<f>x", "<fx", "<f>1</fa"],
    ),
    (Grammar.structural_tag([TAG], ["<f"], at_least_one=True), ["<f>1</f>", "<f>1</f> more"], ["x", ""]),
    (
        Grammar.structural_tag([TAG], ["<f"], at_least_one=True, stop_after_first=True),
        ["<f>1</f>"],
        ["x", "<f>1</f> "],
    ),
]


@pytest.mark.parametrize(("grammar", "good", "bad"), CASES, ids=[f"{g.kind}-{i}" for i, (g, _, _) in enumerate(CASES)])
def test_texts_of_a_form_are_accepted_and_no_others(
    backend: Any, grammar: Grammar, good: list[str], bad: list[str]
) -> None:
    compiled = backend.compile(grammar)
    assert [text for text in good if not accepts(compiled.matcher(), text.encode())] == []
    assert [text for text in bad if accepts(compiled.matcher(), text.encode())] == []


def test_a_token_is_allowed_if_and_only_if_its_bytes_are(backend: Any) -> None:
    compiled = backend.compile(Grammar.json_schema(PERSON))
    for prefix in (b"", b'{"name": "x', b'{"name": "x", "age": 1'):
        matcher, by_bytes = compiled.matcher(), set()
        for byte in prefix:
            assert matcher.accept(byte)
        for token, text in enumerate(SETUP.tokens):
            other = compiled.matcher()
            if text is not None and all(other.accept(byte) for byte in prefix + text):
                by_bytes.add(token)
        assert allowed(matcher) - {END} == by_bytes


def test_a_complete_answer_allows_the_end_alone(backend: Any) -> None:
    matcher = backend.compile(Grammar.regex("ab")).matcher()
    assert allowed(matcher) == {ord("a"), SETUP.tokens.index(b"ab")}
    assert matcher.accept(SETUP.tokens.index(b"ab"))
    assert allowed(matcher) == {END}


def test_a_refused_token_changes_nothing(backend: Any) -> None:
    matcher = backend.compile(Grammar.regex("ab")).matcher()
    before = allowed(matcher)
    assert not matcher.accept(ord("z")) and not matcher.accept(298)
    assert allowed(matcher) == before and matcher.accept(ord("a")) and allowed(matcher) == {ord("b")}


def test_matchers_of_one_grammar_are_independent(backend: Any) -> None:
    compiled = backend.compile(Grammar.regex("ab|cd"))
    one, other = compiled.matcher(), compiled.matcher()
    assert one.accept(ord("a"))
    assert allowed(one) == {ord("b")} and allowed(other) == {ord("a"), ord("c"), SETUP.tokens.index(b"ab")}
    assert other.accept(ord("c")) and allowed(one) == {ord("b")}


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar.regex("(ab"),
        Grammar.regex("(?=a)b"),
        Grammar.ebnf("root ::= x"),
        Grammar.ebnf("root ::= (("),
        Grammar.json_schema({"type": "foo"}),
        Grammar.json_schema({"$ref": "#/nope"}),
        Grammar.json_schema(False),
        Grammar.json_schema({"type": "array", "contains": {"type": "integer"}, "uniqueItems": True}),
        Grammar("json_schema", '{"type":"array","items":' * 10_000 + "{}" + "}" * 10_000),
    ],
    ids=lambda grammar: f"{grammar.kind} {grammar.text[:30]}",
)
def test_a_wrong_grammar_is_refused_with_a_reason(backend: Any, grammar: Grammar) -> None:
    with pytest.raises(GrammarError, match=r"\w+ \w+"):
        backend.compile(grammar)


@pytest.mark.parametrize(
    ("schema", "word"),
    [
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"properties": {"a": {"type": "number", "multipleOf": 0.5}}}, "multipleOf"),
        ({"not": {"const": 1}}, "not"),
        ({"type": "integer", "anyOf": [{"minimum": 3}], "minimum": 1}, "minimum"),
        ({"allOf": [{"type": "integer"}, {"minimum": 2}]}, "allOf"),
    ],
    ids=str,
)
def test_xgrammar_refuses_by_name_what_it_would_ignore(schema: dict[str, Any], word: str) -> None:
    pytest.importorskip("xgrammar")
    from minisgl_grammar.by_xgrammar import _check_schema

    with pytest.raises(GrammarError, match=f"`{word}`"):
        _check_schema(schema)
    _check_schema({"properties": {"not": {"enum": [{"uniqueItems": True}]}}, "title": "if"})
