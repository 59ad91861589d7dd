"""Every figure of docs/performance.md in one go: latency, prefill and offline of several geometries, random weights.

    python benchmarks/gpu_all.py                                  # the documented geometries on a GPU, ten minutes
    python benchmarks/gpu_all.py --geometries qwen3-0.6b --modes latency    # named ones run without a GPU too
    python benchmarks/gpu_all.py --split FILE --out benchmarks/results    # one JSON file for each result of FILE

A geometry's engine starts once for all modes, in a process that may break without harm to the others. Each result is
in the file as soon as it is there. Medians of three runs where the time allows, of at least one in any case: ``runs``
in the JSON holds each of them. A machine that is lent for minutes at a time measures some geometries in each call.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from commandline import Parser, about, amount, need_gpu, positive, run

from minisgl_core.bench import make_workload
from minisgl_core.bench.isolated import Finished, Lost, supervised
from minisgl_core.bench.report import as_json
from minisgl_core.bench.session import model_folder, open_session
from minisgl_core.builtin.devices import detect_device
from minisgl_core.engine import EngineConfig
from minisgl_core.env import ENV
from minisgl_core.errors import UsageError
from minisgl_core.files import require_writable_folder, write_whole
from minisgl_core.modelconfig.geometries import geometry

GEOMETRIES = ("qwen3-0.6b", "qwen3-14b", "qwen3-30b-a3b", "llama-3.1-8b", "qwen2.5-7b", "qwen3-4b")
MODES = ("latency", "prefill", "offline")
RESULTS = Path(__file__).parent / "results"
CONTEXT = 4096
WARM_UP = 8
"""The warm-up is shorter than the work by this factor."""
GRACE_S = 40.0
"""Seconds for a run that has started; a run that takes longer is stopped."""


@dataclass(frozen=True, slots=True)
class Job:
    modes: tuple[str, ...]
    repeat: int
    requests: int | None
    deadline: float
    """By ``time.monotonic``, which all processes of a machine share"""
    about: Mapping[str, Any] = field(default_factory=dict)
    """Stored with every result."""


def share(deadline: float, parts: int) -> float:
    """When the first of ``parts`` should be done, if they share the time until ``deadline``."""
    now = time.monotonic()
    return now + max(0.0, deadline - now) / parts


def measure_geometries(connection: Connection, job: Job, names: tuple[str, ...], switches: Mapping[str, Any]) -> None:
    """Send the result of every mode of every geometry. Runs in a separate process."""
    for switch in ENV.all():
        switch.value = switches[switch.name]
    for at, name in enumerate(names):
        until = share(job.deadline, len(names) - at)
        try:
            with model_folder(geometry(name)) as folder:
                measure_one(connection, job, name, folder, until)
            connection.send(Finished())
        except Exception as error:  # the other geometries still count
            connection.send({"error": f"{type(error).__name__}: {error}"})
            connection.send(Finished(suspect=True))


def measure_one(connection: Connection, job: Job, name: str, folder: str, until: float) -> None:
    config = EngineConfig(folder, max_seq_len_override=CONTEXT, dummy_weights=True, progress=False)
    with open_session(config) as session:
        connection.send({"start_s": session.start_s})
        for at, mode in enumerate(job.modes):
            workload = make_workload(mode, requests=job.requests)
            result = session.measure(
                workload, job.repeat, warm_up=workload.warm_up(WARM_UP), until=share(until, len(job.modes) - at)
            )
            connection.send(as_json(workload, name, result, session, job.about))


def device_name() -> str:
    """Such as ``h200``."""
    return (detect_device().name or "cpu").lower().removeprefix("nvidia ").replace(" ", "-")


def keep(content: Mapping[str, Any], path: Path) -> None:
    write_whole(path, json.dumps(content, indent=1) + "\n", "the results", field="--out")


def measure_all(args: argparse.Namespace) -> int:
    names = tuple(args.geometries or GEOMETRIES)
    begin, device = time.monotonic(), device_name()
    target = args.out / f"{device}_all.json"
    job = Job(tuple(args.modes), args.repeat, args.requests, begin + args.seconds, about(args))
    content: dict[str, Any] = {**job.about, "starts_s": {}, "errors": {}, "results": {}}
    deadline = job.deadline + GRACE_S
    for name, message in supervised(measure_geometries, job, names, args.seconds, deadline):
        took = f"{time.monotonic() - begin:4.0f} s"
        if isinstance(message, Lost) or "error" in message:
            content["errors"][name] = message.why if isinstance(message, Lost) else message["error"]
            print(f"{took}  {name}: {content['errors'][name]}", flush=True)
        elif "mode" not in message:
            content["starts_s"][name] = message["start_s"]
            print(f"{took}  {name}: ready after {message['start_s']:.1f} s", flush=True)
        else:
            content["results"][f"{device}_{name}-{message['mode']}.json"] = message
            print(f"{took}  {name}: {line(message)}", flush=True)
        content["seconds"] = time.monotonic() - begin
        keep(content, target)
    print(target)
    return 1 if content["errors"] else 0


def line(result: Mapping[str, Any]) -> str:
    figures = [
        f"{result['tok_s']:,.0f} tok/s out, {result['in_tok_s']:,.0f} in, first after {result['ttft_ms']:.1f} ms",
        f"{result['limit_share']:.0%} of the limit, median of {result['repeat']}",
        f"slowest {result['slowest']['seconds'] / result['seconds']:.2f} times the median",
    ]
    if result["tpot_ms"] is not None:
        figures.append(f"{result['tpot_ms']:.3f} ms per token")
    if result["host_us_steady"] is not None:
        figures.append(f"host {result['host_us_steady']:.0f} us per steady step")
    return f"{result['mode']}: {', '.join(figures)}"


def split(source: Path, folder: Path) -> int:
    """One file for each result, as benchmarks/results holds them."""
    try:
        results = json.loads(source.read_text())["results"].items()
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise UsageError(
            f"--split {source} holds no results: {error}",
            field="--split",
            value=str(source),
            remedy="name a file that this script wrote, such as h200_all.json",
        ) from error
    for name, result in results:
        keep(result, folder / name)
        print(folder / name)
    return 0


def main() -> int:
    parser = Parser(__doc__)
    parser.add_argument("--geometries", nargs="+", help=f"{', '.join(GEOMETRIES)} on a GPU")
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=(*MODES, "shared-prefix"))
    parser.add_argument("--repeat", type=positive, default=3, help="where the time allows")
    parser.add_argument("--requests", type=positive, help="instead of each mode's own number")
    parser.add_argument("--seconds", type=amount, default=520.0, help="time to divide among the geometries")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", RESULTS)), help="$OUT, or results/")
    parser.add_argument("--split", type=Path, metavar="FILE", help="measure nothing, divide what was measured before")
    args = parser.parse_args()
    for name in args.geometries or ():
        geometry(name)  # a wrong name must fail before the measurement
    if args.split is None and args.geometries is None:
        need_gpu()
    require_writable_folder(args.out, "results", field="--out")
    return measure_all(args) if args.split is None else split(args.split, args.out)


if __name__ == "__main__":
    raise SystemExit(run(main))
