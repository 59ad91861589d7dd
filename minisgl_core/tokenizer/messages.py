"""The messages of a chat, as chat templates read them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, Self, cast

from ..errors import AdmissionError

__all__ = ["FinalMessage", "Message", "normalised", "refusal"]

Message = Mapping[str, Any]
"""``role``, ``content`` (a string, or a list of ``{"type": "text", "text": ...}``) and what else the template reads."""

_REASONING: Final = ("reasoning_content", "thinking", "reasoning")
"""Names of one field; templates read the first, gpt-oss's the second."""
_MARK: Final = "END_OF_THE_CONTINUED_MESSAGE "
"""Written after the text to continue. Whether its space survives shows whether the template trims."""


def normalised(messages: Iterable[Any], *, keep_null_content: bool) -> list[dict[str, Any]]:
    """Plain dicts. Lists of text parts are joined to one string.

    A field that is null, and an empty ``tool_calls``, are left out: templates ask ``'tool_calls' in message``, or would
    write the word None. A null ``content`` stays for templates that compare it with none (``keep_null_content``).
    """
    if not isinstance(cast("object", messages), Iterable) or isinstance(messages, str | bytes | Mapping):
        raise refusal(
            f"the messages are {messages!r:.60}", messages, 'give a list: [{"role": "user", "content": "..."}]'
        )
    plain = [_normalised(message, keep_null_content) for message in messages]
    if not plain:
        raise refusal("there are no messages", messages)
    return plain


def _normalised(message: Any, keep_null_content: bool) -> dict[str, Any]:
    fields = _fields(message)
    if not isinstance(fields, Mapping) or not isinstance(fields.get("role"), str):
        raise refusal(f"message {message!r:.80} has no role", message)
    plain = {key: value for key, value in fields.items() if value is not None}
    if keep_null_content and "content" in fields:
        plain["content"] = fields["content"]
    if not plain.get("tool_calls", True):
        del plain["tool_calls"]
    if isinstance(plain.get("content"), Sequence) and not isinstance(plain["content"], str):
        plain["content"] = "".join(map(_part_text, plain["content"]))
    elif not isinstance(plain.get("content", ""), str | None):
        raise refusal(f"message content is {plain['content']!r:.80}", message, "give a text or a list of parts")
    if isinstance(plain.get("tool_calls"), Sequence):
        plain["tool_calls"] = [_with_arguments(call) for call in plain["tool_calls"]]
    reasoning = next((plain[name] for name in _REASONING if name in plain), None)
    return plain if reasoning is None else {"thinking": reasoning, **plain, "reasoning_content": reasoning}


class Arguments(dict[str, Any]):
    """The arguments of a tool call, for all templates: some write the object as JSON or read its items, others
    concatenate the text that clients send.
    """

    text: str

    @classmethod
    def of(cls, given: Any) -> Self | Any:
        """From an object or its JSON text; anything else as it is."""
        value = _json_object(given) if isinstance(given, str) else given
        if not isinstance(value, Mapping):
            return given
        made = cls(value)
        made.text = given if isinstance(given, str) else json.dumps(value, ensure_ascii=False)
        return made

    def __str__(self) -> str:
        return self.text

    def __add__(self, other: str) -> str:
        return self.text + other

    def __radd__(self, other: str) -> str:
        return other + self.text


def _json_object(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _with_arguments(call: Any) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or "arguments" not in function:
        return call
    return {**call, "function": {**function, "arguments": Arguments.of(function["arguments"])}}


def _fields(message: Any) -> Any:
    """Messages of client libraries are objects: pydantic models or dataclasses."""
    if dataclasses.is_dataclass(message) and not isinstance(message, type):
        return dataclasses.asdict(message)
    dump = None if isinstance(message, Mapping) else getattr(message, "model_dump", None)
    return dump() if callable(dump) else message


def _part_text(part: Any) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    raise refusal(f"message content holds {part!r:.80}", part, "only parts of type text are supported")


class FinalMessage:
    """The final message, to be continued by the model: marked where it ends, so that what a template writes behind it
    can be cut off.
    """

    def __init__(self, messages: Sequence[Mapping[str, Any]], continued: bool | str, template: str) -> None:
        """``continued``: the name of the field, or True for ``content``."""
        name = continued if isinstance(continued, str) else "content"
        text = messages[-1].get(name)
        if not isinstance(text, str):
            raise _cannot_continue(f"the final message has no `{name}`", continued)
        names = [one for one in _REASONING if messages[-1].get(one) == text] if name in _REASONING else [name]
        if not any(one in template for one in names):
            raise _cannot_continue(f"the chat template does not read `{name}`", continued)
        self._text = text
        self.marked = [*messages[:-1], {**messages[-1], **dict.fromkeys(names, text + _MARK)}]

    def cut(self, rendered: str) -> str:
        """The rendered text up to the end of the final message."""
        place = rendered.rfind(_MARK.strip())
        if place < 0 or self._text.strip() not in rendered:
            raise _cannot_continue("the chat template does not write the final message as it is", self._text)
        head = rendered[:place]
        return head if rendered.startswith(_MARK, place) else head.rstrip()


def _cannot_continue(problem: str, value: object) -> AdmissionError:
    return AdmissionError(
        f"the final message cannot be continued: {problem}",
        field="continue_final_message",
        value=value,
        remedy="end with a message of the assistant that holds text, or leave `continue_final_message` out",
    )


def refusal(problem: str, value: object, remedy: str = "change the messages") -> AdmissionError:
    return AdmissionError(problem, field="messages", value=value, remedy=remedy)
