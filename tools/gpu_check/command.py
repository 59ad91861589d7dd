"""The command line of ``python tools/gpu_check``."""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from minisgl_core.builtin.devices import detect_device
from minisgl_core.errors import BackendError, MinisglError, UsageError
from minisgl_core.files import require_writable_folder
from minisgl_core.registry import DeviceFacts

from .checks import NO_COMPILATION, Check, Record
from .machine import versions
from .parts import named, parse_part, part_of
from .process import Settings, run_checks
from .report import Report, brief, default_path, header_of, merged
from .worker import run_order

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["main"]

QUICK_BUDGET_S: Final = 480.0
JOBS_ON_CUDA: Final = 5
THREADS: Final = "OMP_NUM_THREADS"
LISTED: Final = DeviceFacts("cuda", sm=90, name="NVIDIA H200")
"""Whose checks are listed where there is no GPU"""


def main(arguments: Sequence[str] | None = None) -> int:
    """0 if all is well, 1 if a check failed or was not come to, 2 if the call is wrong."""
    given = _parser().parse_args(arguments)
    if given.worker:
        return run_order(given.worker)
    try:
        return _merge(given) if given.merge else _run(given)
    except MinisglError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:  # whoever reads the list has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python tools/gpu_check", description="Every check of the GPU backends here.")
    parser.add_argument("--quick", action="store_true", help="prebuilt kernels only, within eight minutes on an H200")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: the stand-ins, tiny [cuda]")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these checks, such as versions or 'crowd/*'")
    parser.add_argument("--part", metavar="I/N", help="the I-th of N parts of about equal cost")
    parser.add_argument(
        "--list", action="store_true", help="list the checks and what they need, run none; needs no GPU"
    )
    parser.add_argument("--jobs", type=int, metavar="N", help=f"processes side by side [{JOBS_ON_CUDA}; cpu: 1]")
    parser.add_argument("--budget", type=float, metavar="SECONDS", help=f"of the run [quick: {QUICK_BUDGET_S:.0f}]")
    parser.add_argument("--json", type=Path, metavar="FILE", help="[benchmarks/results/gpu_check_DEVICE.json]")
    parser.add_argument("--merge", nargs="+", type=Path, metavar="FILE", help="join reports of parts, run nothing")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep models and logs there")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    return parser


def _merge(given: argparse.Namespace) -> int:
    report = merged([Report.read(path) for path in given.merge])
    if given.json:
        report.write(given.json)
    report.show(_console())
    return 0 if report.passed else 1


def _run(given: argparse.Namespace) -> int:
    for flag, value in (("--jobs", given.jobs), ("--budget", given.budget)):
        if value is not None and not value > 0:
            raise UsageError(f"{flag} is {value:g}", field=flag, value=value, remedy="give a number above 0")
    part = parse_part(given.part) if given.part else None
    if given.list:
        return _list(given, part)
    device = detect_device(given.device)
    chosen = _chosen(given, part, device)
    path = given.json or default_path(device, part)
    jobs = given.jobs or (JOBS_ON_CUDA if device.kind == "cuda" else 1)
    budget = given.budget or (QUICK_BUDGET_S if given.quick else None)
    options = {"quick": given.quick, "only": given.only, "part": given.part, "jobs": jobs, "budget_s": budget}
    report = Report(header_of(device, versions(), options)).expecting(chosen)
    with _scratch(given.keep) as scratch, _ended_by_signals():
        settings = Settings(
            device,
            given.quick,
            scratch,
            jobs=jobs,
            deadline=None if budget is None else time.monotonic() + budget,
            env=_environment(given.quick, jobs),
        )
        _run_and_report(chosen, settings, report, path)
    report.show(_console())
    print(f"report: {path}")
    return 0 if report.passed else 1


def _chosen(
    given: argparse.Namespace, part: tuple[int, int] | None, device: DeviceFacts, elsewhere: bool = False
) -> list[Check]:
    from .catalogue import checks

    chosen = checks(device, given.quick, elsewhere)
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
    for check in _chosen(given, part, device, elsewhere):
        notes = [f"needs {', '.join(check.needs)}"] if check.needs else []
        notes += [] if check.quick else ["not in --quick"]
        print(f"{check.name:60}{check.seconds:5.0f} s  {'; '.join(notes)}".rstrip())
    return 0


def _run_and_report(chosen: Sequence[Check], settings: Settings, report: Report, path: Path) -> None:
    began = time.monotonic()
    report.write(path)

    def finished(record: Record) -> None:
        report.records[record.name] = record
        report.seconds = time.monotonic() - began
        report.write(path)
        told = brief(record.figures) if record.status == "ok" else next(iter(record.error), "")
        print(f"{report.seconds:6.0f} s  {record.status:10} {record.name}  {told}", flush=True)

    try:
        run_checks(chosen, settings, finished)
    except KeyboardInterrupt:
        print("ended early", flush=True)
    report.seconds = time.monotonic() - began
    report.write(path)


def _environment(quick: bool, jobs: int) -> dict[str, str]:
    """Of every child. Threads beyond the cores would only wait for each other."""
    found = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_WAIT_POLICY": "passive"}
    if THREADS not in os.environ:
        found[THREADS] = str(max(1, len(os.sched_getaffinity(0)) // jobs))
    return found | ({NO_COMPILATION: "1"} if quick else {})


@contextlib.contextmanager
def _scratch(kept: Path | None) -> Iterator[Path]:
    if kept is not None:
        require_writable_folder(kept, "models and logs", field="--keep")
        folder = Path(tempfile.mkdtemp(prefix="gpu-check-", dir=kept)).resolve()
        print(f"models and logs: {folder}")
        yield folder
        return
    folder = Path(tempfile.mkdtemp(prefix="gpu-check-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[None]:
    """A termination ends the children too, and leaves the report."""

    def end(*_: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _console() -> Console:
    from rich.console import Console

    # A log has no width; a terminal of 80 columns would cut the names.
    return Console(highlight=False, width=None if sys.stdout.isatty() else 200)
