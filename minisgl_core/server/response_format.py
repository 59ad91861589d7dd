"""The form of an answer, as requests give it: ``response_format`` as OpenAI has it, ``structured_outputs`` as vLLM."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from .body import Body

__all__ = ["ResponseFormat", "StructuredOutputs", "grammar_of"]


class NamedSchema(Body):
    """``response_format.json_schema``. Every schema is kept to, with ``strict`` or without."""

    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | bool = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    """``response_format``"""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: NamedSchema | None = None
    structures: list[dict[str, Any]] | None = None
    triggers: list[str] | None = None

    @model_validator(mode="after")
    def _fields_are_those_of_the_type(self) -> Self:
        needed = {"json_schema": ("json_schema",), "structural_tag": ("structures", "triggers")}.get(self.type, ())
        for name in ("json_schema", "structures", "triggers"):
            if (getattr(self, name) is not None) != (name in needed):
                what = "is missing" if name in needed else "is given"
                raise ValueError(f"`{name}` {what} for the type {self.type!r}")
        return self

    def grammar(self) -> dict[str, Any] | None:
        """As ``SamplingParams.grammar`` takes it."""
        if self.type == "text":
            return None
        if self.json_schema is not None:
            return {"json_schema": self.json_schema.schema_}
        if self.type == "json_object":
            return {"json_object": True}
        return {"structural_tag": {"structures": self.structures, "triggers": self.triggers}}


class StructuredOutputs(Body):
    """``structured_outputs``: exactly one of its fields"""

    json_: dict[str, Any] | str | None = Field(default=None, alias="json")
    json_object: Literal[True] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    """GBNF"""
    structural_tag: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _one_of_them(self) -> Self:
        if len(self._given()) != 1:
            raise ValueError("give exactly one of json, json_object, regex, choice, grammar, structural_tag")
        return self

    def _given(self) -> dict[str, Any]:
        fields = {
            "json_schema": self.json_,
            "json_object": self.json_object,
            "regex": self.regex,
            "choice": self.choice,
            "ebnf": self.grammar,
            "structural_tag": self.structural_tag,
        }
        return {kind: value for kind, value in fields.items() if value is not None}

    def as_grammar(self) -> dict[str, Any]:
        """As ``SamplingParams.grammar`` takes it."""
        given = self._given()
        if "structural_tag" in given:  # with the type that `response_format` has
            given["structural_tag"] = {name: v for name, v in given["structural_tag"].items() if name != "type"}
        return given


def grammar_of(form: ResponseFormat | None, structured: StructuredOutputs | None) -> dict[str, Any] | None:
    """The grammar that either of them gives. Raises ``ValueError`` where both do."""
    grammar = None if form is None else form.grammar()
    if structured is None:
        return grammar
    if grammar is not None:
        raise ValueError("`response_format` and `structured_outputs` are both given; leave one of them out")
    return structured.as_grammar()
