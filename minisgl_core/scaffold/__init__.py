"""A new plugin distribution from templates: complete, right, slow, and its author's to replace."""

from .write import SCAFFOLDED_ROLES, Scaffold, write_distribution

__all__ = ["SCAFFOLDED_ROLES", "Scaffold", "write_distribution"]
