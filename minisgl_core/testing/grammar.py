"""Checks of the role ``grammar``: masks against brute force over the vocabulary."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, cast

import numpy as np

from minisgl_core.plugin_api import (
    Grammar,
    GrammarBackend,
    GrammarError,
    GrammarKind,
    GrammarSetup,
    Matcher,
    mask_words,
)
from minisgl_core.registry.query import Requirement

from .check import Check, Result, caps_of
from .collect import collect
from .compare import Mismatch, expect
from .grammar_reference import WRONG, Language, languages

if TYPE_CHECKING:
    from minisgl_core.plugin_api import Caps

    from .backend_under_test import BackendUnderTest
    from .device_fixture import DeviceFixture

__all__ = ["GrammarCheck", "grammar_checks"]

WORDS: Final = (
    *(b'{"', b'": ', b'"', b", ", b"true", b"false", b"null", b"ab", b"bc", b"abc", b"12", b"<f>", b"</f>", b'":'),
    *("é".encode(), "é".encode()[:1], "日本".encode()[1:4], b"aab", b"xx", b"((", b"x)", b"yes", b"no", b"}", b"a"),
)
"""Tokens of more than one byte, parts of characters, and texts that two tokens have"""
Scenario = Literal["mask", "samples", "refused", "many", "wrong", "threads"]
LONGEST_WALK: Final = 200
GARBAGE: Final = 0x5A5A5A5A


@dataclass(frozen=True, kw_only=True, repr=False)
class GrammarCheck(Check):
    """``mask``: every token against the reference, along random answers. ``samples``: given texts, byte by byte.
    ``refused``: forbidden tokens change nothing. ``many``: matchers in turn. ``wrong``: grammars that cannot be
    compiled. ``threads``: compiled at the same time. ``vocab_size`` V.
    """

    scenario: Scenario
    kind: GrammarKind
    vocab_size: int = 300
    seed: int = 0

    def requirement(self, fixture: DeviceFixture) -> Requirement:
        return Requirement()

    def run(self, under_test: BackendUnderTest, fixture: DeviceFixture) -> Result:
        vocabulary = Vocabulary(self.vocab_size)
        backend: GrammarBackend = under_test.build(vocabulary.setup, caps_of(under_test, self, fixture))
        getattr(self, f"_{self.scenario}")(backend, vocabulary)
        backend.close()
        return Result()

    def _mask(self, backend: GrammarBackend, vocabulary: Vocabulary) -> None:
        draw = random.Random(self.seed)
        for language in languages(self.kind):
            compiled = backend.compile(language.grammar)
            for _ in range(6):
                self._walk(compiled.matcher(), language, vocabulary, draw)

    def _walk(self, matcher: Matcher, language: Language, vocabulary: Vocabulary, draw: random.Random) -> None:
        """A random answer under the masks, each of which is compared with the reference."""
        text = b""
        for _ in range(LONGEST_WALK):
            allowed = vocabulary.allowed(matcher, language, text)
            _same(allowed, vocabulary.reference(language, text), language, text, vocabulary)
            tokens = sorted(allowed - {vocabulary.end})
            if vocabulary.end in allowed and (not tokens or draw.random() < 0.3):
                break
            expect(bool(tokens), f"{_of(language, text)}: nothing is allowed")
            token = vocabulary.shortest(tokens, draw) if len(text) > LONGEST_WALK // 2 else draw.choice(tokens)
            expect(matcher.accept(token), f"{_of(language, text)}: token {token} is in the mask and not accepted")
            text += vocabulary.setup.tokens[token] or b""
        else:
            return
        expect(language.complete(text), f"{_of(language, text)}: this text may end, and is no complete answer")

    def _samples(self, backend: GrammarBackend, vocabulary: Vocabulary) -> None:
        for language in languages(self.kind):
            compiled = backend.compile(language.grammar)
            for good, texts in ((True, language.good), (False, language.bad)):
                for text in texts:
                    found = _accepts(compiled.matcher(), text.encode(), vocabulary, language)
                    expect(found == good, f"{_of(language, text.encode())}: accepted {found}, should be {good}")

    def _refused(self, backend: GrammarBackend, vocabulary: Vocabulary) -> None:
        draw = random.Random(self.seed)
        silent = vocabulary.setup.tokens.index(None)
        for language in languages(self.kind):
            matcher, text = backend.compile(language.grammar).matcher(), b""
            for _ in range(5):
                allowed = vocabulary.allowed(matcher, language, text)
                others = sorted(set(range(vocabulary.setup.vocab_size)) - allowed - {vocabulary.end})
                for token in [silent, *draw.sample(others, min(4, len(others)))]:
                    expect(not matcher.accept(token), f"{_of(language, text)}: token {token} is forbidden but accepted")
                again = vocabulary.allowed(matcher, language, text)
                expect(again == allowed, f"{_of(language, text)}: a refused token changes the mask")
                tokens = sorted(allowed - {vocabulary.end})
                if not tokens:
                    break
                token = draw.choice(tokens)
                matcher.accept(token)
                text += vocabulary.setup.tokens[token] or b""

    def _many(self, backend: GrammarBackend, vocabulary: Vocabulary) -> None:
        """Two answers of each grammar in turn, and another grammar compiled meanwhile."""
        draw = random.Random(self.seed)
        compiled = [(language, backend.compile(language.grammar)) for language in languages(self.kind)]
        states = [(language, one.matcher()) for language, one in compiled for _ in range(2)]
        texts = [b""] * len(states)
        for _ in range(8):
            for index, (language, matcher) in enumerate(states):
                allowed = vocabulary.allowed(matcher, language, texts[index])
                reference = vocabulary.reference(language, texts[index])
                _same(allowed, reference, language, texts[index], vocabulary)
                if tokens := sorted(allowed - {vocabulary.end}):
                    token = draw.choice(tokens)
                    expect(matcher.accept(token), f"{_of(language, texts[index])}: token {token} is not accepted")
                    texts[index] += vocabulary.setup.tokens[token] or b""

    def _wrong(self, backend: GrammarBackend, vocabulary: Vocabulary) -> None:
        for text in WRONG[self.kind]:
            try:
                backend.compile(Grammar(self.kind, text)).matcher().fill_mask(vocabulary.row())
            except GrammarError as error:
                expect(bool(str(error).strip()), f"{text[:60]!r} is refused without a reason")
                continue
            raise Mismatch(f"{text[:60]!r} is no {self.kind}, and is compiled")

    def _threads(self, backend: GrammarBackend, vocabulary: Vocabulary) -> None:
        some = languages(self.kind) * 4
        with ThreadPoolExecutor(4) as pool:
            compiled = list(pool.map(lambda language: backend.compile(language.grammar), some))
        for language, one in zip(some, compiled, strict=True):
            allowed = vocabulary.allowed(one.matcher(), language, b"")
            _same(allowed, vocabulary.reference(language, b""), language, b"", vocabulary)


class Vocabulary:
    """Every byte, :data:`WORDS`, ids without text, and an end token as the last id but one."""

    def __init__(self, size: int) -> None:
        texts: list[bytes | None] = [*(bytes([byte]) for byte in range(256)), *WORDS]
        self.end = size - 2
        self.setup = GrammarSetup(size, (*texts, *(None,) * (size - len(texts))), (self.end,))

    def row(self) -> np.ndarray:
        """A mask full of garbage, in the middle of other memory."""
        words = mask_words(self.setup.vocab_size)
        return np.full(words + 2, GARBAGE, dtype=np.int32)[1:-1]

    def allowed(self, matcher: Matcher, language: Language, text: bytes) -> set[int]:
        """The tokens of the mask."""
        row = self.row()
        if not matcher.fill_mask(row):
            return {token for token, own in enumerate(self.setup.tokens) if own} | {self.end}
        around = np.asarray(row.base)
        expect(bool(around[0] == around[-1] == GARBAGE), f"{_of(language, text)}: memory around the mask is written")
        found = set(np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist())
        beyond = [token for token in found if token >= self.setup.vocab_size]
        expect(not beyond, f"{_of(language, text)}: bits beyond the vocabulary are set: {beyond[:4]}")
        return found

    def reference(self, language: Language, text: bytes) -> set[int] | None:
        """The same by brute force; None where the language has no reference for prefixes."""
        if language.prefix is None:
            return None
        ends = {self.end} if language.complete(text) else set()
        return ends | {token for token, own in enumerate(self.setup.tokens) if own and language.prefix(text + own)}

    def shortest(self, tokens: list[int], draw: random.Random) -> int:
        """One that closes what is open, so that a long answer ends."""
        closing = [token for token in tokens if (self.setup.tokens[token] or b"") in (b'"', b"}", b"]", b"x", b">")]
        return draw.choice(closing or tokens)


def _same(
    allowed: set[int], reference: set[int] | None, language: Language, text: bytes, vocabulary: Vocabulary
) -> None:
    if reference is None:
        return
    for what, tokens in (("is allowed", allowed - reference), ("is not allowed", reference - allowed)):
        if tokens:
            token = min(tokens)
            shown = "the end" if token == vocabulary.end else f"token {token} ({vocabulary.setup.tokens[token]!r})"
            raise Mismatch(f"{_of(language, text)}: {shown} {what}, brute force says otherwise")


def _accepts(matcher: Matcher, text: bytes, vocabulary: Vocabulary, language: Language) -> bool:
    for place, byte in enumerate(text):
        in_mask = byte in vocabulary.allowed(matcher, language, text[:place])
        accepted = matcher.accept(byte)
        expect(accepted == in_mask, f"{_of(language, text[:place])}: mask and accept differ for {bytes([byte])!r}")
        if not in_mask:
            return False
    return vocabulary.end in vocabulary.allowed(matcher, language, text)


def _of(language: Language, text: bytes) -> str:
    return f"{language.grammar.kind} {language.grammar.text[:60]!r} after {text[-60:]!r}"


def grammar_checks(under_test: BackendUnderTest, fixture: DeviceFixture, quick: bool) -> list[Check]:
    """Each scenario for each kind that a capability set names."""
    return collect(under_test, fixture, lambda caps: _of_caps(caps, quick), lambda caps: ())


def _of_caps(caps: Caps, quick: bool) -> Iterator[GrammarCheck]:
    for name in caps.grammars:
        kind = cast("GrammarKind", name)
        for size in (300, 320):
            for seed in range(1 if quick else 4):
                label = f"{kind}/mask,v={size},{seed}"
                yield GrammarCheck(name=label, scenario="mask", kind=kind, vocab_size=size, seed=seed)
        scenarios: tuple[Scenario, ...] = ("samples", "refused", "many", "wrong", "threads")
        for scenario in scenarios:
            if scenario != "wrong" or WRONG[kind]:
                yield GrammarCheck(name=f"{kind}/{scenario}", scenario=scenario, kind=kind)
