"""Constrained answers: grammars compiled out of harm's way, and the state of each answer that follows one."""

from .answer import AnswerGrammar
from .compiled import Grammars
from .setup import GrammarFacts
from .vetting import GrammarVetter

__all__ = ["AnswerGrammar", "GrammarFacts", "GrammarVetter", "Grammars"]
