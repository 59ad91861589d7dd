"""Chat templates: Jinja text from the model folder, rendered in a sandbox as transformers renders it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ..errors import AdmissionError

__all__ = ["ChatTemplate", "Message"]

Message = Mapping[str, Any]
"""``role``, ``content`` (a string, or a list of ``{"type": "text", "text": ...}``) and what else the template reads."""


class _Generation(Extension):
    """``{% generation %}`` blocks mark the assistant's words for training; here they are only text."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it a set of the instance

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """One model's template, or several by name (``default``, ``tool_use``)."""

    def __init__(self, templates: str | Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        self._sources = {"default": templates} if isinstance(templates, str) else dict(templates)
        self._special_tokens = dict(special_tokens)

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """The prompt's text. ``variables`` are handed to the template, such as ``enable_thinking=False``.

        Raises :class:`~minisgl_core.errors.AdmissionError` with the template's own message if it refuses.
        """
        template, clean = self._pick(tools), _normalised(messages)
        try:
            return template.render(
                messages=clean,
                tools=list(tools) if tools else None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **{**self._special_tokens, **variables},
            )
        except Exception as error:  # a template is a program of the model's makers: whatever it raises is its refusal
            raise _refusal(f"the model's chat template refuses these messages: {error}", messages) from error

    def _pick(self, tools: object) -> jinja2.Template:
        name = "tool_use" if tools and "tool_use" in self._compiled else "default"
        if name not in self._compiled:
            raise AdmissionError(
                f"the model has the chat templates {', '.join(self._sources)} and none is the default",
                field="messages",
                remedy="give a prompt instead of messages",
            )
        return self._compiled[name]

    @cached_property
    def _compiled(self) -> dict[str, jinja2.Template]:
        try:
            return {name: _environment().from_string(source) for name, source in self._sources.items()}
        except jinja2.TemplateSyntaxError as error:
            raise AdmissionError(
                f"the model's chat template is broken at line {error.lineno}: {error.message}",
                field="messages",
                remedy="give a prompt instead of messages, or mend the template",
            ) from error


def _environment() -> ImmutableSandboxedEnvironment:
    """The filters and globals that published templates count on."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)


def _normalised(messages: Sequence[Any]) -> list[dict[str, Any]]:
    """Plain dicts, without null values, lists of text parts joined to one string."""
    if not messages:
        raise _refusal("there are no messages", messages)
    clean = []
    for message in messages:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise _refusal(f"message {message!r} has no role", message)
        plain = {key: value for key, value in message.items() if value is not None}
        if isinstance(plain.get("content"), Sequence) and not isinstance(plain["content"], str):
            plain["content"] = "".join(map(_part_text, plain["content"]))
        clean.append(plain)
    return clean


def _part_text(part: Any) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    raise _refusal(f"message content holds {part!r}", part, "only parts of type text are supported")


def _refusal(problem: str, value: object, remedy: str = "change the messages") -> AdmissionError:
    return AdmissionError(problem, field="messages", value=value, remedy=remedy)
