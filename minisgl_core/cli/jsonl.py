"""Requests and answers as JSON lines: what ``minisgl generate --input FILE --output FILE`` reads and writes."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final

from minisgl_core.errors import EngineError, MinisglError, UsageError, nearest

from .prompts import open_stdin
from .sampling import sampling_names, sampling_params

if TYPE_CHECKING:
    from minisgl_core.core import SamplingParams

__all__ = ["Answers", "Line", "Lines", "read_lines", "same_file"]

Id = str | int
_OWN: Final = ("id", "prompt", "messages")
_SHAPE: Final = 'write {"id": "a", "prompt": "text"}, with token ids as prompt, or with messages'


@dataclass(frozen=True, slots=True)
class Line:
    """One request. ``prompt``: text, token ids, or the messages of a conversation."""

    number: int
    """Line number, from 1."""
    id: Id
    prompt: str | list[int] | list[dict[str, Any]]
    params: SamplingParams

    @property
    def is_chat(self) -> bool:
        """True if it has messages."""
        return not isinstance(self.prompt, str) and isinstance(self.prompt[0], dict)


@dataclass(slots=True)
class Lines:
    """The requests of a file. ``problems``: what is wrong with a line, by its number."""

    good: list[Line] = field(default_factory=list)
    problems: dict[int, str] = field(default_factory=dict)


def read_lines(name: str, defaults: Mapping[str, Any]) -> Lines:
    """Read the requests of a file, or of standard input if it is named ``-``.

    ``defaults``: sampling parameters for lines that do not set them. Raises :class:`UsageError` for a file that cannot
    be read; an invalid line is one of the ``problems``.
    """
    found, numbers = Lines(), dict[Id, int]()
    for number, text in enumerate(_read(name).removeprefix(b"\xef\xbb\xbf").split(b"\n"), 1):
        if not text.strip():
            continue
        try:
            line = _line(number, text, defaults)
            if line.id in numbers:
                raise UsageError(f"id {line.id!r} is that of line {numbers[line.id]} too", remedy="ids must differ")
            numbers[line.id] = number
            found.good.append(line)
        except MinisglError as error:
            found.problems[number] = error.headline
    return found


def _read(name: str) -> bytes:
    if name == "-":
        return open_stdin().buffer.read()
    try:
        return Path(name).read_bytes()
    except OSError as error:
        raise UsageError(
            f"input file {name!r} cannot be read: {error.strerror}",
            field="--input",
            value=name,
            remedy="give a file of JSON lines, or - for standard input",
        ) from error


def _line(number: int, text: bytes, defaults: Mapping[str, Any]) -> Line:
    from minisgl_core.core.sampling_params import HINTS

    try:
        data = json.loads(text.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        what = "UTF-8 text" if isinstance(error, UnicodeDecodeError) else "JSON"
        raise UsageError(f"it is no {what}: {error}", remedy=_SHAPE) from error
    if not isinstance(data, dict):
        raise UsageError(f"it is {json.dumps(data):.60}", value=data, remedy=_SHAPE)
    known = (*_OWN, *sampling_names())
    for key in data:
        if key not in known:
            remedy = HINTS.get(key) or nearest(key, known) or f"known are {', '.join(known)}"
            raise UsageError(f"unknown key {key!r}", field=key, value=data[key], remedy=remedy)
    own = {key: value for key, value in data.items() if key not in _OWN and value is not None}
    return Line(number, _id(data.get("id", number)), _prompt(data), sampling_params({**defaults, **own}))


def _id(value: object) -> Id:
    if isinstance(value, str) or (isinstance(value, int) and not isinstance(value, bool)):
        return value
    raise UsageError(f"id is {json.dumps(value):.60}", field="id", value=value, remedy="give a text or an integer")


def _prompt(data: Mapping[str, Any]) -> Any:
    kinds = [key for key in ("prompt", "messages") if data.get(key) is not None]
    if len(kinds) != 1:
        problem = "both prompt and messages are there" if kinds else "neither prompt nor messages is there"
        raise UsageError(problem, field="prompt", remedy=_SHAPE)
    value = data[kinds[0]]
    if kinds == ["prompt"]:
        right = bool(value) and (isinstance(value, str) or _is_list_of(int, value))
        wanted = "a text or a list of token ids, with at least one token"
    else:
        right = bool(value) and _is_list_of(dict, value)
        wanted = 'messages such as [{"role": "user", "content": "..."}]'
    if not right:
        raise UsageError(f"{kinds[0]} is {json.dumps(value):.60}", field=kinds[0], value=value, remedy=f"give {wanted}")
    return value


def _is_list_of(kind: type, value: object) -> bool:
    return isinstance(value, list) and all(isinstance(one, kind) and not isinstance(one, bool) for one in value)


class Answers:
    """The output: one JSON document per line. ``done`` are the ids of answers that it already has."""

    def __init__(self, file: IO[bytes], name: str, done: set[Id]) -> None:
        self._file, self._name, self.done = file, name, done

    @classmethod
    @contextlib.contextmanager
    def open(cls, name: str) -> Iterator[Answers]:
        """Open a file to append to; ``-`` = standard output. An incomplete last line is removed.

        Raises :class:`UsageError` for a file that cannot be written, or contains anything other than answers.
        """
        if name == "-":
            yield cls(sys.stdout.buffer, "standard output", set())
            return
        try:
            whole = not os.path.exists(name) or os.path.isfile(name)  # a device cannot be read from the beginning
            file = os.fdopen(os.open(name, os.O_RDWR | os.O_CREAT, 0o666), "r+b") if whole else open(name, "wb")  # noqa: SIM115
        except OSError as error:
            raise UsageError(
                f"output file {name!r} cannot be written: {error.strerror}",
                field="--output",
                value=name,
                remedy="name a file in a folder that you may write to, or - for standard output",
            ) from error
        try:
            yield cls(file, name, _ids_of(file, name) if whole else set())
        finally:
            with contextlib.suppress(OSError):  # every line was flushed: nothing new is lost
                file.close()

    def write(self, key: Id, answer: Mapping[str, Any]) -> None:
        """Append a complete line and flush it."""
        try:
            self._file.write(json.dumps({"id": key, **answer}).encode() + b"\n")
            self._file.flush()
        except BrokenPipeError:
            raise  # the reader has exited: the command line ends without an error message
        except OSError as error:
            raise EngineError(
                f"{self._name} cannot be written: {error.strerror}",
                field="--output",
                value=self._name,
                remedy="make room, and run the same again: what is answered already is skipped",
            ) from error


def _ids_of(file: IO[bytes], name: str) -> set[Id]:
    """The ids of the answers in a file. Leaves the file at its end, without an incomplete last line."""
    done, end = set[Id](), 0
    for number, text in enumerate(file.read().splitlines(keepends=True), 1):
        whole = text.endswith(b"\n")
        if text.strip():
            try:
                done.add(_id(json.loads(text)["id"]))
            except (ValueError, KeyError, TypeError, UsageError):
                if not whole:
                    # An interrupted write: cut the line, its request is answered again.
                    break
                raise _no_answers(name, number) from None
        end += len(text)
        if not whole:
            # The answer is complete and only its line end is missing.
            file.write(b"\n")
            end += 1
    file.seek(end)
    file.truncate()
    return done


def _no_answers(name: str, number: int) -> UsageError:
    return UsageError(
        f"line {number} of output file {name!r} is no answer",
        field="--output",
        value=name,
        remedy="nothing is overwritten: name another file, or a file that this command has written",
    )


def same_file(one: str, other: str) -> bool:
    """True if two names refer to the same file; standard streams never do."""
    return "-" not in (one, other) and os.path.realpath(one) == os.path.realpath(other)
