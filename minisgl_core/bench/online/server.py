"""The server that is measured: one that runs, or one that is started for the measurement."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

from minisgl_core.errors import EngineError, UsageError

from .http import Endpoint

__all__ = ["ServerFacts", "detokenize", "read_facts", "started_server"]

ANSWER_S: Final = 30.0
STOP_S: Final = 60.0
_READY: Final = re.compile(r"ready: (http://\S+)/v1")
DEFAULT_IDS: Final = 10_000
"""Every large vocabulary has as many token ids."""

_CHILD: Final = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG: end as after SIGTERM when the parent is gone
if os.getppid() != int(sys.argv.pop(1)):
    sys.exit(1)
from minisgl_core.cli.app import main
sys.exit(main())
"""
"""``minisgl`` for a child: arguments are the parent's process id, then those of the command."""

ServerFacts = dict[str, Any]
"""``model``, ``vocab_size`` and ``server``: what it says of itself, None if it is no minisgl server"""


def read_facts(endpoint: Endpoint) -> ServerFacts:
    """Facts of a server that is ready. Raises :class:`UsageError` if it is not."""
    try:
        models = _call(endpoint, "/v1/models")["data"]
        model = str(models[0]["id"])
        _call(endpoint, "/health", as_json=False)
    except (OSError, http.client.HTTPException, ValueError, LookupError, TypeError) as error:
        why = error.reason if isinstance(error, urllib.error.URLError) else error
        raise UsageError(
            f"the server at {endpoint.url} cannot be measured: {why}",
            field="--url",
            value=endpoint.url,
            remedy="start one with `minisgl serve`, or leave out --url",
        ) from error
    try:
        info = _call(endpoint, "/server_info")
    except (OSError, ValueError):
        info = None
    if not isinstance(info, dict) or not isinstance(info.get("vocab_size"), int):
        return {"model": model, "vocab_size": DEFAULT_IDS, "server": None}
    info.get("config", {}).pop("model_path", None)  # a folder of one machine
    return {"model": model, "vocab_size": info["vocab_size"], "server": info}


def detokenize(endpoint: Endpoint, model: str, ids: Sequence[int]) -> str:
    """The text of token ids, by the server. Raises :class:`UsageError` if it cannot say it."""
    try:
        found = _call(endpoint, "/detokenize", {"model": model, "tokens": list(ids)})
        return str(found["prompt"])
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise UsageError(
            f"the server at {endpoint.url} does not detokenize: {error}",
            field="--prompts",
            value="text",
            remedy="use --prompts ids, or a trace with texts",
        ) from error


def _call(endpoint: Endpoint, path: str, body: Any = None, *, as_json: bool = True) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(endpoint.url + path, data, {"content-type": "application/json"})
    if endpoint.api_key:
        request.add_header("authorization", f"Bearer {endpoint.api_key}")
    with urllib.request.urlopen(request, timeout=ANSWER_S) as answer:
        content = answer.read()
    return json.loads(content) if as_json else content


class _Child:
    """A process whose standard error is read all the time, so that it never waits for its reader."""

    def __init__(self, arguments: Sequence[str]) -> None:
        command = [sys.executable, "-c", _CHILD, str(os.getpid()), "serve", "--port", "0", *arguments]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
        self.url = ""
        self.lines: list[str] = []
        self.known = threading.Event()
        """Set once it is ready or has ended."""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        with self.process.stderr as stderr:
            for line in stderr:
                if found := _READY.search(line):
                    self.url = found[1]
                    self.known.set()
                elif not line.startswith("{"):  # the access log
                    self.lines.append(line.strip())
        self.known.set()

    def stop(self) -> None:
        """End it as a user would, then by force."""
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._reader.join(1)


def _wait_ready(url: str) -> None:
    """Wait until requests are accepted, or have been refused for too long: the first of them will say why."""
    end = time.monotonic() + ANSWER_S
    while time.monotonic() < end:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/ready", timeout=ANSWER_S):
            return
        time.sleep(0.05)


@contextmanager
def started_server(arguments: Sequence[str]) -> Iterator[tuple[str, float]]:
    """Start ``minisgl serve`` with these arguments, and stop it afterwards. Yields its address and the seconds that the
    start took. Raises :class:`EngineError` with its last line if it does not start.
    """
    begin = time.perf_counter()
    child = _Child(arguments)
    try:
        child.known.wait()
        if not child.url:
            child.process.wait(STOP_S)
            said = next((line.removeprefix("error: ") for line in reversed(child.lines) if line), "no message")
            kind = UsageError if child.process.returncode == UsageError.exit_code else EngineError
            raise kind(f"the server did not start: {said}", field="serve", value=os.fspath(sys.executable))
        _wait_ready(child.url)
        yield child.url, time.perf_counter() - begin
    finally:
        child.stop()
