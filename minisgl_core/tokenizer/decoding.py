"""Incremental detokenization, in constant time per token.

What a decoder returns, concatenated and completed by ``flush()``, continues the text of the prompt: both together equal
``Tokenizer.decode`` of all ids. If the prompt ends within a character, only the answer's own bytes of it count. Text
that may still change is held back: an incomplete character is never emitted as U+FFFD unless the ids end there.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Mapping, Sequence
from typing import Final, Literal, Protocol

import numpy as np

__all__ = ["ByteLevelDecoder", "IncrementalDecoder", "PieceTable", "ShowingDecoder", "TokenKind", "WindowDecoder"]

TokenKind = Literal["text", "byte", "silent"]
"""Silent tokens produce no text: special tokens, and ids that the tokenizer does not know."""

_REPLACEMENT: Final = "\ufffd"
_MAX_HELD: Final = 16
"""Most tokens that a WindowDecoder holds back. A character has at most 4 bytes, so more tokens cannot
be one character.
"""
_MIN_KEPT: Final = 4
"""Number of invalid bytes that are kept: a character may have begun among the last ones."""


class IncrementalDecoder(Protocol):
    """Decodes the tokens of one sequence."""

    def push(self, token: int) -> str:
        """The text that is certain after this token. Special tokens and unknown ids produce none."""
        ...

    def flush(self) -> str:
        """The text still held back, at the end of the sequence; an incomplete character becomes U+FFFD."""
        ...


def _byte_of_char() -> dict[str, int]:
    """The alphabet of byte-level BPE: printable Latin-1 characters map to themselves, the others to characters above
    255.
    """
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


class PieceTable:
    """The text or bytes of each token of a byte-level tokenizer, filled on demand and shared by all sequences."""

    def __init__(self, spelling_of: Callable[[int], str | None]) -> None:
        """``spelling_of``: a token in the byte-level alphabet, None if it produces no text."""
        self._spelling_of = spelling_of
        self._byte_of_char = _byte_of_char()
        self._pieces: dict[int, str | bytes] = {}

    def piece(self, token: int) -> str | bytes:
        """Text if the token consists of whole characters, otherwise its bytes."""
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
            return text  # an added token outside the alphabet is literal text
        try:
            return data.decode()
        except UnicodeDecodeError:
            return data


class ByteLevelDecoder:
    """For byte-level BPE: a token is a sequence of bytes, independent of the tokens before it."""

    __slots__ = ("_held", "_piece")

    def __init__(self, table: PieceTable) -> None:
        self._piece = table.piece
        self._held = b""

    def push(self, token: int) -> str:
        piece = self._piece(token)
        if isinstance(piece, str):
            if not self._held:
                return piece
            # Bytes are held back: whole characters after them decide whether those are invalid.
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
    """For any other tokenizer: decodes the tokens since the last certain position again, with the preceding ones as
    context.

    Byte tokens of SentencePiece are held until their run ends, because one wrong byte invalidates the whole run. A run
    of more than ``_MAX_HELD`` tokens is emitted character by character.
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
        """Tokens whose text has been emitted. Without them a leading space would be dropped as at the beginning of a
        text.
        """
        self._held: list[int] = []

    def _end_of(self, prompt: Sequence[int] | np.ndarray) -> list[int]:
        """The position after the prompt's last token that is text.

        Byte tokens behind it are left out: an incomplete character of the prompt must not be joined with the answer's
        bytes. A prompt of only bytes counts if its characters are complete.
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
        # Byte tokens wait for the end of their run; a trailing U+FFFD is a character that may still be completed.
        if kind == "byte" or self._text_after(self._context, self._held).endswith(_REPLACEMENT):
            return self._split() if len(self._held) > _MAX_HELD else ""
        return self._release(len(self._held))

    def flush(self) -> str:
        return self._release(len(self._held))

    def _release(self, count: int) -> str:
        """Emit the first ``count`` held tokens, which become the context."""
        out, self._held = self._held[:count], self._held[count:]
        text = self._text_after(self._context, out)
        # Tokens without text cannot serve as context alone: keep the ones before them.
        self._context = out if text else self._context + out
        return text

    def _split(self) -> str:
        """More tokens are held than one character has: emit their complete characters, or else the invalid bytes."""
        for count in range(len(self._held) - 1, 0, -1):
            if _REPLACEMENT not in self._text_after(self._context, self._held[:count]):
                return self._release(count)
        return self._release(len(self._held) - _MIN_KEPT)

    def _text_after(self, context: list[int], tokens: list[int]) -> str:
        return self._decode(context + tokens)[len(self._decode(context)) :]


class ShowingDecoder:
    """Writes the names of some special tokens, which another decoder leaves out."""

    __slots__ = ("_decoder", "_names")

    def __init__(self, decoder: IncrementalDecoder, names: Mapping[int, str]) -> None:
        self._decoder, self._names = decoder, names

    def push(self, token: int) -> str:
        name = self._names.get(token)
        return self._decoder.push(token) if name is None else self._decoder.flush() + name

    def flush(self) -> str:
        return self._decoder.flush()
