"""The backends of minisgl-grammar, as plain records; neither library is imported here."""

from __future__ import annotations

from minisgl_core.plugin_api import GRAMMAR_KINDS, BackendSpec, Caps, PluginInfo, hookimpl

__all__ = ["MINISGL_PLUGIN", "minisgl_grammars"]

MINISGL_PLUGIN = PluginInfo(name="grammar", api={"grammar": ">=1,<2"})

_ALL = (Caps(grammars=GRAMMAR_KINDS),)
_OPTIONS = "minisgl_grammar.options:GrammarOptions"


@hookimpl
def minisgl_grammars() -> list[BackendSpec]:
    """llguidance is preferred: it refuses every keyword of a schema that it does not honour, and compiles faster."""
    return [
        BackendSpec(
            role="grammar",
            name="llguidance",
            factory="minisgl_grammar.by_llguidance:LLGuidanceGrammars",
            requires=("llguidance>=1.9",),
            caps=_ALL,
            options=_OPTIONS,
            tier=10,
            summary="masks by llguidance",
        ),
        BackendSpec(
            role="grammar",
            name="xgrammar",
            factory="minisgl_grammar.by_xgrammar:XGrammarGrammars",
            requires=("xgrammar>=0.2.9",),
            caps=_ALL,
            options=_OPTIONS,
            tier=20,
            summary="masks by XGrammar",
        ),
    ]
