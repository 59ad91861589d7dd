"""Constrained answers for minisgl, by llguidance or XGrammar."""
