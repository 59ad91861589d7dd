"""Questions that only running code can answer, asked in a throw-away process: device facts and backends' own probes.

This process never initialises CUDA. A probe that crashes or hangs is a :class:`Reason`, and costs nothing else.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import os
import re
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from minisgl_core import __version__
from minisgl_core.env import ENV
from minisgl_core.errors import BackendError
from minisgl_core.plugin_api import Reason

from .query import DeviceFacts

__all__ = ["ProbeCrash", "ProbeProcess", "ProbeRequest", "detect_device", "run_probes"]

_DRIVER: Final = Path("/proc/driver/nvidia/version")
_TRACES: Final = ((Path("/proc/driver/nvidia"), "version"), (Path("/dev"), "nvidia[0-9]*"), (Path("/dev"), "dxg"))
"""Where a CUDA driver shows itself (containers may hide some of these, WSL has only the last). Without any of them no
process is started to ask."""
_CPU: Final = DeviceFacts(kind="cpu")


@dataclass(frozen=True, slots=True)
class ProbeRequest:
    """One backend's probe and what it is told. ``key`` names the candidate; version and driver date the answer."""

    key: str
    probe: str
    """``"package.module:function"``; empty = it has none"""
    facts: Mapping[str, Any]
    version: str = ""
    driver: str = ""

    def cache_key(self) -> str:
        """Equal only if the answer must be."""
        return _digest(self.key, self.probe, self.version, self.driver, _torch_version(), json.dumps(dict(self.facts)))


class ProbeCrash(Exception):
    """The process died, or did not answer in time."""

    def __init__(self, text: str, *, timed_out: bool = False) -> None:
        super().__init__(text)
        self.timed_out = timed_out


class ProbeProcess:
    """A child that answers JSON lines; started by the first question, and again after a crash."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        # a file: a pipe that nobody empties would stop a talkative child
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115

    def __enter__(self) -> ProbeProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()
        self._errors.close()

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The child's answer. Raises :class:`ProbeCrash` with what happened."""
        process = self._process or self._start()
        if process.stdin is None or process.stdout is None:
            raise AssertionError("the child was started with pipes")
        try:
            process.stdin.write(json.dumps(request).encode() + b"\n")
            process.stdin.flush()
        except BrokenPipeError:
            raise self._crash("could not start") from None
        # an answer is one short line, written at once: readable means that all of it is there
        readable, _, _ = select.select([process.stdout], [], [], self._timeout_s)
        if not readable:
            raise self._crash(f"did not answer within {self._timeout_s:g} s", timed_out=True)
        line = process.stdout.readline()
        if not line:
            raise self._crash("died")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _start(self) -> subprocess.Popen[bytes]:
        self._process = subprocess.Popen(
            [sys.executable, "-c", "from minisgl_core.registry.probe_child import main; main()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)},
        )
        return self._process

    def _crash(self, what: str, *, timed_out: bool = False) -> ProbeCrash:
        code = self._stop(patience_s=1.0 if what == "died" else 0.0)
        self._errors.seek(0)
        last = self._errors.read().decode(errors="replace").strip().splitlines()[-1:]
        ended = f" (exit code {code})" if what == "died" else ""
        return ProbeCrash(": ".join([what + ended, *last]), timed_out=timed_out)

    def _stop(self, patience_s: float = 1.0) -> int | None:
        """End the child, and the compilers it may have started; returns its exit code."""
        process, self._process = self._process, None
        if process is None:
            return None
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        try:
            return process.wait(timeout=patience_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return process.wait()


def run_probes(requests: Sequence[ProbeRequest]) -> dict[str, Reason]:
    """Run probes in one child; returns the refusals by key. What works is cached; a refusal is asked again
    at each start, since whoever reads it repairs what it names.
    """
    refused: dict[str, Reason] = {}
    with ProbeProcess(ENV.PROBE_TIMEOUT_S.value) as child:
        for request in requests:
            answer = _cached(request.cache_key())
            if answer is None:
                try:
                    answer = child.ask({"probe": request.probe, "with": dict(request.facts)})
                except ProbeCrash as crash:
                    longer = "MINISGL_PROBE_TIMEOUT_S gives it longer" if crash.timed_out else ""
                    refused[request.key] = Reason("probe", "probe", "a working backend", f"the probe {crash}", longer)
                    continue
                if answer["ok"]:
                    _store(request.cache_key(), answer)
            if not answer["ok"]:
                refused[request.key] = _reason(answer)
    return refused


def _reason(answer: Mapping[str, Any]) -> Reason:
    if "reason" in answer:
        return Reason(*answer["reason"])
    return Reason("probe", "probe", "a working backend", f"the probe raised {answer['error']}")


def detect_device(kind: str = "auto") -> DeviceFacts:
    """The device to run on: ``auto`` takes CUDA device 0 if there is one.

    Raises :class:`BackendError` if ``cuda`` is asked for and absent.
    """
    if kind == "cpu" or (kind == "auto" and not any(any(folder.glob(name)) for folder, name in _TRACES)):
        return _CPU
    found, problem = _ask_for_cuda()
    if found is None and kind == "cuda":
        raise BackendError(
            f"no CUDA device can be used: {problem}",
            field="device",
            value=kind,
            remedy="take the CPU (--device cpu), or see nvidia-smi",
        )
    return found or _CPU


def _ask_for_cuda() -> tuple[DeviceFacts | None, str]:
    driver = _driver_version()
    key = _digest("device", driver, _torch_version(), os.environ.get("CUDA_VISIBLE_DEVICES", ""), *_device_nodes())
    answer = _cached(key)
    if answer is None:
        try:
            with ProbeProcess(ENV.PROBE_TIMEOUT_S.value) as child:
                answer = child.ask({"facts": True})
        except ProbeCrash as crash:
            return None, f"the probe process {crash}"
        if not answer["ok"]:
            return None, str(answer.get("error"))
        if answer["device"] is not None:
            _store(key, answer)
    device = answer["device"]
    return (DeviceFacts(**device, driver=driver), "") if device else (None, "torch sees none")


def _driver_version() -> str:
    with contextlib.suppress(OSError):
        match = re.search(r"\b\d+\.\d+(\.\d+)?\b", _DRIVER.read_text())
        return match[0] if match else ""
    return ""


def _device_nodes() -> list[str]:
    """Device files and identities: another card in the same machine is another answer."""
    return sorted(str(path) for path in Path("/proc/driver/nvidia/gpus").glob("*"))


def _torch_version() -> str:
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return ""


def _digest(*parts: str) -> str:
    return hashlib.sha256(json.dumps([__version__, sys.executable, *parts]).encode()).hexdigest()[:32]


def _cache_file(key: str) -> Path:
    return ENV.CACHE_DIR.value / "probes" / f"{key}.json"


def _cached(key: str) -> dict[str, Any] | None:
    try:
        answer = json.loads(_cache_file(key).read_text())
    except (OSError, ValueError):
        return None
    return answer if isinstance(answer, dict) else None


def _store(key: str, answer: Mapping[str, Any]) -> None:
    """Written beside and renamed, so that two engines that start together never read half a file."""
    path = _cache_file(key)
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            file.write(json.dumps(answer))
        Path(file.name).replace(path)
