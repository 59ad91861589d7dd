"""Grammars by llguidance, which reads JSON schemas, regular expressions and Lark rules."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper
from llguidance.gbnf_to_lark import gbnf_to_lark

from minisgl_core.plugin_api import GrammarError

if TYPE_CHECKING:
    import numpy as np

    from minisgl_core.plugin_api import Grammar, GrammarSetup

    from .options import GrammarOptions

__all__ = ["LLGuidanceGrammars"]

_HEADER: Final = '%llguidance {"no_forcing": true}\n'
"""Else the mask would allow only one spelling, the tokenizer's own, of a text that is forced"""
_MOST_RECURSION: Final = 10_000
"""Python frames for the reader of GBNF, which recurses; deeper rules are refused."""


class _Vocabulary:
    """What the library asks of a tokenizer. What it encodes does not matter: no tokens are forced."""

    bos_token_id = None

    def __init__(self, setup: GrammarSetup) -> None:
        self.eos_token_id = setup.end_ids[0]
        self.special_token_ids = [token for token, text in enumerate(setup.tokens) if not text]
        self.tokens = [text or b"<|%d|>" % token for token, text in enumerate(setup.tokens)]
        self._ids = {text: token for token, text in enumerate(setup.tokens) if text}

    def __call__(self, text: bytes) -> list[int]:
        return [self._ids[byte] for byte in map(bytes, zip(text, strict=True)) if byte in self._ids]


class LLGuidanceGrammars:
    """Compiles to the library's own text form, and makes one matcher to copy."""

    def __init__(self, setup: GrammarSetup, options: GrammarOptions) -> None:
        self._whitespace = rf"[\x20\x0A\x0D\x09]{{0,{options.max_whitespace}}}"
        vocabulary: Any = TokenizerWrapper(_Vocabulary(setup))
        self._tokenizer = LLTokenizer(vocabulary, n_vocab=setup.vocab_size, eos_token=list(setup.end_ids))
        self._num_bytes = -(-setup.vocab_size // 32) * 4

    def compile(self, grammar: Grammar) -> _Compiled:
        try:
            rules = self._source(grammar)
        except RecursionError:
            raise GrammarError("it is nested too deeply") from None
        source = LLMatcher.grammar_from_lark(_HEADER + rules.removeprefix("%llguidance {}"))
        matcher = LLMatcher(self._tokenizer, source, log_level=0)
        if matcher.is_error():
            raise GrammarError(_first_lines(matcher.get_error()))
        return _Compiled(matcher, self._num_bytes)

    def _source(self, grammar: Grammar) -> str:
        """Lark rules."""
        if grammar.kind == "json_schema":
            return f"start: {self._json(json.loads(grammar.text))}"
        if grammar.kind == "json_object":
            return f"start: {self._json({'type': 'object'})}"
        if grammar.kind == "regex":
            rules: str = json.loads(LLMatcher.grammar_from_regex(grammar.text))["grammars"][0]["lark_grammar"]
            return rules
        if grammar.kind == "ebnf":
            return _lark_of(grammar.text)
        if grammar.kind == "choice":
            return "start: " + " | ".join(map(_quoted, json.loads(grammar.text)))
        return self._tags(json.loads(grammar.text))

    def _json(self, schema: Any) -> str:
        if isinstance(schema, bool):  # the library wants an object
            schema = {} if schema else {"enum": []}
        return f"%json {json.dumps({**schema, 'x-guidance': {'whitespace_pattern': self._whitespace}})}"

    def _tags(self, tag: dict[str, Any]) -> str:
        """Lark rules: a lazy terminal ends free text at the first trigger, behind which the rest of a tag is forced."""
        parts = tag["structures"]
        triggers = [next(one for one in tag["triggers"] if part["begin"].startswith(one)) for part in parts]
        rules = []
        for number, (part, trigger) in enumerate(zip(parts, triggers, strict=True)):
            end = _quoted(part["end"]) if part["end"] else ""
            rest = part["begin"][len(trigger) :]
            rules.append(f"body_{number}: {_quoted(rest) if rest else ''} {self._json(part['schema'])} {end}")
            rules.append(f"tag_{number}: open_{number} body_{number}")
            rules.append(f"open_{number}[lazy]: /(.|\\n)*/ {_quoted(trigger)}")
            rules.append(f"first_{number}: {_quoted(trigger)} body_{number}")
        anywhere, first = (" | ".join(f"{name}_{n}" for n in range(len(parts))) for name in ("tag", "first"))
        once, needed = tag["stop_after_first"], tag["at_least_one"]
        if needed:
            start = f"({first})" if once else f"({first}) ({anywhere})* text"
        else:
            start = f"({anywhere}) | text" if once else f"({anywhere})* text"
        return "\n".join([f"start: {start}", "text: TEXT", "TEXT: /(.|\\n)*/", *rules])

    def close(self) -> None:
        """Nothing to end."""


class _Compiled:
    def __init__(self, matcher: LLMatcher, num_bytes: int) -> None:
        self._template, self._num_bytes = matcher, num_bytes

    def matcher(self) -> _Matcher:
        return _Matcher(self._template.deep_copy(), self._num_bytes)


class _Matcher:
    def __init__(self, state: LLMatcher, num_bytes: int) -> None:
        self._state, self._num_bytes = state, num_bytes

    def fill_mask(self, row: np.ndarray) -> bool:
        if row.nbytes != self._num_bytes or not row.flags.c_contiguous:
            raise ValueError(f"the mask has {row.nbytes} bytes, {self._num_bytes} contiguous ones are needed")
        self._state.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        if self._state.is_error():
            raise GrammarError(_first_lines(self._state.get_error()))
        return True

    def accept(self, token: int) -> bool:
        # a token that is not allowed would leave the library's matcher in a state of error for good
        return self._state.validate_tokens([token]) == 1 and self._state.consume_token(token)


def _quoted(text: str) -> str:
    """A Lark string."""
    return json.dumps(text)


def _lark_of(rules: str) -> str:
    if rules.count("(") > _MOST_RECURSION or len(rules) > 1_000_000:
        raise GrammarError("the EBNF grammar is too large")
    try:
        return gbnf_to_lark(rules)
    except RecursionError:
        raise GrammarError("the EBNF grammar is nested too deeply") from None
    except Exception as error:  # the library raises bare Exception
        raise GrammarError(f"the EBNF grammar is wrong: {_first_lines(str(error))}") from error


def _first_lines(text: str) -> str:
    """The library's message without the listing of the grammar that follows it."""
    shown = text.partition("<state>")[0].partition("\n   1 | ")[0]
    lines = [line.strip() for line in shown.splitlines()[:5]]
    return " ".join(filter(None, lines))[:300] or "it cannot be compiled"
