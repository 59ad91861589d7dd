"""The role ``grammar``: plain data, the plan entry, the backend that every installation has."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from minisgl_core import SamplingParams
from minisgl_core.builtin.grammar import NoGrammar
from minisgl_core.errors import AdmissionError
from minisgl_core.plugin_api import GRAMMAR_KINDS, BackendSpec, Caps, Grammar, GrammarError, GrammarSetup
from minisgl_core.plugin_api.spec_validation import spec_problems, undeclared

TAG = {"begin": "<f>", "schema": {"type": "object"}, "end": "</f>"}


@pytest.mark.parametrize(
    ("given", "kind"),
    [
        ({"json_schema": {"type": "integer"}}, "json_schema"),
        ({"json_schema": '{"type": "integer"}'}, "json_schema"),
        ({"json_object": True}, "json_object"),
        ({"regex": "[ab]+"}, "regex"),
        ({"ebnf": 'root ::= "a"'}, "ebnf"),
        ({"choice": ["yes", "no"]}, "choice"),
        ({"structural_tag": {"structures": [TAG], "triggers": ["<"], "at_least_one": True}}, "structural_tag"),
    ],
    ids=str,
)
def test_grammars_are_made_of_plain_data(given: dict[str, Any], kind: str) -> None:
    grammar = SamplingParams(grammar=given).grammar
    assert isinstance(grammar, Grammar) and grammar.kind == kind
    assert pickle.loads(pickle.dumps(grammar)) == grammar and len({grammar, Grammar.of(given)}) == 1


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({}, "has nothing"),
        ({"json": {}}, "'json'"),
        ({"regex": "a", "choice": ["a"]}, "'regex', 'choice'"),
        ({"json_object": {}}, "json_object is true"),
        ({"json_schema": "{"}, "not JSON"),
        ({"json_schema": "[1]"}, "an object, true or false"),
        ({"json_schema": {"const": float("nan")}}, "not JSON"),
        ({"json_schema": '{"a":' * 100_000}, "nested too deeply"),
        ({"regex": 7}, "a regular expression is a text"),
        ({"choice": []}, "at least one"),
        ({"choice": "abc"}, "at least one"),
        ({"structural_tag": {"structures": [TAG]}}, "a structural tag has"),
        ({"structural_tag": {"structures": [TAG], "triggers": ["[["]}}, "no trigger opens"),
        ({"structural_tag": {"structures": [{"begin": "<f>"}], "triggers": ["<"]}}, "a structure has"),
        ({"structural_tag": {"structures": [], "triggers": ["<"]}}, "at least one structure"),
        ({"structural_tag": {"structures": [TAG], "triggers": ["<"], "at_least_one": 1}}, "are flags"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_wrong_grammars_are_refused_where_they_are_made(given: dict[str, Any], says: str) -> None:
    with pytest.raises(AdmissionError, match=says):
        SamplingParams(grammar=given)


def test_a_schema_that_is_nested_too_deeply_is_refused() -> None:
    deep: dict[str, Any] = {}
    for _ in range(100_000):
        deep = {"items": deep}
    with pytest.raises(GrammarError, match="nested too deeply"):
        Grammar.json_schema(deep)
    while deep:  # freeing it in one go would recurse as deeply
        deep = deep["items"]


def test_what_is_no_grammar_is_refused() -> None:
    with pytest.raises(AdmissionError, match="give a Grammar"):
        SamplingParams(grammar="[ab]+")  # type: ignore[arg-type]


def test_a_kind_outside_the_caps_is_refused_by_name() -> None:
    spec = BackendSpec("grammar", "mine", "x:Y", caps=(Caps(grammars=("regex", "yaml")),))
    assert [problem for problem in spec_problems(spec) if "yaml" in problem]
    assert list(undeclared(BackendSpec("grammar", "mine", "x:Y", caps=(Caps(),)))) == [(0, ["grammars"])]


@pytest.mark.parametrize("kind", GRAMMAR_KINDS)
def test_without_a_library_every_grammar_is_refused_with_the_install_command(kind: Any) -> None:
    backend = NoGrammar(GrammarSetup(4, (b"a", b"b", b"c", None), (3,)), None)
    with pytest.raises(GrammarError, match=r"pip install 'minisgl-grammar\[llguidance\]'"):
        backend.compile(Grammar(kind, "{}"))
    backend.close()
