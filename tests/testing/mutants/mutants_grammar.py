"""A right grammar backend for choices, and wrong ones."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from minisgl_core.plugin_api import Grammar, GrammarError, GrammarSetup


class Right:
    """An answer is one of several texts."""

    def __init__(self, setup: GrammarSetup, options: Any) -> None:
        self.setup = setup

    def compile(self, grammar: Grammar) -> Any:
        if grammar.kind != "choice":
            raise GrammarError(f"{grammar.kind} is not supported")
        return Compiled(self, [text.encode() for text in json.loads(grammar.text)])

    def close(self) -> None: ...

    # What mutants change.

    def token_bytes(self, token: int) -> bytes:
        return self.setup.tokens[token] or b""

    def is_allowed(self, written: bytes, token: int, texts: list[bytes]) -> bool:
        text = self.token_bytes(token)
        return bool(text) and any(choice.startswith(written + text) for choice in texts)

    def may_end(self, written: bytes, texts: list[bytes]) -> bool:
        return written in texts

    def write(self, row: np.ndarray, tokens: list[int]) -> None:
        bits = np.zeros(len(row) * 32, dtype=np.uint8)
        bits[tokens] = 1
        row.view(np.uint8)[:] = np.packbits(bits, bitorder="little")


class Compiled:
    def __init__(self, backend: Right, texts: list[bytes]) -> None:
        self.backend, self.texts = backend, texts

    def matcher(self) -> Any:
        return Matcher(self)


class Matcher:
    def __init__(self, compiled: Compiled) -> None:
        self.backend, self.texts, self.written = compiled.backend, compiled.texts, b""

    def fill_mask(self, row: np.ndarray) -> bool:
        setup, backend = self.backend.setup, self.backend
        tokens = [t for t in range(setup.vocab_size) if backend.is_allowed(self.written, t, self.texts)]
        if backend.may_end(self.written, self.texts):
            tokens += setup.end_ids
        backend.write(row, tokens)
        return True

    def accept(self, token: int) -> bool:
        if not self.backend.is_allowed(self.written, token, self.texts):
            return False
        self.written += self.backend.token_bytes(token)
        return True


class ForgetsTokensOfSeveralBytes(Right):
    def is_allowed(self, written: bytes, token: int, texts: list[bytes]) -> bool:
        return len(self.token_bytes(token)) == 1 and super().is_allowed(written, token, texts)


class AllowsWhatOnlyBeginsRight(Right):
    def is_allowed(self, written: bytes, token: int, texts: list[bytes]) -> bool:
        text = written + self.token_bytes(token)[:1]
        return bool(self.token_bytes(token)) and any(choice.startswith(text) for choice in texts)


class MayAlwaysEnd(Right):
    def may_end(self, written: bytes, texts: list[bytes]) -> bool:
        return True


class NeverEnds(Right):
    def may_end(self, written: bytes, texts: list[bytes]) -> bool:
        return False


class AddsToWhatIsThere(Right):
    def write(self, row: np.ndarray, tokens: list[int]) -> None:
        mask = row.copy()
        super().write(mask, tokens)
        row |= mask


class SetsTheBitsBeyond(Right):
    def write(self, row: np.ndarray, tokens: list[int]) -> None:
        super().write(row, [*tokens, *range(self.setup.vocab_size, len(row) * 32)])


class WritesOneWordMore(Right):
    def write(self, row: np.ndarray, tokens: list[int]) -> None:
        super().write(row, tokens)
        around = row.base
        if isinstance(around, np.ndarray) and len(around) > len(row):
            around[-1] = 0


class CountsBitsFromTheLeft(Right):
    def write(self, row: np.ndarray, tokens: list[int]) -> None:
        bits = np.zeros(len(row) * 32, dtype=np.uint8)
        bits[tokens] = 1
        row.view(np.uint8)[:] = np.packbits(bits)


class OneStateForAllMatchers(Right):
    def compile(self, grammar: Grammar) -> Any:
        one = super().compile(grammar).matcher()

        class Shared:
            def matcher(self) -> Any:
                return one

        return Shared()


class AcceptsForbiddenTokens(Right):
    def compile(self, grammar: Grammar) -> Any:
        compiled = super().compile(grammar)

        class Lax(Matcher):
            def accept(self, token: int) -> bool:
                self.written += self.backend.token_bytes(token)
                return True

        class LaxCompiled:
            def matcher(self) -> Any:
                return Lax(compiled)

        return LaxCompiled()


class CompilesAnything(Right):
    def compile(self, grammar: Grammar) -> Any:
        return Compiled(self, [b"a"])


class RaisesWhatItMeets(Right):
    def compile(self, grammar: Grammar) -> Any:
        return Compiled(self, [text.encode() for text in json.loads(grammar.text)])


class CompilesOneAtATime(Right):
    """It keeps the texts of the grammar that is being compiled in itself."""

    def compile(self, grammar: Grammar) -> Any:
        import time

        self.texts = [text.encode() for text in json.loads(grammar.text)]
        time.sleep(0.05)
        return Compiled(self, self.texts)
