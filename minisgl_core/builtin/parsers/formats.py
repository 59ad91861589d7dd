"""The forms of tool calls of known families of models. Source: their chat templates."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final

from minisgl_core.plugin_api import CallForm, ToolFacts

from .calls import MALFORMED, Call, CallParser, CallReader, Malformed, ObjectEnd, call_of, parsed

__all__ = ["DeepSeekParser", "HermesParser", "Llama3Parser", "Qwen3CoderParser"]

_LONGEST_HEADER: Final = 512


class _ObjectReader(CallReader):
    """A header without braces, then a JSON object."""

    def __init__(self, begin: str, tools: Sequence[ToolFacts]) -> None:
        super().__init__(begin, tools)
        self._end = ObjectEnd()

    def read(self, text: str, final: bool) -> Call | Malformed | None:
        start = text.find("{", 0, _LONGEST_HEADER)
        header = text[: _LONGEST_HEADER if start < 0 else start]
        if len(header) == _LONGEST_HEADER or not self.may_begin(header, complete=start >= 0):
            return MALFORMED
        end = None if start < 0 else self._end.find(text, start)
        return None if end is None else self.call(header, parsed(text[start:end]), end)

    def may_begin(self, header: str, complete: bool) -> bool:
        """Can a call begin like this?"""
        return not header.strip()

    def call(self, header: str, value: Any, length: int) -> Call | Malformed:
        """What the object means: null if it is no JSON."""
        if not isinstance(value, Mapping):
            return MALFORMED
        arguments = value.get("arguments", value.get("parameters", {}))
        return call_of(value.get("name"), arguments, length)


class HermesParser(CallParser):
    """``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``: Hermes, Qwen2.5, QwQ, Qwen3."""

    begins = ("<tool_call>",)
    closers = ("</tool_call>",)
    reader = _ObjectReader

    def call_form(self, tool: ToolFacts) -> CallForm:
        return CallForm(f'<tool_call>\n{{"name": {json.dumps(tool.name)}, "arguments": ', "}\n</tool_call>")


class _LlamaReader(_ObjectReader):
    def call(self, header: str, value: Any, length: int) -> Call | Malformed:
        found = super().call(header, value, length)
        offered = {tool.name for tool in self.tools}
        return found if self.begin or (isinstance(found, Call) and found.name in offered) else MALFORMED


class Llama3Parser(CallParser):
    """``{"name": ..., "parameters": {...}}`` as the whole answer, or behind ``<|python_tag|>``: Llama 3.1 to 3.3.

    Without the tag, an object is a call only if it names a tool of the request.
    """

    begins = ("<|python_tag|>",)
    closers = (";",)
    bare = True
    reader = _LlamaReader

    def call_form(self, tool: ToolFacts) -> CallForm:
        return CallForm(f'{{"name": {json.dumps(tool.name)}, "parameters": ', "}")


_CALLS: Final = "<｜tool▁calls▁begin｜>"
_CALL: Final = "<｜tool▁call▁begin｜>"
_SEP: Final = "<｜tool▁sep｜>"
_HEADER: Final = re.compile(rf"(?:function{_SEP}([^<\n]+)\n\s*```json|([^<\n]+){_SEP})\s*")


class _DeepSeekReader(_ObjectReader):
    def may_begin(self, header: str, complete: bool) -> bool:
        return not complete or _HEADER.fullmatch(header) is not None

    def call(self, header: str, value: Any, length: int) -> Call | Malformed:
        found = _HEADER.fullmatch(header)
        return MALFORMED if found is None else call_of((found[1] or found[2]).strip(), value, length)


class DeepSeekParser(CallParser):
    """Calls between ``<｜tool▁call▁begin｜>`` and ``<｜tool▁call▁end｜>``: DeepSeek V3 and R1, with a block of JSON
    behind the name, and V3.1, with the arguments alone.
    """

    begins = (f"{_CALLS}{_CALL}", _CALL)
    closers = ("```", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>")
    reader = _DeepSeekReader

    def special_tokens(self) -> Sequence[str]:
        return (_CALLS, _CALL, _SEP, *self.closers[1:])

    def call_form(self, tool: ToolFacts) -> CallForm:
        begin = f"{_CALLS}{_CALL}function{_SEP}{tool.name}\n```json\n"
        return CallForm(begin, f"\n{''.join(self.closers)}")


class _Qwen3CoderReader(CallReader):
    _END: ClassVar = re.compile(r"</function>\s*</tool_call>")
    _BODY: ClassVar = re.compile(r"\s*<function=([^>\n]+)>\s*(.*)", re.DOTALL)
    _PARAMETER: ClassVar = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>\s*", re.DOTALL)
    _FUNCTION: ClassVar = "<function="

    def read(self, text: str, final: bool) -> Call | Malformed | None:
        begun = text.lstrip()[: len(self._FUNCTION)]
        if not self._FUNCTION.startswith(begun):
            return MALFORMED
        if (end := self._END.search(text)) is not None:
            return self._call(text[: end.start()], end.end())
        if final and text.rstrip().endswith("</function>"):
            return self._call(text.rstrip().removesuffix("</function>"), len(text))
        return None

    def _call(self, text: str, length: int) -> Call | Malformed:
        body = self._BODY.fullmatch(text)
        if body is None:
            return MALFORMED
        schema = next((tool.parameters for tool in self.tools if tool.name == body[1].strip()), {})
        arguments, at = {}, 0
        while at < len(body[2]):
            found = self._PARAMETER.match(body[2], at)
            if found is None:
                return MALFORMED
            arguments[found[1].strip()] = _typed(found[2], schema, found[1].strip())
            at = found.end()
        return call_of(body[1].strip(), arguments, length)


def _typed(text: str, schema: Mapping[str, Any], name: str) -> Any:
    """A value by the type that its schema gives; without one, JSON if it is, else the text."""
    properties = schema.get("properties")
    own = properties.get(name) if isinstance(properties, Mapping) else None
    kind = own.get("type") if isinstance(own, Mapping) else None
    value = None if kind == "string" else parsed(text)
    return text if (value is None and text.strip() != "null") or kind == "string" else value


class Qwen3CoderParser(CallParser):
    """``<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>``: Qwen3-Coder.

    The schema of a tool says which values are texts and which are JSON.
    """

    begins = ("<tool_call>",)
    reader = _Qwen3CoderReader
