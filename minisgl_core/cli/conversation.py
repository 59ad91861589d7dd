"""A conversation in the terminal, with any source of answers."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import closing, suppress
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

import click

from minisgl_core.errors import AdmissionError

from .held_log import log_held
from .prompts import read_text

if TYPE_CHECKING:
    from collections.abc import Generator
    from typing import TextIO

__all__ = ["Answerer", "Part", "converse"]

_HELP: Final = """\
/help    print this
/reset   discard the conversation, but not the system message
/exit    end the conversation, as Ctrl-D does, or Ctrl-C twice at the prompt
Ctrl-C ends an answer. A line that ends with \\ continues in the next one,
and so does everything between two lines of \"\"\"."""
_HINT: Final = "/help lists the commands, Ctrl-D ends the conversation"
_AGAIN: Final = "Ctrl-C once more, or Ctrl-D, ends the conversation"
_FENCE: Final = '"""'


class Part(NamedTuple):
    """A new part of an answer."""

    text: str
    tokens: int = 0
    finish_reason: str | None = None
    error: str | None = None
    """What failed, which ends the answer."""


class Answerer(Protocol):
    """A model, here or behind a server."""

    def stream(self, messages: list[dict[str, str]]) -> Generator[Part]:
        """The answer to a conversation; closing it ends the answer. Raises :class:`AdmissionError` for a conversation
        that cannot be served.
        """

    def limit(self, tokens: int) -> str:
        """What cut an answer of that many tokens."""


def converse(answerer: Answerer, stdin: TextIO, system: str | None) -> int:
    """Run a conversation until the user ends it. Returns the exit code: 1 if a piped line could not be answered."""
    interactive = stdin.isatty() and sys.stdout.isatty()
    if interactive:
        with suppress(ImportError):
            import readline  # noqa: F401 - from now on input() has line editing and history
        click.echo(_HINT, err=True)
    all_answered = _talk(_Conversation(answerer, system), _Reader(interactive))
    return 0 if interactive or all_answered else 1


def _talk(conversation: _Conversation, reader: _Reader) -> bool:
    """Run the conversation until the user ends it; True if all messages were answered."""
    all_answered = True
    while (line := reader.message()) is not None:
        match line.strip():
            case "":
                continue
            case "/exit":
                break
            case "/help":
                click.echo(_HELP, err=True)
            case "/reset":
                conversation.reset()
                click.echo("the conversation is forgotten", err=True)
            case word if re.fullmatch(r"/\w+", word):
                click.echo(f"error: there is no command {word}; {_HINT}", err=True)
                all_answered = False
            case message:
                all_answered &= _answer(conversation, message)
    return all_answered


def _answer(conversation: _Conversation, message: str) -> bool:
    """Answer one message; True on success. A message that cannot be served does not end the conversation."""
    try:
        error = conversation.answer(message)
    except AdmissionError as refusal:
        error = f"{refusal}; or /reset the conversation" if conversation.has_begun else str(refusal)
    if error is not None:
        click.echo(f"error: {error}", err=True)
    return error is None


class _Reader:
    """Reads messages from the keyboard or a pipe."""

    def __init__(self, interactive: bool) -> None:
        self._interactive = interactive
        self._interrupted = False

    def message(self) -> str | None:
        """The next message; None at the end of the input and after two Ctrl-C in a row. One Ctrl-C discards the typed
        text.
        """
        try:
            found = self._message()
        except KeyboardInterrupt:
            if not self._interactive:
                raise
            click.echo()
            if self._interrupted:
                return None
            self._interrupted = True
            click.echo(_AGAIN, err=True)
            return ""
        self._interrupted = False
        return found

    def _message(self) -> str | None:
        line = self._line("> ")
        if line is None:
            return None
        if line.strip() == _FENCE:
            return "\n".join(self._until_fence())
        lines = [line]
        while lines[-1].endswith("\\"):
            lines[-1] = lines[-1][:-1]
            if (line := self._line(". ")) is None:
                break
            lines.append(line)
        return "\n".join(lines)

    def _until_fence(self) -> Iterator[str]:
        while (line := self._line(". ")) is not None and line.strip() != _FENCE:
            yield line

    def _line(self, prompt: str) -> str | None:
        """A line without its line end; None at the end of the input."""
        if not self._interactive:
            line = read_text(sys.stdin.readline)
            return line.removesuffix("\n") if line else None
        try:
            return read_text(lambda: input(prompt))
        except EOFError:
            click.echo()
            return None


class _Conversation:
    """The messages so far, and how the next one is answered."""

    def __init__(self, answerer: Answerer, system: str | None) -> None:
        self._answerer = answerer
        self._beginning = [] if system is None else [{"role": "system", "content": system}]
        self._messages = list(self._beginning)

    @property
    def has_begun(self) -> bool:
        return len(self._messages) > len(self._beginning)

    def reset(self) -> None:
        """Discard all messages except the system message."""
        self._messages = list(self._beginning)

    def answer(self, message: str) -> str | None:
        """Print the answer while it is generated; Ctrl-C ends it, and the text so far belongs to the conversation.

        Returns what went wrong, if anything. Then, as after a refusal, the conversation is unchanged.
        """
        asked = [*self._messages, {"role": "user", "content": message}]
        said: list[str] = []
        tokens, reason = 0, None
        with log_held(), closing(self._answerer.stream(asked)) as parts:
            try:
                for part in parts:
                    click.echo(part.text, nl=False)
                    said.append(part.text)
                    tokens, reason = tokens + part.tokens, part.finish_reason or reason
                    if part.error is not None:
                        return part.error
            except KeyboardInterrupt:
                click.echo(" [interrupted]", err=True, nl=False)
            finally:
                click.echo()
        if reason == "length":
            click.echo(f"[the answer was cut{_after(tokens)}: {self._answerer.limit(tokens)}]", err=True)
        self._messages = [*asked, {"role": "assistant", "content": "".join(said)}]
        return None


def _after(tokens: int) -> str:
    return f" after {tokens} tokens" if tokens else ""
