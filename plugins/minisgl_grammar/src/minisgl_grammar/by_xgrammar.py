"""Grammars by XGrammar. Masks are cleared beyond the vocabulary; keywords that it would ignore are refused by name."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import xgrammar

from minisgl_core.plugin_api import GrammarError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from minisgl_core.plugin_api import Grammar, GrammarSetup

    from .options import GrammarOptions

__all__ = ["XGrammarGrammars"]

_IGNORED: Final = frozenset(
    (
        *("uniqueItems", "contains", "minContains", "maxContains", "unevaluatedItems", "additionalItems"),
        *("dependentRequired", "dependentSchemas", "dependencies", "unevaluatedProperties"),
        *("not", "if", "then", "else", "$dynamicRef", "$recursiveRef"),
    )
)
"""Keywords that the library skips without a word (0.2.9), or reads as something wider"""
_ALONE: Final = ("anyOf", "oneOf", "allOf", "$ref", "enum", "const")
"""Keywords next to which it skips all others"""
_NOTES: Final = frozenset(
    (
        *("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment"),
        *("$defs", "definitions", "$schema", "$id", "discriminator", "type"),
    )
)
_HOLD_SCHEMAS: Final = ("properties", "patternProperties", "$defs", "definitions")
_ARE_DATA: Final = ("enum", "const", "default", "examples", "required", "type")
_PLACE: Final = re.compile(r"^\[[\d:]+\] \S+?:\d+: ")


class XGrammarGrammars:
    """Compiles on the calling thread."""

    def __init__(self, setup: GrammarSetup, options: GrammarOptions) -> None:
        self._setup, self._max_whitespace = setup, options.max_whitespace
        info = xgrammar.TokenizerInfo(
            [text or b"" for text in setup.tokens],
            xgrammar.VocabType.RAW,
            vocab_size=setup.vocab_size,
            stop_token_ids=list(setup.end_ids),
        )
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)

    def compile(self, grammar: Grammar) -> _Compiled:
        try:
            return _Compiled(self._compiled(grammar), self._setup)
        except (RuntimeError, ValueError, TypeError) as error:
            raise GrammarError(_PLACE.sub("", str(error)).strip()[:300]) from error
        except RecursionError:
            raise GrammarError("it is nested too deeply") from None

    def _compiled(self, grammar: Grammar) -> xgrammar.CompiledGrammar:
        if grammar.kind == "json_schema":
            _check_schema(json.loads(grammar.text))
            return self._json(grammar.text)
        if grammar.kind == "json_object":
            return self._json('{"type": "object"}')
        if grammar.kind == "regex":
            return self._compiler.compile_regex(grammar.text)
        if grammar.kind == "ebnf":
            return self._compiler.compile_grammar(grammar.text)
        if grammar.kind == "choice":
            texts = map(json.dumps, json.loads(grammar.text))
            return self._compiler.compile_grammar("root ::= " + " | ".join(texts))
        return self._compiler.compile_structural_tag(json.dumps(self._tags(json.loads(grammar.text))))

    def _json(self, schema: str) -> xgrammar.CompiledGrammar:
        # not its strict mode, which forbids properties that the schema allows
        return self._compiler.compile_json_schema(schema, strict_mode=False, max_whitespace_cnt=self._max_whitespace)

    def _tags(self, tag: dict[str, Any]) -> dict[str, Any]:
        tags = []
        for part in tag["structures"]:
            _check_schema(part["schema"])
            content = {
                "type": "json_schema",
                "json_schema": part["schema"],
                "max_whitespace_cnt": self._max_whitespace,
            }
            tags.append({"type": "tag", "begin": part["begin"], "content": content, "end": part["end"]})
        flags = {name: tag[name] for name in ("at_least_one", "stop_after_first")}
        form = {"type": "triggered_tags", "triggers": tag["triggers"], "tags": tags, **flags}
        return {"type": "structural_tag", "format": form}

    def close(self) -> None:
        """Nothing to end."""


class _Compiled:
    def __init__(self, compiled: xgrammar.CompiledGrammar, setup: GrammarSetup) -> None:
        self._compiled, self._setup = compiled, setup

    def matcher(self) -> _Matcher:
        return _Matcher(xgrammar.GrammarMatcher(self._compiled), self._setup)


class _Matcher:
    def __init__(self, state: xgrammar.GrammarMatcher, setup: GrammarSetup) -> None:
        self._state, self._tokens = state, setup.tokens
        odd = setup.vocab_size % 32
        self._beyond = np.int32(-1 << odd) if odd else np.int32(0)
        """The bits of the last word that mean no token; the library leaves them as they are or sets them"""

    def fill_mask(self, row: np.ndarray) -> bool:
        restricts = self._state.fill_next_token_bitmask(row.reshape(1, -1))
        row[-1] &= ~self._beyond
        return bool(restricts)

    def accept(self, token: int) -> bool:
        # the library writes a line to standard error for a token without text
        return bool(self._tokens[token]) and bool(self._state.accept_token(token))


def _check_schema(schema: Any) -> None:
    for path, part in _schemas(schema):
        where = "/".join(path) or "the schema"
        for name in part:
            if name in _IGNORED or (name == "multipleOf" and part.get("type") != "integer"):
                raise GrammarError(f"xgrammar does not honour `{name}` of {where}; the backend llguidance may")
        alone = next((name for name in _ALONE if name in part), None)
        others = sorted(set(part) - _NOTES - {alone}) if alone else []
        if others:
            raise GrammarError(f"xgrammar does not honour `{others[0]}` next to `{alone}` of {where}; llguidance may")
        if len(part.get("allOf", ())) > 1:
            raise GrammarError(f"xgrammar does not honour an `allOf` of several parts in {where}; llguidance may")


def _schemas(schema: Any) -> Iterator[tuple[tuple[str, ...], dict[str, Any]]]:
    """Every schema within a schema, with its path, without recursion."""
    waiting: list[tuple[tuple[str, ...], Any]] = [((), schema)]
    while waiting:
        path, part = waiting.pop()
        if isinstance(part, list):
            waiting += [((*path[-8:], str(index)), one) for index, one in enumerate(part)]
        if not isinstance(part, dict):
            continue
        yield path, part
        for name, value in part.items():
            if name in _HOLD_SCHEMAS and isinstance(value, dict):
                waiting += [((*path[-8:], name, key), one) for key, one in value.items()]
            elif name not in _ARE_DATA:
                waiting.append(((*path[-8:], name), value))
