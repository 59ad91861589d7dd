"""Ranks that torchrun has started: two on this machine, which find each other as they would on two."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from minisgl_core import LLM, SamplingParams
from minisgl_core.errors import UsageError
from minisgl_core.llm.torchrun import read_placement
from support.make_checkpoints import ensure_checkpoint

BIN = Path(sys.executable).parent
IDS = [1, 2, 3, 4]
TOKENS = 12
SMALL = ("--device", "cpu", "--dtype", "float32", "--num-page-override", "256", "--max-seq-len-override", "64")


@pytest.fixture(scope="module")
def model() -> Path:
    return ensure_checkpoint("q3")


@pytest.fixture(scope="module")
def expected(model: Path) -> list[int]:
    llm = LLM(model, dtype="float32", device="cpu", num_page_override=256, max_seq_len_override=64, progress=False)
    try:
        (answer,) = llm.generate([IDS], SamplingParams(max_tokens=TOKENS, temperature=0))
        return answer.token_ids
    finally:
        llm.shutdown()


@contextmanager
def torchrun(log: Path, *arguments: str) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """Two processes of ``minisgl ARGUMENTS``, and the mark that their environment has."""
    mark = uuid.uuid4().hex
    options = ("--standalone", "--nproc-per-node", "2", "--no-python")
    command = [str(BIN / "torchrun"), *options, str(BIN / "minisgl"), *arguments, "--tp-size", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCHRUN_TEST_MARK": mark}
    with log.open("wb") as file:
        command += ["--launcher", "torchrun"]
        process = subprocess.Popen(command, env=environment, stdout=file, stderr=subprocess.STDOUT)
    try:
        yield process, mark
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()


def processes(mark: str, **variables: str) -> list[int]:
    """Processes with this mark and these variables."""
    wanted = {f"{name}={value}".encode() for name, value in {"TORCHRUN_TEST_MARK": mark, **variables}.items()}
    found = []
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            try:
                found += [int(process.name)] if wanted <= set((process / "environ").read_bytes().split(b"\0")) else []
            except OSError:
                continue  # it has ended, or is another user's
    return found


def test_two_ranks_give_the_tokens_of_one(model: Path, expected: list[int], tmp_path: Path) -> None:
    ids = ",".join(map(str, IDS))
    work = ("--prompt-ids", ids, "--max-tokens", str(TOKENS), "--temperature", "0")
    with torchrun(tmp_path / "log", "generate", "--model", str(model), *SMALL, *work) as (process, mark):
        assert process.wait(180) == 0, (tmp_path / "log").read_text()
        assert processes(mark) == []
    text = (tmp_path / "log").read_text()
    assert text.count(" ".join(map(str, expected))) == 1, text


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_the_death_of_a_rank_ends_the_server(model: Path, rank: int, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with torchrun(log, "serve", "--model", str(model), "--port", "0", *SMALL) as (process, mark):
        end = time.monotonic() + 180
        while not (ready := re.search(r"ready: (http://\S+)/v1", log.read_text())):
            assert process.poll() is None and time.monotonic() < end, log.read_text()
            time.sleep(0.1)
        answer = httpx.post(f"{ready[1]}/v1/completions", json={"prompt": IDS, "max_tokens": 4}, timeout=60)
        assert answer.json()["usage"]["completion_tokens"] == 4
        for victim in processes(mark, RANK=str(rank)):
            os.kill(victim, signal.SIGKILL)
        assert process.wait(120) != 0
        end = time.monotonic() + 60
        while processes(mark):
            assert time.monotonic() < end, f"left behind: {processes(mark)}"
            time.sleep(0.1)
    # Rank 0 and torchrun both see it; the first to do so ends the other. torchrun's report names the rank in any case.
    assert re.search(rf"rank\s*: {rank} ", log.read_text()), log.read_text()


def test_without_torchrun_the_variable_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(UsageError, match="RANK is not set") as error:
        read_placement(2)
    assert "torchrun --nproc-per-node 2" in str(error.value)


def test_as_many_processes_as_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    values = ("1", "2", "1", "2", "127.0.0.1", "29500")
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    for name, value in zip(names, values, strict=True):
        monkeypatch.setenv(name, value)
    assert read_placement(2).local_rank == 1
    with pytest.raises(UsageError, match="torchrun has started 2 processes for 4 tensor-parallel ranks"):
        read_placement(4)
