"""What all bodies of requests have in common."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

__all__ = ["Body"]


class Body(BaseModel):
    """Strict: a number in quotation marks is no number."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, protected_namespaces=())
