"""Writes a new plugin distribution from templates: complete, correct, slow, and meant to be edited."""

from .write import SCAFFOLDED_ROLES, Scaffold, write_distribution

__all__ = ["SCAFFOLDED_ROLES", "Scaffold", "write_distribution"]
