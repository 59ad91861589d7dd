"""Constrained answers: grammars compiled out of harm's way, and the state of each answer that follows one."""

from .answer import AnswerGrammar

__all__ = ["AnswerGrammar"]
