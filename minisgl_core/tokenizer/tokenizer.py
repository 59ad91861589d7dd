"""Text to token ids and back."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, Final

import numpy as np
import tokenizers
from tokenizers import decoders, models

from ..errors import AdmissionError
from .chat import ChatTemplate
from .decoding import ByteLevelDecoder, IncrementalDecoder, PieceTable, ShowingDecoder, TokenKind, WindowDecoder
from .messages import Message

__all__ = ["Tokenizer"]

_BYTE_TOKENS: Final = {f"<0x{byte:02X}>" for byte in range(256)}


class Tokenizer:
    """A model's tokenizer with its special tokens and chat template.

    ``backend`` does the work. ``special_tokens``: role -> text, such as ``bos_token`` -> ``<s>``. Thread-safe.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special_tokens: Mapping[str, str] | None = None,
        chat_template: str | Mapping[str, str] | None = None,
        eos_token_ids: Sequence[int] | None = None,
        refusal: str | None = None,
    ) -> None:
        self._backend = backend
        self.refusal = refusal
        """Why texts cannot be encoded; prompts are then token ids, and answers have no text. None: they can."""
        self.special_tokens = dict(special_tokens or {})
        self.chat_template = None if not chat_template else ChatTemplate(chat_template, self.special_tokens)
        own = self.token_id(self.special_tokens.get("eos_token"))
        self.eos_token_ids: tuple[int, ...] = tuple(eos_token_ids or (() if own is None else (own,)))
        self.bos_token_id = self.token_id(self.special_tokens.get("bos_token"))
        added = backend.get_added_tokens_decoder()
        self.vocab_size: int = max(backend.get_vocab_size(), max(added, default=-1) + 1)
        """One more than the largest id; a model's own vocabulary may be padded to more."""
        self._special_ids = frozenset(
            # a token that was special once stays silent in the library, whatever its flag says now
            token
            for token, facts in added.items()
            if facts.special or not backend.decode([token, token])
        )

    @classmethod
    def without_text(cls, refusal: str) -> Tokenizer:
        """For a model that serves token ids only; ``refusal`` says why."""
        return cls(tokenizers.Tokenizer(models.WordLevel({}, unk_token="")), refusal=refusal)

    def token_id(self, token: str | None) -> int | None:
        """The id of one token's text; None if there is no such token."""
        return None if token is None else self._backend.token_to_id(token)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a prompt, with the special tokens that the model expects around it (such as one BOS).

        Raises :class:`~minisgl_core.errors.AdmissionError` for text that is no valid Unicode, and for any text if the
        model's kind of tokenizer cannot be built.
        """
        if self.refusal is not None:
            raise AdmissionError(
                f"a text cannot be encoded: {self.refusal}", field="prompt", value=text[:40], remedy="give token ids"
            )
        try:
            ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        except TypeError as error:
            raise AdmissionError(
                f"the prompt {text!r:.80} is not valid Unicode text", field="prompt", value=text, remedy="give a string"
            ) from error
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids; special tokens and ids that the tokenizer does not know write nothing."""
        return str(self._backend.decode([token for token in ids if 0 <= token < self.vocab_size]))

    def special_text(self, token: int) -> str | None:
        """The text of a special token, which answers leave out; None for any other token."""
        if token not in self._special_ids:
            return None
        text: str | None = self._backend.id_to_token(token)
        return text

    def token_text(self, token: int) -> str:
        """One token by itself: a special token's name, a word with its space, U+FFFD for part of a character."""
        if self._written(token) is None:
            return str(self._backend.id_to_token(token) or "") if 0 <= token < self.vocab_size else ""
        if self._pieces is not None:
            piece = self._pieces.piece(token)
            return piece if isinstance(piece, str) else piece.decode(errors="replace")
        if self._kind_of(token) == "byte":
            return self.decode([token])
        return str(self._backend.id_to_token(token)).replace("\u2581", " ")

    def token_bytes(self, vocab_size: int) -> tuple[bytes | None, ...]:
        """(vocab_size,) What each id writes in the middle of a text; None for special tokens and unknown ids."""
        return tuple(map(self._bytes_of, range(vocab_size)))

    def _bytes_of(self, token: int) -> bytes | None:
        spelling = self._written(token)
        if spelling is None:
            return None
        if self._pieces is not None:
            piece = self._pieces.piece(token)
            return (piece.encode() if isinstance(piece, str) else piece) or None
        if spelling in _BYTE_TOKENS:
            return bytes([int(spelling[3:5], 16)])
        return spelling.replace("\u2581", " ").encode() or None

    def special_ids(self, texts: Iterable[str]) -> frozenset[int]:
        """The ids of those of ``texts`` that are special tokens."""
        return self._special_ids.intersection(map(self.token_id, texts))

    def new_decoder(self, prompt: Sequence[int] | np.ndarray = (), shown: Collection[int] = ()) -> IncrementalDecoder:
        """A decoder for one sequence that arrives token by token and continues the text of ``prompt``.

        Its first word keeps the space that separates it from the prompt, which tokenizers that begin each text with a
        space (SentencePiece) drop from the answer's ids alone. ``shown``: special tokens whose names are written.
        """
        if shown:
            return ShowingDecoder(self.new_decoder(prompt), {token: self.token_text(token) for token in shown})
        if self._pieces is not None:
            return ByteLevelDecoder(self._pieces)
        return WindowDecoder(self.decode, self._kind_of, prompt)

    def render_chat(self, messages: Iterable[Message], **options: Any) -> str:
        """The prompt that the chat template makes of messages; see :meth:`ChatTemplate.render`."""
        template = self.chat_template
        if template is None and options.get("chat_template") is not None:
            template = ChatTemplate({}, self.special_tokens)
        if template is None:
            raise AdmissionError(
                "this model has no chat template",
                field="messages",
                remedy="give a prompt instead of messages, or a `chat_template`",
            )
        return template.render(messages, **options)

    def apply_chat_template(self, messages: Iterable[Message], **options: Any) -> list[int]:
        """Token ids of a chat. The template writes all special tokens itself, so none is added and BOS occurs once."""
        return self.encode(self.render_chat(messages, **options), add_special_tokens=False)

    @cached_property
    def _pieces(self) -> PieceTable | None:
        if not isinstance(self._backend.decoder, decoders.ByteLevel):
            return None
        return PieceTable(self._written)

    def _written(self, token: int) -> str | None:
        """The vocabulary's spelling of a token that writes something."""
        if token in self._special_ids or not 0 <= token < self.vocab_size:
            return None
        spelling: str | None = self._backend.id_to_token(token)
        return spelling

    def _kind_of(self, token: int) -> TokenKind:
        spelling = self._written(token)
        if spelling is None:
            return "silent"
        return "byte" if spelling in _BYTE_TOKENS else "text"
