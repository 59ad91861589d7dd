from __future__ import annotations

import contextlib
import io
import os
import pty
import select
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from minisgl_core.cli.app import main
from minisgl_core.core import SamplingParams
from minisgl_core.llm import LLM
from minisgl_core.tokenizer import load_tokenizer

Tiny = Callable[[str], Path]
Capture = pytest.CaptureFixture[str]

CUT = "[the answer was cut after 8 tokens: --max-tokens]"
SMALL = ("--max-seq-len-override", "128", "--max-tokens", "8", "--ignore-eos")


pytestmark = pytest.mark.usefixtures("no_settings", "one_thread")


@pytest.fixture
def talk(tiny: Tiny, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> Callable[..., tuple[int, str, list[str]]]:
    """Pipe lines into chat; returns its exit code, its output, and what it said on standard error after the plan."""

    def run(lines: str, *arguments: str) -> tuple[int, str, list[str]]:
        monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
        code = main(["chat", "--model", str(tiny("q3-text")), *arguments, *SMALL])
        captured = capsys.readouterr()
        plan, *errors = captured.err.splitlines()
        assert plan.startswith("plan ")
        return code, captured.out, [line for line in errors if line != CUT]

    return run


@pytest.fixture
def by_hand(tiny: Tiny) -> Callable[..., str]:
    """The same conversation without chat: ``by_hand(system, *users) -> standard output``."""

    def converse(system: str | None, *users: str) -> str:
        tokenizer = load_tokenizer(tiny("q3-text"))
        assert tokenizer is not None
        messages = [] if system is None else [{"role": "system", "content": system}]
        said = []
        with LLM(tiny("q3-text"), num_page_override=256, max_seq_len_override=128, progress=False) as llm:
            for user in users:
                messages.append({"role": "user", "content": user})
                prompt = tokenizer.apply_chat_template(messages)
                params = SamplingParams(max_tokens=8, ignore_eos=True)
                (answer,) = llm.generate([prompt], params, progress=False)
                messages.append({"role": "assistant", "content": answer["text"]})
                said.append(answer["text"] + "\n")
        return "".join(said)

    return converse


def test_each_message_is_answered_with_those_before_it_in_mind(
    talk: Callable[..., tuple[int, str, list[str]]], by_hand: Callable[..., str]
) -> None:
    assert talk("hello\n\nand then\n") == (0, by_hand(None, "hello", "and then"), [])


def test_the_system_message_comes_first_and_survives_a_reset(
    talk: Callable[..., tuple[int, str, list[str]]], by_hand: Callable[..., str]
) -> None:
    once = by_hand("be brief", "hello")
    code, out, errors = talk("hello\n/reset\nhello\n", "--system", "be brief")
    assert (code, out) == (0, once * 2)
    assert errors == ["the conversation is forgotten"]
    assert once != by_hand(None, "hello")


def test_exit_ends_it_before_the_next_line(talk: Callable[..., tuple[int, str, list[str]]]) -> None:
    assert talk("/exit\nhello\n") == (0, "", [])


def test_an_unknown_command_is_no_message(talk: Callable[..., tuple[int, str, list[str]]]) -> None:
    code, out, errors = talk("/rest\n")
    assert (code, out) == (1, "")
    assert errors[0].startswith("error: there is no command /rest; /help lists")


def test_a_message_that_does_not_fit_leaves_the_conversation_as_it_was(
    talk: Callable[..., tuple[int, str, list[str]]], by_hand: Callable[..., str]
) -> None:
    code, out, (error,) = talk(f"hello\n{'word ' * 100}\nand then\n")
    assert code == 1
    assert out == by_hand(None, "hello", "and then")
    assert "leaves no room for an answer: the context is 128 tokens" in error
    assert error.endswith("or /reset the conversation")


def test_standard_input_that_is_no_text(tiny: Tiny, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff\n"), encoding="utf-8"))
    assert main(["chat", "--model", str(tiny("q3-text")), *SMALL]) == 2
    assert "error: standard input is not utf-8 text" in capsys.readouterr().err


def test_a_closed_standard_input_is_refused_before_the_model_is_looked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    assert main(["chat", "--model", "./no/where"]) == 2
    assert capsys.readouterr().err.startswith("error: standard input is closed; run it in a terminal")


class Terminal:
    """A program with a terminal of its own: what is written arrives as keys, Ctrl-C included."""

    _IN_A_SESSION = (
        "import fcntl, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0);"
        "from minisgl_core.cli.app import main; sys.exit(main())"
    )

    def __init__(self, *arguments: str) -> None:
        self._ours, theirs = pty.openpty()
        call = [sys.executable, "-c", self._IN_A_SESSION, *arguments]
        self.process = subprocess.Popen(call, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True)
        os.close(theirs)
        self._seen = ""

    def wait_for(self, text: str) -> str:
        """What came before ``text``, once it has come."""
        while text not in self._seen:
            self.wait_for_more()
        before, _, self._seen = self._seen.partition(text)
        return before

    def wait_for_more(self) -> None:
        """Until the program writes."""
        assert select.select([self._ours], [], [], 120)[0], f"silent after {self._seen!r}"
        self._seen += os.read(self._ours, 4096).decode(errors="replace")

    def wait_for_silence(self) -> None:
        """Python misses a signal that comes between showing a prompt and waiting at it."""
        while select.select([self._ours], [], [], 0.5)[0]:
            self.wait_for_more()

    def press(self, keys: str) -> None:
        os.write(self._ours, keys.encode())

    def exit_code(self) -> int:
        return self.process.wait(timeout=60)

    def press_until_it_ends(self, keys: str) -> int:
        """Presses again: Python misses a signal that comes between showing a prompt and waiting at it.

        Not soon: one that comes while Python is ending kills it.
        """
        for _ in range(6):
            self.press(keys)
            with contextlib.suppress(subprocess.TimeoutExpired):
                return self.process.wait(timeout=15)
        raise AssertionError(f"{keys!r} does not end it; the last that it wrote is {self._seen!r}")

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._ours)


def test_in_a_terminal_ctrl_c_ends_the_answer_and_ctrl_d_the_conversation(tiny: Tiny) -> None:
    long = ("--max-seq-len-override", "4096", "--max-tokens", "4000", "--ignore-eos")
    with Terminal("chat", "--model", str(tiny("q3-text")), *long) as terminal:
        greeting = terminal.wait_for("> ")
        assert "plan " in greeting and "Ctrl-D ends the conversation" in greeting
        terminal.press("hello\n")
        terminal.wait_for("hello\r\n")
        terminal.wait_for_more()  # some of the answer
        terminal.press("\x03")
        terminal.wait_for(" [interrupted]")
        terminal.wait_for("> ")
        terminal.press("/reset\n")
        terminal.wait_for("the conversation is forgotten")
        terminal.wait_for("> ")
        terminal.press("\x04")
        assert terminal.exit_code() == 0


def test_case_134_one_ctrl_c_at_the_prompt_ends_nothing_and_a_second_one_does(tiny: Tiny) -> None:
    with Terminal("chat", "--model", str(tiny("q3-text")), *SMALL) as terminal:
        terminal.wait_for("> ")
        terminal.wait_for_silence()
        terminal.press("half a mess\x03")
        terminal.wait_for("Ctrl-C once more")
        terminal.wait_for("> ")
        terminal.press("/reset\n")
        terminal.wait_for("the conversation is forgotten")
        terminal.wait_for("> ")
        terminal.wait_for_silence()
        terminal.press("\x03")
        terminal.wait_for("Ctrl-C once more")
        terminal.wait_for("> ")
        assert terminal.press_until_it_ends("\x03") == 0


def test_case_134_help_lists_the_commands(talk: Callable[..., tuple[int, str, list[str]]]) -> None:
    code, out, err = talk("/help\n")
    assert (code, out) == (0, "")
    assert all(any(line.startswith(word) for line in err) for word in ("/help", "/reset", "/exit"))


@pytest.mark.parametrize("typed", ["one\\\ntwo\n", '"""\none\ntwo\n"""\n', '"""\none\ntwo\n', "one\\\ntwo"])
def test_case_134_a_message_may_have_several_lines(
    typed: str, talk: Callable[..., tuple[int, str, list[str]]], by_hand: Callable[..., str]
) -> None:
    assert talk(typed) == (0, by_hand(None, "one\ntwo"), [])
