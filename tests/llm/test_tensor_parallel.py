"""LLM over two ranks: the answers of one, and no hang and no orphan whatever happens."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from minisgl_core.core import SamplingParams
from minisgl_core.distributed import DistributedInfo
from minisgl_core.engine import EngineConfig
from minisgl_core.errors import EngineError
from minisgl_core.llm import LLM
from minisgl_core.llm.ranks import Ranks, free_port
from minisgl_core.scheduler import Abort, NewReq
from support.make_checkpoints import NUM_STEPS, ensure_checkpoint, reference

SETTINGS: dict[str, Any] = {
    "dtype": torch.float32,
    "tp_size": 2,
    "num_page_override": 256,
    "max_seq_len_override": 64,
    "max_running_req": 4,
    "progress": False,
}
GREEDY = SamplingParams(max_tokens=NUM_STEPS, ignore_eos=True)


def is_gone(pid: int, within_s: float) -> bool:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state == "Z":  # dead; a container may have no process that reaps it
            return True
        time.sleep(0.05)
    return False


def worker_pids(llm: LLM) -> list[int]:
    return [peer.child.process.pid for peer in llm._engine._transport.runner._ranks._peers]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    llm = LLM(ensure_checkpoint("q3-text"), **SETTINGS)
    pids = worker_pids(llm)
    yield llm
    llm.shutdown()
    assert all(is_gone(pid, 0.1) for pid in pids)


def test_two_ranks_answer_like_one(llm: LLM) -> None:
    expected = reference("q3-text")
    answers = llm.generate(expected.prompts, GREEDY, progress=False)
    assert [answer["token_ids"] for answer in answers] == expected.continuations


def test_case_28_a_cached_prompt_again(llm: LLM) -> None:
    expected = reference("q3-text")
    for prompt, continuation in zip(expected.prompts, expected.continuations, strict=True):
        for _ in range(2):
            assert llm.generate([prompt], GREEDY, progress=False)[0]["token_ids"] == continuation
    llm.clear_cache()
    assert llm.scheduler.stats.cached_pages == 0


def test_case_57_random_aborts_and_case_92_idle_in_between(llm: LLM) -> None:
    rng = np.random.default_rng(0)
    runner = llm._engine._transport.runner  # by hand: the engine's own thread has nothing to do
    sampled = SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True)
    for turn in range(3):
        uids = [10_000 + 100 * turn + index for index in range(20)]
        for uid in uids:
            runner.post(NewReq(uid, rng.integers(0, 500, int(rng.integers(1, 40)), dtype=np.int32), sampled))
        while runner.has_work:
            runner.step()
            if rng.random() < 0.5:
                runner.post(Abort(int(rng.choice(uids))))
        stats = llm.scheduler.stats
        assert (stats.running, stats.waiting, stats.free_pages + stats.cached_pages) == (0, 0, 256)
    runner.check()  # the other rank checked its own books after every step and would have said so
    assert runner.usable


def test_case_59_a_killed_rank_is_an_error_within_seconds(llm: LLM) -> None:
    """The last test of the shared engine: it does not survive."""
    (pid,) = worker_pids(llm)
    os.kill(pid, signal.SIGKILL)
    start = time.monotonic()
    with pytest.raises(EngineError, match="rank 1 died without an exit report, exit code -9"):
        llm.generate([[1, 2, 3]], GREEDY, progress=False)
    with pytest.raises(EngineError, match="stopped after an error: rank 1 died"):
        llm.generate([[1, 2, 3]], GREEDY, progress=False)
    assert time.monotonic() - start < 8


def test_case_59_a_rank_that_cannot_start_says_why(tmp_path: Path) -> None:
    config = EngineConfig(str(tmp_path / "gone"), DistributedInfo(0, 2), distributed_port=free_port())
    ranks = Ranks(config, frozenset())
    (peer,) = ranks._peers
    with pytest.raises(EngineError, match=r"rank 1 failed: .*gone") as caught:
        ranks.wait_imported()
    assert "Traceback of rank 1" in caught.value.__notes__[0]
    ranks.close(grace_s=5)
    assert is_gone(peer.child.process.pid, 0.1)


DIES_BEFORE_IT_JOINS = """
import os
from minisgl_core.engine import Engine

Engine.__init__ = lambda *_: os.kill(os.getpid(), 9)
"""


def test_case_59_a_rank_that_dies_before_it_joins_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text(DIES_BEFORE_IT_JOINS)  # read by the other rank's interpreter
    monkeypatch.syspath_prepend(tmp_path)
    settings = {**SETTINGS, "distributed_timeout_s": 1000.0}
    begin = time.monotonic()
    with pytest.raises(EngineError, match="rank 1 died without an exit report, exit code -9"):
        LLM(ensure_checkpoint("q3-text"), **settings)
    assert time.monotonic() - begin < 100, "of these the imports of the other rank may take a few"


SABOTAGE = """
from minisgl_core.engine import Engine

def broken(*_):
    raise RuntimeError("broken on purpose")

Engine.{method} = broken
"""


@pytest.mark.parametrize("method", ["_load_weights", "launch"])
def test_case_59_a_rank_that_raises_later_says_why(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text(SABOTAGE.format(method=method))  # read by the other rank's interpreter
    monkeypatch.syspath_prepend(tmp_path)

    def start_and_use() -> None:
        with LLM(ensure_checkpoint("q3-text"), **SETTINGS) as llm:
            llm.generate([[1, 2, 3]], GREEDY, progress=False)

    with pytest.raises(EngineError, match="rank 1 failed: RuntimeError: broken on purpose"):
        start_and_use()


SCRIPT = """
import os, signal, sys, torch
from minisgl_core.core import SamplingParams
from minisgl_core.llm import LLM

torch.set_num_threads(2)
llm = LLM(sys.argv[1], dtype=torch.float32, tp_size=2, num_page_override=64, max_seq_len_override=32, progress=False)
(answer,) = llm.generate([[1, 2, 3]], SamplingParams(max_tokens=2, ignore_eos=True), progress=False)
pids = [peer.child.process.pid for peer in llm._engine._transport.runner._ranks._peers]
print(len(answer["token_ids"]), torch.get_num_threads(), *pids, flush=True)
if sys.argv[2] == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize(("end", "code"), [("kill", -9), ("exit", 0)])
def test_a_script_without_main_guard_leaves_no_orphan(end: str, code: int, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, str(script), str(ensure_checkpoint("q3-text")), end]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == code, done.stderr
    tokens, threads, pid = map(int, done.stdout.split())
    assert (tokens, threads) == (2, 1), "two threads, shared by two ranks"
    assert is_gone(pid, 5)
