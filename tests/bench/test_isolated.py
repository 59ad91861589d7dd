"""Work in another process: what dies, hangs or is suspect costs one item, and the next ones a fresh process."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from minisgl_core.bench.isolated import Lost, supervised
from minisgl_core.env import ENV
from support.bench_targets import act
from support.child_env import child_env


def test_each_item_is_received_of_whatever_the_others_do() -> None:
    ENV.DISABLE_OVERLAP_SCHEDULING.value = True
    try:
        received = list(supervised(act, "job", ["fine", "spoil", "die", "last"], limit_s=120.0))
    finally:
        ENV.DISABLE_OVERLAP_SCHEDULING.reset()
    assert [item for item, _ in received] == ["fine", "spoil", "die", "die", "last"]
    assert received[3][1] == Lost("its process ended with exit code 7")
    said = [message for _, message in received if not isinstance(message, Lost)]
    assert {message[1:] for message in said} == {("job", True)}
    fine, spoil, die, last = (message[0] for message in said)
    assert fine == spoil  # a process is shared until something happens to it
    assert len({spoil, die, last}) == 3


_DIES = """
from support.bench_targets import act
from minisgl_core.bench.isolated import supervised
if __name__ == "__main__":
    print([type(message).__name__ for _, message in supervised(act, "job", ["die"], limit_s=120.0)])
"""


def test_a_process_that_dies_leaves_no_semaphore_of_a_progress_bar(tmp_path: Path) -> None:
    script = tmp_path / "dies.py"
    script.write_text(_DIES)
    done = subprocess.run(
        [sys.executable, str(script)], env=child_env(), capture_output=True, text=True, check=True, timeout=120
    )
    assert (done.stdout, done.stderr) == ("['tuple', 'Lost']\n", "")


def test_nothing_begins_after_the_deadline() -> None:
    received = list(supervised(act, "job", ["fine", "fine"], limit_s=60.0, deadline=time.monotonic()))
    assert received == [("fine", Lost("no time was left"))] * 2


def test_an_interrupt_is_for_the_parent_alone() -> None:
    received = [item for item, message in supervised(act, "job", ["interrupt", "last"], limit_s=120.0)]
    assert received == ["interrupt", "last"]  # a process that died of it would add a Lost
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


@pytest.mark.slow
def test_what_hangs_is_ended() -> None:
    received = list(supervised(act, "job", ["hang", "last"], limit_s=30.0))
    assert [item for item, _ in received] == ["hang", "hang", "last"]
    assert received[1][1] == Lost("it sent nothing for 30 s", silent=True)
