"""Token ids to text, one token at a time, in constant time per token.

What a decoder has returned, joined and ended with ``flush()``, continues the text of the prompt: the two together equal
``Tokenizer.decode`` of all ids. Of a character that the prompt began only the answer's own bytes count. Text that may
still change is held back: half a character never leaves as U+FFFD, unless the ids end there.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from typing import Final, Literal, Protocol

import numpy as np

__all__ = ["ByteLevelDecoder", "IncrementalDecoder", "PieceTable", "TokenKind", "WindowDecoder"]

TokenKind = Literal["text", "byte", "silent"]
"""Silent tokens write nothing: special ones, and ids the tokenizer does not know."""

_REPLACEMENT: Final = "\ufffd"
_MAX_HELD: Final = 16
"""Tokens a WindowDecoder holds at most: no character has more bytes than 4, so more is not text in the making."""
_MIN_KEPT: Final = 4
"""Of broken bytes these stay: a character may have begun among the last."""


class IncrementalDecoder(Protocol):
    """Decodes one sequence."""

    def push(self, token: int) -> str:
        """The text that this token makes certain; ids the tokenizer does not know and special tokens give none."""
        ...

    def flush(self) -> str:
        """What is still held, when no more tokens come; a cut character becomes U+FFFD."""
        ...


def _byte_of_char() -> dict[str, int]:
    """The alphabet of byte-level BPE: printable Latin-1 characters mean themselves, the others are moved above 255."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


class PieceTable:
    """What each token of a byte-level tokenizer writes; filled as tokens are met, shared by all its sequences."""

    def __init__(self, spelling_of: Callable[[int], str | None]) -> None:
        """``spelling_of``: a token in the byte-level alphabet, None if it writes nothing."""
        self._spelling_of = spelling_of
        self._byte_of_char = _byte_of_char()
        self._pieces: dict[int, str | bytes] = {}

    def piece(self, token: int) -> str | bytes:
        """Text if the token is whole characters, else its bytes."""
        piece = self._pieces.get(token)
        if piece is None:
            piece = self._pieces[token] = self._make(token)
        return piece

    def _make(self, token: int) -> str | bytes:
        text = self._spelling_of(token)
        if text is None:
            return ""
        try:
            data = bytes(self._byte_of_char[char] for char in text)
        except KeyError:
            return text  # an added token outside the alphabet means itself
        try:
            return data.decode()
        except UnicodeDecodeError:
            return data


class ByteLevelDecoder:
    """For byte-level BPE: a token is bytes, whatever stands before it."""

    __slots__ = ("_held", "_piece")

    def __init__(self, table: PieceTable) -> None:
        self._piece = table.piece
        self._held = b""

    def push(self, token: int) -> str:
        piece = self._piece(token)
        if isinstance(piece, str):
            if not self._held:
                return piece
            piece = piece.encode()
        data = self._held + piece
        text, used = codecs.utf_8_decode(data, "replace", False)
        self._held = data[used:]
        return text

    def flush(self) -> str:
        text = self._held.decode(errors="replace")
        self._held = b""
        return text


class WindowDecoder:
    """For any other tokenizer: decodes the tokens since the last certain place again, with the ones before as context.

    Byte tokens of SentencePiece are held until their run ends, because one wrong byte spoils the whole run; a run of
    more than ``_MAX_HELD`` leaves character by character.
    """

    __slots__ = ("_context", "_decode", "_held", "_kind_of")

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        kind_of: Callable[[int], TokenKind],
        prompt: Sequence[int] | np.ndarray = (),
    ) -> None:
        self._decode = decode
        self._kind_of = kind_of
        self._context = self._end_of(prompt)
        """Tokens whose text has left; without them a leading space would be taken for the beginning of the text."""
        self._held: list[int] = []

    def _end_of(self, prompt: Sequence[int] | np.ndarray) -> list[int]:
        """The prompt's last token that is text. Byte tokens behind it are left out: half a character of the prompt must
        not join the answer's bytes. A prompt of bytes alone counts if its characters are whole.
        """
        written: list[int] = []
        for token in map(int, reversed(prompt)):
            kind = self._kind_of(token)
            if kind == "text":
                return [token]
            if kind == "byte":
                written.append(token)
        written.reverse()
        return [] if _REPLACEMENT in self._decode(written) else written

    def push(self, token: int) -> str:
        kind = self._kind_of(token)
        if kind == "silent":
            return ""
        self._held.append(token)
        if kind == "byte" or self._text_after(self._context, self._held).endswith(_REPLACEMENT):
            return self._split() if len(self._held) > _MAX_HELD else ""
        return self._release(len(self._held))

    def flush(self) -> str:
        return self._release(len(self._held))

    def _release(self, count: int) -> str:
        """Emit the first ``count`` held tokens; they become the context."""
        out, self._held = self._held[:count], self._held[count:]
        text = self._text_after(self._context, out)
        self._context = out if text else self._context + out
        return text

    def _split(self) -> str:
        """Too many tokens are held to be one character: emit the whole characters among them, or else the rubbish."""
        for count in range(len(self._held) - 1, 0, -1):
            if _REPLACEMENT not in self._text_after(self._context, self._held[:count]):
                return self._release(count)
        return self._release(len(self._held) - _MIN_KEPT)

    def _text_after(self, context: list[int], tokens: list[int]) -> str:
        return self._decode(context + tokens)[len(self._decode(context)) :]
