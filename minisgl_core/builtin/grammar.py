"""The grammar backend of an installation without a grammar library."""

from __future__ import annotations

from typing import TYPE_CHECKING, Never

from minisgl_core.plugin_api import GrammarError

if TYPE_CHECKING:
    from minisgl_core.plugin_api import Grammar, GrammarSetup

__all__ = ["NoGrammar"]


class NoGrammar:
    """Refuses every grammar."""

    def __init__(self, setup: GrammarSetup, options: object) -> None:
        """Needs neither."""

    def compile(self, grammar: Grammar) -> Never:
        raise GrammarError("no grammar backend is installed; pip install 'minisgl-grammar[llguidance]'")

    def close(self) -> None:
        """Nothing is held."""
