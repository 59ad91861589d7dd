"""``minisgl serve`` as a process: its start, its end, and what it leaves behind."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from openai import APIError, OpenAI

from minisgl_core.core import SamplingParams
from minisgl_core.llm import LLM

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
PROGRAM = str(Path(sys.executable).with_name("minisgl"))
SMALL = ("--device", "cpu", "--dtype", "float32", "--num-page-override", "512", "--max-seq-len-override", "64")


class Process:
    """A server of its own process; its standard error is read all the time."""

    def __init__(self, model: Path, *arguments: str) -> None:
        command = [PROGRAM, "serve", "--model", str(model), "--port", "0", *SMALL, *arguments]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        with self.process.stderr as stderr:
            self.lines.extend(stderr)

    def url(self, within_s: float = 120.0) -> str:
        """Of the server, once it is ready."""
        end = time.monotonic() + within_s
        while time.monotonic() < end and self.process.poll() is None:
            if found := re.search(r"ready: (http://\S+)/v1", self.stderr):
                return found[1]
            time.sleep(0.05)
        raise AssertionError(self.stderr)

    @property
    def stderr(self) -> str:
        return "".join(list(self.lines))

    def end(self, within_s: float = 60.0) -> int:
        code = self.process.wait(within_s)
        self._reader.join(10)
        return code


@contextmanager
def server(model: Path, *arguments: str) -> Iterator[Process]:
    process = Process(model, *arguments)
    try:
        yield process
    finally:
        process.process.kill()
        process.end()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_after_what_runs(model: Path, alone: LLM, number: int) -> None:
    (right,) = alone.generate([[5, 6, 7]], SamplingParams(max_tokens=50, ignore_eos=True))
    with server(model, "--served-model-name", "tiny") as process:
        url = process.url()
        more = {"ignore_eos": True}
        with (
            OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
            client.completions.create(
                model="tiny", prompt=[5, 6, 7], max_tokens=50, temperature=0, stream=True, extra_body=more
            ) as stream,
        ):
            chunks = iter(stream)
            text = next(chunks).choices[0].text
            process.process.send_signal(number)
            text += "".join(chunk.choices[0].text for chunk in chunks)
        assert text == right.text
        assert process.end() == 0, process.stderr
        assert '"status": 200' in process.stderr and "Traceback" not in process.stderr


def test_a_taken_port_fails_before_a_model_is_looked_for(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = subprocess.run(
            [PROGRAM, "serve", "--model", str(tmp_path / "none"), "--port", port],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: 127.0.0.1:{port} cannot be listened on: ") and "--port 0" in done.stderr


def test_a_model_that_cannot_be_loaded_ends_it_with_the_cause(model: Path, tmp_path: Path) -> None:
    broken = shutil.copytree(model, tmp_path / "broken")
    weights = next(broken.glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:1000])
    with server(broken) as process:
        assert process.end() == 1
        assert f"error: weight file {str(weights)!r}" in process.stderr and "Traceback" not in process.stderr


def test_a_second_interrupt_does_not_wait(model: Path) -> None:
    with server(model, "--served-model-name", "tiny") as process:
        url = process.url()
        processes = tree(process.process.pid)
        (files,) = re.findall(r"Max open files +(\S+) +(\S+)", Path(f"/proc/{processes[0]}/limits").read_text())
        assert files[0] == files[1], "as many as the system allows"
        request = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n"
        with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))) as unfinished:
            unfinished.sendall(request)  # its body does not come: it would be waited for
            process.process.send_signal(signal.SIGINT)
            assert eventually(lambda: refuses(url))
            process.process.send_signal(signal.SIGINT)
            assert process.end() == 130, process.stderr  # in far less time than the body would be waited for
        assert "Traceback" not in process.stderr and eventually(lambda: not any(map(is_alive, processes)))


@pytest.mark.slow
def test_two_ranks_answer_like_one(model: Path, alone: LLM) -> None:
    (right,) = alone.generate([[5, 6, 7]], SamplingParams(max_tokens=20))
    with (
        server(model, "--served-model-name", "tiny", "--tp-size", "2") as process,
        OpenAI(base_url=f"{process.url()}/v1", api_key="none", max_retries=0) as client,
    ):
        answer = client.completions.create(model="tiny", prompt=[5, 6, 7], max_tokens=20, temperature=0)
        assert answer.choices[0].text == right.text


@pytest.mark.parametrize(
    ("which", "cause"),
    [
        ("front", ""),
        ("engine", "error: the engine's process died without an exit report, exit code -9"),
        pytest.param("rank", "error: rank 1 died without an exit report, exit code -9", marks=pytest.mark.slow),
    ],
)
def test_the_death_of_any_process_under_load_ends_all(model: Path, which: str, cause: str) -> None:
    ranks = ("--tp-size", "2", "--distributed-timeout-s", "20") if which == "rank" else ()
    with server(model, "--served-model-name", "tiny", *ranks) as process:
        url = process.url()
        processes = tree(process.process.pid)
        assert len(processes) == (3 if ranks else 2)
        clients = [threading.Thread(target=keep_asking, args=(url,), daemon=True) for _ in range(4)]
        for client in clients:
            client.start()
        time.sleep(0.5)
        os.kill(processes[("front", "engine", "rank").index(which)], signal.SIGKILL)
        code = process.end(within_s=60)
        assert code == (-signal.SIGKILL if which == "front" else 1), process.stderr
        assert cause in process.stderr and "Traceback" not in process.stderr
        for client in clients:
            client.join(60)
        assert eventually(lambda: not any(map(is_alive, processes)))


def keep_asking(url: str) -> None:
    """Until the server answers no more."""
    with OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        while True:
            try:
                stream = client.completions.create(
                    model="tiny", prompt=[5, 6, 7], max_tokens=50, stream=True, extra_body={"ignore_eos": True}
                )
                for _ in stream:
                    pass
            except (APIError, httpx.HTTPError):
                return


def tree(pid: int) -> list[int]:
    """The process, its children, and theirs."""
    return [pid, *(found for child in children(pid) for found in tree(child))]


def children(pid: int) -> list[int]:
    found = [(task / "children").read_text().split() for task in Path(f"/proc/{pid}/task").iterdir()]
    return [int(child) for part in found for child in part if "minisgl_core.llm.worker" in command_line(int(child))]


def command_line(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")


def is_alive(pid: int) -> bool:
    """A container may have no process that reaps the dead."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def refuses(url: str) -> bool:
    try:
        httpx.get(f"{url}/health")
    except httpx.HTTPError:
        return True
    return False


def eventually(check: Callable[[], bool], within_s: float = 20.0) -> bool:
    end = time.monotonic() + within_s
    while time.monotonic() < end:
        if check():
            return True
        time.sleep(0.05)
    return False
