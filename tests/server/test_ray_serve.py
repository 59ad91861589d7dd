"""The Ray Serve example: two replicas, one of which is killed under load."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from openai import APIConnectionError, InternalServerError, OpenAI

from minisgl_core import LLM, SamplingParams

pytestmark = pytest.mark.slow
EXAMPLE = Path(__file__).parents[2] / "examples" / "ray_serve"
PROMPTS = [f"The number after {number} is" for number in range(12)]
TOKENS = 16
MODEL = "demo"
TOKEN = "RAY_EXAMPLE_TEST_ID"


def replicas(token: str) -> list[int]:
    """Processes of the replicas of the cluster whose environment holds ``token``."""
    found = []
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            try:
                if (process / "cmdline").read_bytes().startswith(b"ray::ServeReplica"):
                    environment = (process / "environ").read_bytes()
                    found += [int(process.name)] if token.encode() in environment else []
            except OSError:
                continue  # it has ended
    return found


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """Its address, and the mark of its processes."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    folder, token = tmp_path_factory.mktemp("ray"), uuid.uuid4().hex
    config = (EXAMPLE / "config.yaml").read_text()
    assert "port: 8000" in config
    (folder / "config.yaml").write_text(config.replace("port: 8000", f"port: {port}"))
    log = (folder / "log").open("w")
    # Ray's own monitoring would need the network, and its address must be one that a sandbox can reach.
    environment = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1", TOKEN: token}
    command = [str(Path(sys.executable).with_name("serve")), "run", str(folder / "config.yaml")]
    process = subprocess.Popen(command, cwd=EXAMPLE, env=environment, stdout=log, stderr=subprocess.STDOUT)
    url = f"http://127.0.0.1:{port}/v1"
    try:
        end = time.monotonic() + 240
        while True:
            assert process.poll() is None and time.monotonic() < end, (folder / "log").read_text()[-4000:]
            try:
                if httpx.get(f"{url}/models", timeout=5).status_code == 200 and len(replicas(token)) == 2:
                    break
            except httpx.HTTPError:
                pass
            time.sleep(0.5)
        yield url, token
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
        log.close()


@pytest.fixture(scope="module")
def expected() -> dict[str, str]:
    """The answer to each prompt alone."""
    llm = LLM(MODEL)
    try:
        params = SamplingParams(max_tokens=TOKENS, temperature=0, ignore_eos=True)
        return {prompt: llm.generate(prompt, params)[0].text for prompt in PROMPTS}
    finally:
        llm.shutdown()


def ask(url: str, prompt: str, stream: bool) -> tuple[str, int]:
    """The answer, and how often the request had to be repeated."""
    client = OpenAI(base_url=url, api_key="none", max_retries=0, timeout=120)
    options = {"model": MODEL, "prompt": prompt, "max_tokens": TOKENS, "temperature": 0}
    extra = {"ignore_eos": True}
    for repeated in range(40):
        try:
            if not stream:
                return client.completions.create(**options, extra_body=extra).choices[0].text, repeated
            chunks = list(client.completions.create(**options, extra_body=extra, stream=True))
            if chunks[-1].choices[0].finish_reason is not None:
                return "".join(chunk.choices[0].text for chunk in chunks), repeated
        except (APIConnectionError, InternalServerError, httpx.HTTPError):
            pass  # the replica has died
        time.sleep(0.5)
    raise AssertionError(f"no answer to {prompt!r}")


def test_two_replicas_answer_and_one_may_die(cluster: tuple[str, str], expected: dict[str, str]) -> None:
    url, token = cluster
    work = [(prompt, stream) for prompt in PROMPTS * 2 for stream in (False, True)]
    before = replicas(token)
    with ThreadPoolExecutor(8) as pool:
        answers = [pool.submit(ask, url, prompt, stream) for prompt, stream in work]
        while sum(answer.done() for answer in answers) < len(work) // 4:
            time.sleep(0.05)
        os.kill(before[0], signal.SIGKILL)
        texts = [answer.result() for answer in answers]
    wrong = [prompt for (prompt, _), (text, _) in zip(work, texts, strict=True) if text != expected[prompt]]
    assert not wrong
    assert sum(repeated for _, repeated in texts) < len(work) // 2, "most requests never met the replica that died"
    end = time.monotonic() + 180
    while len(alive := replicas(token)) != 2 or before[0] in alive:
        assert time.monotonic() < end, f"the replica was not replaced: {before} -> {alive}"
        time.sleep(0.5)
    assert before[1] in alive


def test_an_error_has_the_servers_own_shape(cluster: tuple[str, str]) -> None:
    answer = httpx.post(f"{cluster[0]}/completions", json={"prompt": "x", "no_such_field": 1}, timeout=60)
    assert answer.status_code == 400
    assert "no_such_field" in answer.json()["error"]["message"]
