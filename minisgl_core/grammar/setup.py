"""The grammar backend of a plan, built for one model's vocabulary."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, cast

from minisgl_core.plan import Choice
from minisgl_core.plugin_api import GrammarSetup
from minisgl_core.registry import build
from minisgl_core.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from collections.abc import Mapping

    from minisgl_core.plugin_api import GrammarBackend

__all__ = ["GrammarFacts", "build_grammar_backend"]


class GrammarFacts(NamedTuple):
    """All that a grammar backend is built from, in whatever process."""

    choice: Choice
    model_path: str
    vocab_size: int
    """That of the logits"""
    end_ids: tuple[int, ...]
    """Ascending"""

    def to_json(self) -> dict[str, Any]:
        """As plain JSON data."""
        return {**self._asdict(), "choice": self.choice.to_json()}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> GrammarFacts:
        """The inverse of :meth:`to_json`."""
        return cls(**{**data, "choice": Choice.from_json(data["choice"]), "end_ids": tuple(data["end_ids"])})


def build_grammar_backend(facts: GrammarFacts) -> GrammarBackend:
    """Read the tokenizer and construct the backend. A model without a tokenizer has tokens without text."""
    tokenizer = load_tokenizer(facts.model_path)
    tokens = (None,) * facts.vocab_size if tokenizer is None else tokenizer.token_bytes(facts.vocab_size)
    ends = frozenset(facts.end_ids)
    written = tuple(None if token in ends else text for token, text in enumerate(tokens))
    return cast("GrammarBackend", build(facts.choice, GrammarSetup(facts.vocab_size, written, facts.end_ids)))
