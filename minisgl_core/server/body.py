"""What all bodies of requests have in common."""

from __future__ import annotations

from typing import Annotated, Any, Final

from pydantic import AfterValidator, BaseModel, ConfigDict

__all__ = ["Body", "Stops", "TemplateVariables"]

MAX_STOPS: Final = 64
"""Texts that end an answer: each of them is looked for with every token"""
_ARGUMENTS: Final = frozenset(("self", "messages", "params", "priority"))
"""Names that no variable of a template can have: they are arguments of the calls that render it."""


def _check_variables(given: dict[str, Any]) -> dict[str, Any]:
    """A template is a program, which may run for ever: only the model's own are run."""
    for name in _ARGUMENTS & given.keys():
        raise ValueError(f"`chat_template_kwargs` has `{name}`, which is no variable of a template")
    if "{" in str(given.get("chat_template", "")):
        raise ValueError("`chat_template` is a template's text; only the model's own templates are run, name one")
    return given


def _check_stops(given: str | list[str]) -> str | list[str]:
    if not isinstance(given, str) and len(given) > MAX_STOPS:
        raise ValueError(f"`stop` has {len(given)} texts; give at most {MAX_STOPS}")
    return given


TemplateVariables = Annotated[dict[str, Any], AfterValidator(_check_variables)]
Stops = Annotated[str | list[str], AfterValidator(_check_stops)]


class Body(BaseModel):
    """Strict: a number in quotation marks is no number."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, protected_namespaces=())
