"""Tool calls within text: what begins like a call is held until it is one, or turns out not to be."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, ClassVar, Final, NamedTuple

from minisgl_core.plugin_api import (
    CallArguments,
    CallBegin,
    CallEnd,
    CallForm,
    Content,
    ParseRequest,
    ParserEvent,
    ParserSetup,
    TextParser,
    ToolFacts,
    partial_marker,
)

__all__ = ["MALFORMED", "Call", "CallParser", "CallReader", "Malformed", "ObjectEnd", "call_of", "json_text", "parsed"]

_LONGEST_NAME: Final = 256
_MOST_MALFORMED: Final = 32
"""After as many beginnings without a call, the rest of an answer is content: each may take a look at all of it."""


class Call(NamedTuple):
    """A complete call at the beginning of a text."""

    name: str
    arguments: str
    length: int
    """Characters of the text that it takes, its begin marker not counted."""


class Malformed:
    """The type of :data:`MALFORMED`."""


MALFORMED: Final = Malformed()


class CallReader:
    """Reads one call, whose text behind the begin marker grows."""

    def __init__(self, begin: str, tools: Sequence[ToolFacts]) -> None:
        """``begin``: the marker that it began with; empty for a call that has none."""
        self.begin, self.tools = begin, tools

    def read(self, text: str, final: bool) -> Call | Malformed | None:
        """``text`` is all of it so far; None if more has to come, which is impossible if it is ``final``."""
        raise NotImplementedError


class CallParser:
    """A form of calls: markers and a reader. Subclasses set them."""

    begins: ClassVar[tuple[str, ...]] = ()
    """Each begins a call."""
    closers: ClassVar[tuple[str, ...]] = ()
    """What may follow a call, and is no text then."""
    bare: ClassVar[bool] = False
    """May an answer, or what follows a call, be a JSON object without a marker that calls a tool of the request?"""
    reader: ClassVar[type[CallReader]]

    def __init__(self, setup: ParserSetup, options: object) -> None:
        """Needs neither."""

    def open(self, request: ParseRequest) -> TextParser:
        return _CallText(self, request.tools)

    def special_tokens(self) -> Sequence[str]:
        return (*self.begins, *self.closers)

    def call_form(self, tool: ToolFacts) -> CallForm | None:
        return None

    def close(self) -> None:
        """Nothing is held."""


class _CallText:
    def __init__(self, form: CallParser, tools: Sequence[ToolFacts]) -> None:
        self._form, self._tools = form, tools
        self._held = ""
        self._reader: CallReader | None = None
        """Of the call that the held text continues."""
        self._space = ""
        """White space that is content only if more content follows."""
        self._calls = self._malformed = 0
        self._after_call = False
        """Nothing but white space and closers has come since the last call."""
        self._has_content = False
        self._events: list[ParserEvent] = []

    def push(self, text: str) -> Sequence[ParserEvent]:
        self._held += text
        return self._advance(final=False)

    def finish(self) -> Sequence[ParserEvent]:
        events = self._advance(final=True)
        return events if self._calls or not self._space else [*events, Content(self._space)]

    def _advance(self, final: bool) -> list[ParserEvent]:
        self._events = []
        while self._held or (final and self._reader is not None):
            if not (self._step(final) if self._reader is None else self._read(self._reader, final)):
                break
        return self._events

    def _read(self, reader: CallReader, final: bool) -> bool:
        """Continue a call. False if more text has to come."""
        found = reader.read(self._held, final)
        if found is None and not final:
            return False
        self._reader = None
        if isinstance(found, Call):
            self._held = self._held[found.length :]
            self._add_call(found)
            return True
        self._malformed += 1
        self._content(reader.begin or self._held[:1])
        self._held = self._held[0 if reader.begin else 1 :]
        return True

    def _step(self, final: bool) -> bool:
        """Continue text outside of a call. False if more text has to come."""
        if self._malformed >= _MOST_MALFORMED:
            self._content(self._held)
            self._held = ""
            return False
        if self._after_call and (closed := self._close(final)) is not None:
            return closed
        if self._form.bare and (self._after_call or not (self._has_content or self._calls)):
            begun = self._held.lstrip()
            if begun.startswith("{"):
                self._space += self._held[: len(self._held) - len(begun)]
                self._held, self._reader = begun, self._form.reader("", self._tools)
                return True
        places = [(place, -len(one), one) for one in self._form.begins if (place := self._held.find(one)) >= 0]
        if places:
            place, _, marker = min(places)
            self._content(self._held[:place])
            self._held, self._reader = self._held[place + len(marker) :], self._form.reader(marker, self._tools)
            return True
        certain = len(self._held) - (0 if final else partial_marker(self._held, self._form.begins))
        self._content(self._held[:certain])
        self._held = self._held[certain:]
        return False

    def _close(self, final: bool) -> bool | None:
        """Drop a closer that the held text begins with. None if it begins with none, False if that is uncertain."""
        begun = self._held.lstrip()
        for closer in self._form.closers:
            if begun.startswith(closer):
                self._held = begun[len(closer) :]
                return True
            if not final and closer.startswith(begun):
                return False
        return None

    def _content(self, text: str) -> None:
        full = self._space + text
        shown = full.rstrip()
        self._space = full[len(shown) :]
        if not shown:
            return
        self._events.append(Content(shown.lstrip() if self._calls and not self._has_content else shown))
        self._has_content, self._after_call = True, False

    def _add_call(self, call: Call) -> None:
        index, self._calls, self._after_call = self._calls, self._calls + 1, True
        self._events += (CallBegin(index, call.name), CallArguments(index, call.arguments), CallEnd(index))


class ObjectEnd:
    """Finds the end of a JSON object whose text grows, looking at each character once."""

    _OUTSIDE: Final = re.compile(r'["{}\[\]]')
    _INSIDE: Final = re.compile(r'["\\]')

    def __init__(self) -> None:
        self._at = self._depth = 0
        self._in_string = False

    def find(self, text: str, start: int) -> int | None:
        """The index behind the object that begins at ``start``; None if it is incomplete."""
        self._at = max(self._at, start)
        while found := (self._INSIDE if self._in_string else self._OUTSIDE).search(text, self._at):
            mark = found[0]
            if mark == "\\" and found.end() == len(text):
                self._at = found.start()  # what it escapes has not come
                return None
            self._at = found.end() + (mark == "\\")
            if mark == '"':
                self._in_string = not self._in_string
            elif mark != "\\":
                self._depth += 1 if mark in "{[" else -1
                if not self._depth:
                    return self._at
        self._at = len(text)
        return None


def parsed(text: str) -> Any:
    """JSON data; None if it is none, or null."""
    try:
        return json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None


def _refuse(constant: str) -> None:
    raise ValueError(constant)


def json_text(value: object) -> str | None:
    """The text of JSON data; None if it has none, because of an infinite number."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(value)  # half a surrogate pair, which only an escape can write
    except (ValueError, RecursionError):
        return None
    return text


def call_of(name: object, arguments: object, length: int) -> Call | Malformed:
    """A call, if its name and its arguments can be ones."""
    if isinstance(arguments, str):
        arguments = parsed(arguments)
    if not isinstance(name, str) or not 0 < len(name) <= _LONGEST_NAME or not name.isprintable():
        return MALFORMED
    text = json_text(arguments) if isinstance(arguments, dict) else None
    return MALFORMED if text is None else Call(name, text, length)
