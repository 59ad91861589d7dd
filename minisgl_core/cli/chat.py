"""``minisgl chat``: a conversation in the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from minisgl_core.errors import UsageError
from minisgl_core.settings.schema import Settings

from .conversation import Part, converse
from .options import settings_options
from .prompts import open_stdin
from .sampling import sampling_options, sampling_params
from .start import find_model, need_tokenizer, refuse_choice, report_shadow, start_llm

if TYPE_CHECKING:
    from collections.abc import Generator

    from minisgl_core.core import SamplingParams
    from minisgl_core.llm import LLM
    from minisgl_core.llm.stream import Stream

__all__ = ["command"]


@click.command(name="chat")
@click.option("--url", metavar="URL", help="A server of any engine that speaks OpenAI's API; --model names its model.")
@click.option(
    "--api-key",
    envvar=["MINISGL_API_KEY", "OPENAI_API_KEY"],
    metavar="KEY",
    help="Key of that server; also read from MINISGL_API_KEY and OPENAI_API_KEY.",
)
@click.option("--system", metavar="TEXT", help="System message.")
@sampling_options
@settings_options("model", "engine")
def command(settings: Settings, url: str | None, api_key: str | None, system: str | None, **sampling: Any) -> int:
    """Chat with a model in the terminal.

    Each line is a message. A line that ends with a backslash continues in the next one, and so does everything between
    two lines of three quotation marks. /help lists the commands, Ctrl-C ends an answer, Ctrl-D ends the conversation.
    Without a model the demo model is used, and downloaded if necessary. With --url a server answers; what is not given
    of the sampling parameters is the server's choice. Lines piped to standard input are answered one after another;
    the exit code is 1 if one of them could not be answered.
    """
    params = sampling_params(sampling)
    stdin = open_stdin()
    if url is not None:
        from .chat_server import ChatServer

        return converse(ChatServer(url, api_key, _remote_model(settings), sampling), stdin, system)
    refuse_choice(settings)
    path = find_model(settings)
    need_tokenizer(path, chat=True)
    from minisgl_core.llm import LLM

    with start_llm(LLM, settings, path, requests=1) as llm, report_shadow(llm):
        return converse(_LocalModel(llm, params), stdin, system)


def _remote_model(settings: Settings) -> str | None:
    """The model to name to a server; the settings of its engine are its own."""
    flags = {source: name for name, source in settings.sources.items() if source.startswith("--")}
    if click.get_current_context().params.get("backend"):
        flags["--backend"] = "backend"
    for flag, name in flags.items():
        if name != "model.path":
            remedy = "give it to `minisgl serve`, or leave out --url"
            raise UsageError(f"{flag} has no effect on the server of --url", field=flag, remedy=remedy)
    return settings.model.path if "model.path" in flags.values() else None


class _LocalModel:
    """A model of this process."""

    def __init__(self, llm: LLM, params: SamplingParams) -> None:
        self._llm, self._params = llm, params

    def stream(self, messages: list[dict[str, str]]) -> Generator[Part]:
        return _parts(self._llm.stream_chat(messages, self._params))

    def limit(self, tokens: int) -> str:
        return "--max-tokens" if tokens == self._params.max_tokens else "the context is full; /reset empties it"


def _parts(stream: Stream) -> Generator[Part]:
    try:
        for chunk in stream:
            yield Part(chunk.text, len(chunk.token_ids), chunk.finish_reason, chunk.error)
    finally:
        stream.close()
