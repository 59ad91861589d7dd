from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest

from minisgl_core.cli.generate import _stream
from minisgl_core.cli.held_log import log_held
from minisgl_core.core import SamplingParams
from minisgl_core.llm import Chunk


class PrintingHandler(logging.Handler):
    """Writes where the streamed text goes too, as a terminal shows both."""

    def emit(self, record: logging.LogRecord) -> None:
        print(f"[{record.getMessage()}]")


class Talker:
    """A model whose shadow speaks between two pieces of its answer."""

    tokenizer = SimpleNamespace(refusal=None)

    def stream(self, prompt: object, params: object) -> object:
        yield Chunk("one ", [1], None, None, None)
        logging.getLogger("minisgl_core.capsule.shadow").warning("it diverged")
        yield Chunk("line", [2], "stop", None, None)


@pytest.fixture
def printed_log(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [PrintingHandler()])


def test_what_is_logged_while_text_is_streamed_comes_after_its_last_line(
    printed_log: None, capsys: pytest.CaptureFixture[str]
) -> None:
    _stream(Talker(), "p", SamplingParams())  # type: ignore[arg-type]
    assert capsys.readouterr().out == "one line\n[it diverged]\n"


def test_it_is_logged_though_the_text_ends_in_an_error_and_nothing_is_held_later(
    printed_log: None, capsys: pytest.CaptureFixture[str]
) -> None:
    logger = logging.getLogger("minisgl.registry")

    def stream() -> None:
        logger.warning("first")
        assert capsys.readouterr().out == ""
        raise RuntimeError("no more")

    with pytest.raises(RuntimeError, match="no more"), log_held():
        stream()
    logger.warning("second")
    assert capsys.readouterr().out == "[first]\n[second]\n"
