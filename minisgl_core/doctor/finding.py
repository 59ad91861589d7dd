"""One result of the examination."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["Check", "Finding", "Level"]

Level = Literal["wrong", "note"]
"""``wrong``: something does not work, or will not; ``note``: worth knowing."""
Check = Literal[
    "metadata", "plugin", "import", "requirement", "claims", "clash", "abi", "factory", "probe", "plan", "memory"
]


@dataclass(frozen=True, slots=True)
class Finding:
    """``about``: the distribution, backend or rank it is about; ``remedy``: what to do."""

    level: Level
    check: Check
    about: str
    text: str
    remedy: str

    def to_json(self) -> dict[str, str]:
        """As plain JSON data."""
        return {
            "level": self.level,
            "check": self.check,
            "about": self.about,
            "text": self.text,
            "remedy": self.remedy,
        }

    def __str__(self) -> str:
        return f"{self.about}: {self.text}; {self.remedy}"
