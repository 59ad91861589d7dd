"""What pip has installed here, read without importing any of it."""

from .distributions import Found, Note, scan
from .environment import Environment, Installed, installed_version
from .lists import check_lists, exclusion, exclusion_lines
from .requires import check_requires

__all__ = [
    "Environment",
    "Found",
    "Installed",
    "Note",
    "check_lists",
    "check_requires",
    "exclusion",
    "exclusion_lines",
    "installed_version",
    "scan",
]
