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
from .start import find_model, need_tokenizer, refuse_choice, start_llm

if TYPE_CHECKING:
    from minisgl_core.core import SamplingParams
    from minisgl_core.llm import LLM
    from minisgl_core.tokenizer import Tokenizer

__all__ = ["command"]

_HELP: Final = "/reset forgets the conversation, /exit or Ctrl-D ends it, Ctrl-C ends an answer"


@click.command(name="chat")
@click.option("--system", metavar="TEXT", help="System message.")
@sampling_options
@settings_options("model", "engine")
def command(settings: Settings, system: str | None, **sampling: Any) -> int:
    """Talk with a model in the terminal.

    Each line is a message. /reset forgets the conversation, /exit or Ctrl-D ends it, Ctrl-C ends an answer. Without a
    model the demo model answers, and is downloaded first if need be.

    Lines piped to standard input are answered one after another; the exit code is then 1 if one could not be.
    """
    params = sampling_params(sampling)
    stdin = open_stdin()
    refuse_choice(settings)
    path = find_model(settings)
    tokenizer = need_tokenizer(path, chat=True)
    with start_llm(settings, path, requests=1) as llm:
        conversation = _Conversation(llm, tokenizer, params, system)
        interactive = stdin.isatty() and sys.stdout.isatty()
        if interactive:
            with suppress(ImportError):
                import readline  # noqa: F401 - from now on input() edits lines and remembers them
            click.echo(_HELP, err=True)
        all_answered = _talk(conversation, interactive)
    return 0 if interactive or all_answered else 1


def _talk(conversation: _Conversation, interactive: bool) -> bool:
    """Until the user ends it. Were all messages answered?"""
    all_answered = True
    while (line := _read_line(interactive)) is not None:
        match line.strip():
            case "":
                continue
            case "/exit":
                break
            case "/reset":
                conversation.reset()
                click.echo("the conversation is forgotten", err=True)
            case word if re.fullmatch(r"/\w+", word):
                click.echo(f"error: there is no command {word}; {_HELP}", err=True)
                all_answered = False
            case message:
                all_answered &= _answer(conversation, message)
    return all_answered


def _answer(conversation: _Conversation, message: str) -> bool:
    """Was it answered? A message that cannot be served does not end the conversation."""
    try:
        error = conversation.answer(message)
    except AdmissionError as refusal:
        error = f"{refusal}; or /reset the conversation" if conversation.has_begun else str(refusal)
    if error is not None:
        click.echo(f"error: {error}", err=True)
    return error is None


def _read_line(interactive: bool) -> str | None:
    """None at the end of the input."""
    if not interactive:
        return read_text(sys.stdin.readline) or None
    try:
        return read_text(lambda: input("> "))
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
        """Forget all but the system message."""
        self._messages = list(self._beginning)

    def answer(self, message: str) -> str | None:
        """Print the answer as it comes; Ctrl-C cuts it, and what was said until then belongs to the conversation.

        Returns what went wrong on the way; then, as when it is refused, the conversation is what it was.
        """
        asked = [*self._messages, {"role": "user", "content": message}]
        stream = self._llm.stream(self._tokenizer.apply_chat_template(asked), self._params)
        said: list[str] = []
        with log_held():
            try:
                for chunk in stream:
                    click.echo(chunk.text, nl=False)
                    said.append(chunk.text)
                    if chunk.error is not None:
                        return chunk.error
            except KeyboardInterrupt:
                click.echo(" [interrupted]", err=True, nl=False)
            finally:
                click.echo()
        self._messages = [*asked, {"role": "assistant", "content": "".join(said)}]
        return None
