"""The command line of ``make gpu-check``."""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from minisgl_core.bench.provenance import commit
from minisgl_core.builtin.devices import detect_device
from minisgl_core.errors import BackendError, MinisglError, UsageError
from minisgl_core.files import require_writable_folder

from .check import NO_COMPILATION, Check, Context, Record
from .child import serve
from .collect import LISTED, collected, named, parse_part, part_of
from .machine import versions
from .report import Report, brief, default_path, header_of, merged
from .runner import Settings, run_checks

__all__ = ["JOBS_ON_CUDA", "QUICK_BUDGET_S", "main"]

QUICK_BUDGET_S: Final = 480.0
JOBS_ON_CUDA: Final = 5
THREADS: Final = "OMP_NUM_THREADS"


def main(arguments: Sequence[str] | None = None) -> int:
    """0 if all is well, 1 if a check failed or was not run, 2 if the call is wrong."""
    given = _parser().parse_args(arguments)
    if given.child:
        return serve(given.child)
    try:
        return _merge(given) if given.merge else _run(given)
    except MinisglError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:  # the reader of the list has closed it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="make gpu-check", description="Every check of the GPU backends here.")
    parser.add_argument("--quick", action="store_true", help="prebuilt kernels only, within eight minutes on an H200")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: the stand-ins, tiny [cuda]")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these checks, such as versions or 'stress/*'")
    parser.add_argument("--part", metavar="I/N", help="the I-th of N parts of about equal cost")
    parser.add_argument("--list", action="store_true", help="list the checks and their needs, run none; needs no GPU")
    parser.add_argument("--jobs", type=int, metavar="N", help=f"processes at once [{JOBS_ON_CUDA}; cpu: 1]")
    parser.add_argument("--budget", type=float, metavar="SECONDS", help=f"of the run [quick: {QUICK_BUDGET_S:.0f}]")
    parser.add_argument("--json", type=Path, metavar="FILE", help="[benchmarks/results/gpu_check_DEVICE.json]")
    parser.add_argument("--commit", metavar="HASH", help="of the checkout, for the report [git's]")
    parser.add_argument("--merge", nargs="+", type=Path, metavar="FILE", help="join reports of parts, run nothing")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep models and logs there")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    return parser


def _merge(given: argparse.Namespace) -> int:
    report = merged([Report.read(path) for path in given.merge])
    if given.json:
        report.write(given.json)
    print(report.show())
    return 0 if report.passed else 1


def _run(given: argparse.Namespace) -> int:
    for flag, value in (("--jobs", given.jobs), ("--budget", given.budget)):
        if value is not None and not 0 < value < math.inf:
            raise UsageError(f"{flag} is {value:g}", field=flag, value=value, remedy="give a number above 0")
    part = parse_part(given.part) if given.part else None
    if given.list:
        return _list(given, part)
    device = detect_device(given.device)
    path = given.json or default_path(device, part)
    jobs = given.jobs or (JOBS_ON_CUDA if device.kind == "cuda" else 1)
    budget = given.budget or (QUICK_BUDGET_S if given.quick else None)
    deadline = None if budget is None else time.monotonic() + budget
    options = {"quick": given.quick, "only": given.only, "part": given.part, "jobs": jobs, "budget_s": budget}
    with _scratch(given.keep) as scratch:
        context = Context(device, given.quick, Path(scratch))
        chosen = _chosen(given, part, context)
        report = Report(header_of(device, versions(), given.commit or commit(), options)).expecting(chosen)
        settings = Settings(context, jobs, deadline, env=_environment(given.quick, jobs))
        _run_and_report(chosen, settings, report, path)
    print(report.show())
    print(f"report: {path}")
    return 0 if report.passed else 1


def _chosen(given: argparse.Namespace, part: tuple[int, int] | None, context: Context) -> list[Check]:
    chosen = collected(context)
    chosen = named(chosen, given.only) if given.only else chosen
    return part_of(chosen, *part) if part else chosen


def _list(given: argparse.Namespace, part: tuple[int, int] | None) -> int:
    """On a machine without a GPU: the checks that an H200 would get."""
    elsewhere = False
    try:
        device = detect_device(given.device)
    except BackendError:
        print(
            f"No GPU can be used here. These are the checks of an {LISTED.name} (compute capability 9.0) with every "
            f"library installed; all need the GPU. For those that can be made here: --device cpu",
            file=sys.stderr,
        )
        device, elsewhere = LISTED, True
    for check in _chosen(given, part, Context(device, given.quick, Path(), elsewhere=elsewhere)):
        notes = [f"needs {', '.join(check.needs)}"] if check.needs else []
        notes += [] if check.quick else ["not in --quick"]
        print(f"{check.name:60}{check.seconds:5.0f} s  {'; '.join(notes)}".rstrip())
    return 0


def _run_and_report(chosen: Sequence[Check], settings: Settings, report: Report, path: Path) -> None:
    began = time.monotonic()
    report.write(path)
    signal.signal(
        signal.SIGTERM, signal.default_int_handler
    )  # a termination ends the children too, and leaves a report

    def finished(record: Record) -> None:
        report.records[record.name] = record
        report.seconds = time.monotonic() - began
        report.write(path)
        print(f"{report.seconds:6.0f} s  {record.status:10} {record.name}  {brief(record)}", flush=True)

    try:
        run_checks(chosen, settings, finished)
    except KeyboardInterrupt:
        print("ended early", flush=True)
    report.seconds = time.monotonic() - began
    report.write(path)


def _environment(quick: bool, jobs: int) -> dict[str, str]:
    """Variables of every child. Threads beyond the cores would only wait for each other."""
    found = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_WAIT_POLICY": "passive"}
    if THREADS not in os.environ:
        found[THREADS] = str(max(1, len(os.sched_getaffinity(0)) // jobs))
    return found | ({NO_COMPILATION: "1"} if quick else {})


def _scratch(kept: Path | None) -> contextlib.AbstractContextManager[str]:
    """The folder of models and logs."""
    if kept is None:
        return tempfile.TemporaryDirectory(prefix="gpu-check-", ignore_cleanup_errors=True)
    require_writable_folder(kept, "models and logs", field="--keep")
    folder = tempfile.mkdtemp(prefix="gpu-check-", dir=kept.resolve())
    print(f"models and logs: {folder}")
    return contextlib.nullcontext(folder)
