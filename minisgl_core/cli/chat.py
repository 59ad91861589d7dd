"""``minisgl chat``: a conversation in the terminal."""

from __future__ import annotations

import re
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

import click

from minisgl_core.errors import AdmissionError
from minisgl_core.settings.schema import Settings

from .held_log import log_held
from .options import settings_options
from .prompts import open_stdin, read_text
from .sampling import sampling_options, sampling_params
from .start import find_model, need_tokenizer, refuse_choice, report_shadow, start_llm

if TYPE_CHECKING:
    from collections.abc import Iterator

    from minisgl_core.core import SamplingParams
    from minisgl_core.llm import LLM
    from minisgl_core.tokenizer import Tokenizer

__all__ = ["command"]

_HELP: Final = """\
/help    print this
/reset   discard the conversation, but not the system message
/exit    end the conversation, as Ctrl-D does, or Ctrl-C twice at the prompt
Ctrl-C ends an answer. A line that ends with \\ continues in the next one,
and so does everything between two lines of \"\"\"."""
_HINT: Final = "/help lists the commands, Ctrl-D ends the conversation"
_AGAIN: Final = "Ctrl-C once more, or Ctrl-D, ends the conversation"
_FENCE: Final = '"""'


@click.command(name="chat")
@click.option("--system", metavar="TEXT", help="System message.")
@sampling_options
@settings_options("model", "engine")
def command(settings: Settings, system: str | None, **sampling: Any) -> int:
    """Chat with a model in the terminal.

    Each line is a message. A line that ends with a backslash continues in the next one, and so does everything between
    two lines of three quotation marks. /help lists the commands, Ctrl-C ends an answer, Ctrl-D ends the conversation.
    Without a model the demo model is used, and downloaded if necessary. Lines piped to standard input are answered one
    after another; the exit code is 1 if one of them could not be answered.
    """
    params = sampling_params(sampling)
    stdin = open_stdin()
    refuse_choice(settings)
    path = find_model(settings)
    tokenizer = need_tokenizer(path, chat=True)
    from minisgl_core.llm import LLM

    with start_llm(LLM, settings, path, requests=1) as llm, report_shadow(llm):
        conversation = _Conversation(llm, tokenizer, params, system)
        interactive = stdin.isatty() and sys.stdout.isatty()
        if interactive:
            with suppress(ImportError):
                import readline  # noqa: F401 - from now on input() has line editing and history
            click.echo(_HINT, err=True)
        all_answered = _talk(conversation, _Reader(interactive))
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

    def __init__(self, llm: LLM, tokenizer: Tokenizer, params: SamplingParams, system: str | None) -> None:
        self._llm = llm
        self._tokenizer = tokenizer
        self._params = params
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
        stream = self._llm.stream(self._tokenizer.apply_chat_template(asked), self._params)
        said: list[str] = []
        tokens, reason = 0, None
        with log_held():
            try:
                for chunk in stream:
                    click.echo(chunk.text, nl=False)
                    said.append(chunk.text)
                    tokens, reason = tokens + len(chunk.token_ids), chunk.finish_reason
                    if chunk.error is not None:
                        return chunk.error
            except KeyboardInterrupt:
                click.echo(" [interrupted]", err=True, nl=False)
            finally:
                click.echo()
        if reason == "length":
            limit = "--max-tokens" if tokens == self._params.max_tokens else "the context is full; /reset empties it"
            click.echo(f"[the answer was cut after {tokens} tokens: {limit}]", err=True)
        self._messages = [*asked, {"role": "assistant", "content": "".join(said)}]
        return None
