"""The body of ``POST /v1/responses``, and the chat that it means.

Source: OpenAI's API reference (responses). Nothing is stored, so every request holds its whole conversation.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

from pydantic import model_validator

from .body import Body, TemplateVariables
from .schema import ChatBody, GenerationBody
from .tools import FunctionName, NamedTool, Tool, check_tools

__all__ = ["ResponsesBody"]

_TEXT_PARTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")


class FunctionTool(Body):
    """``tools[]``: a function"""

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolName(Body):
    """``tool_choice``: the function to call"""

    type: Literal["function"]
    name: str


class ReasoningOptions(Body):
    """``reasoning``"""

    effort: str | None = None
    summary: None = None


class TextOptions(Body):
    """``text``"""

    format: dict[str, Any] | None = None


class ResponsesBody(GenerationBody):
    """``POST /v1/responses``"""

    input: str | list[dict[str, Any]]
    instructions: str | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolName | None = None
    parallel_tool_calls: bool | None = None
    max_output_tokens: int | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    metadata: dict[str, str] | None = None
    """Returned as it is."""
    chat_template_kwargs: TemplateVariables | None = None

    @model_validator(mode="after")
    def _check(self) -> ResponsesBody:
        if self.n not in (None, 1):
            raise ValueError("`n` can only be 1 here: a response is one answer")
        if self.max_tokens is not None:
            raise ValueError("`max_tokens` is `max_output_tokens` here")
        check_tools(self.chat_tools(), self.chat_choice())
        return self

    @property
    def effort(self) -> str | None:
        """``reasoning.effort``"""
        return None if self.reasoning is None else self.reasoning.effort

    @property
    def text_format(self) -> dict[str, Any]:
        """``text.format``"""
        return (self.text and self.text.format) or {"type": "text"}

    @property
    def tool_choice_data(self) -> Any:
        """As the response shows it."""
        return self.tool_choice.model_dump() if isinstance(self.tool_choice, ToolName) else self.tool_choice or "auto"

    def chat(self) -> ChatBody:
        """The same request as a chat. Raises ValueError for an item that is not supported, by name."""
        own = {name: getattr(self, name) for name in GenerationBody.model_fields if name not in ("stream_options", "n")}
        kwargs = dict(self.chat_template_kwargs or {})
        if self.effort == "none":
            kwargs["enable_thinking"] = False
        elif self.effort is not None:
            kwargs["reasoning_effort"] = self.effort
        return ChatBody.model_validate(
            {
                **{name: value for name, value in own.items() if value is not None},
                "messages": list(self._messages()),
                "max_tokens": self.max_output_tokens,
                "tools": [tool.model_dump() for tool in self.chat_tools()] or None,
                "tool_choice": choice.model_dump() if isinstance(choice := self.chat_choice(), Body) else choice,
                "parallel_tool_calls": self.parallel_tool_calls,
                "response_format": self._response_format(),
                "chat_template_kwargs": kwargs or None,
            }
        )

    def chat_tools(self) -> list[Tool]:
        """The tools in the form of chats."""
        return [
            Tool.model_validate({"type": "function", "function": tool.model_dump(exclude={"type"})})
            for tool in self.tools or ()
        ]

    def chat_choice(self) -> Literal["none", "auto", "required"] | NamedTool | None:
        """The choice in the form of chats."""
        if isinstance(self.tool_choice, ToolName):
            return NamedTool(type="function", function=FunctionName(name=self.tool_choice.name))
        return self.tool_choice

    def _response_format(self) -> dict[str, Any] | None:
        """A JSON schema has its keys next to its type here, and below it in chats."""
        given = self.text_format
        if given.get("type") == "json_schema":
            schema = {name: value for name, value in given.items() if name != "type"}
            return {"type": "json_schema", "json_schema": schema}
        return None if given == {"type": "text"} else given

    def _messages(self) -> Iterator[dict[str, Any]]:
        """The conversation. Items of one turn of the model become one message."""
        if self.instructions is not None:
            yield {"role": "system", "content": self.instructions}
        if isinstance(self.input, str):
            yield {"role": "user", "content": self.input}
            return
        turn: dict[str, Any] | None = None
        for place, item in enumerate(self.input):
            of_model = item.get("type") in ("function_call", "reasoning") or item.get("role") == "assistant"
            if turn is not None and (not of_model or (item.get("role") == "assistant" and turn["content"] is not None)):
                yield turn
                turn = None
            if of_model:
                turn = turn or {"role": "assistant", "content": None}
                _add_to_turn(turn, item, place)
            else:
                yield _message(item, place)
        if turn is not None:
            yield turn


def _add_to_turn(turn: dict[str, Any], item: Mapping[str, Any], place: int) -> None:
    match item.get("type"):
        case "function_call":
            function = {"name": _field(item, "name", place), "arguments": _field(item, "arguments", place)}
            call = {"id": _field(item, "call_id", place), "type": "function", "function": function}
            turn.setdefault("tool_calls", []).append(call)
        case "reasoning":
            turn["reasoning_content"] = _text(item.get("content") or item.get("summary") or [], place)
        case _:
            turn["content"] = _text(item.get("content"), place)


def _message(item: Mapping[str, Any], place: int) -> dict[str, Any]:
    kind = item.get("type", "message")
    if kind == "function_call_output":
        return {
            "role": "tool",
            "tool_call_id": _field(item, "call_id", place),
            "content": _text(item.get("output"), place),
        }
    if kind != "message":
        raise ValueError(f"`input[{place}]` is an item of type {kind!r}, which is not supported")
    role = _field(item, "role", place)
    return {"role": "system" if role == "developer" else role, "content": _text(item.get("content"), place)}


def _field(item: Mapping[str, Any], name: str, place: int) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise ValueError(f"`input[{place}].{name}` is {value!r:.60}; give a text")
    return value


def _text(given: Any, place: int) -> str:
    if isinstance(given, str):
        return given
    if not isinstance(given, list):
        raise ValueError(f"`input[{place}]` holds {given!r:.60}; give a text, or a list of parts")
    for part in given:
        if not isinstance(part, dict) or part.get("type") not in _TEXT_PARTS or not isinstance(part.get("text"), str):
            raise ValueError(f"`input[{place}]` holds {part!r:.60}; only parts of text are supported")
    return "".join(part["text"] for part in given)
