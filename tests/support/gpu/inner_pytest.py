"""A pytest run of other tests of the checkout, such as those that are marked ``gpu``."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from .check import ROOT, Context, Failed, Skipped

__all__ = ["LIMIT_S", "judge_counts", "marked_files", "read_junit", "run_pytest"]

LIMIT_S: Final = 560.0
SHOWN: Final = 6
"""Failed tests that are named"""
OWN: Final = ("gpu", "gpu_check")
"""Folders of the checks themselves and of their tests"""


def marked_files(mark: str, root: Path) -> list[Path]:
    """Test files that apply the mark, but for the checks themselves."""
    every = [*root.glob("tests/*/test_*.py"), *root.glob("plugins/*/tests/test_*.py")]
    use = re.compile(rf"\bmark\.{mark}\b")
    return sorted(path for path in every if path.parent.name not in OWN and use.search(path.read_text()))


def judge_counts(context: Context, counts: dict[str, int], failed: Sequence[str]) -> None:
    """Note the counts. Fail if a test failed; skip if none passed."""
    context.note(**counts)
    if failed:
        lines = [f"{len(failed)} of {sum(counts.values())} tests failed:", *failed[:SHOWN]]
        raise Failed("\n".join(lines), pytrace=False)
    if not counts["passed"]:
        raise Skipped(f"no test could be run here, {counts['skipped']} skipped")


def run_pytest(
    arguments: Sequence[str], scratch: Path, name: str, prefix: Sequence[str] = (), limit: float = LIMIT_S
) -> tuple[dict[str, int], list[str]]:
    """(tests by outcome, ``test: message`` of each failed one) of a pytest run in the checkout.

    ``prefix``: a program that starts the interpreter. Fails if pytest itself could not run.
    """
    scratch.mkdir(parents=True, exist_ok=True)
    report = scratch / f"junit-{name}.xml"
    options = ["-q", "-p", "no:cacheprovider", f"--junitxml={report}"]
    if find_spec("pytest_timeout") is None:
        # the checkout's settings name an option of that plugin, and strict settings would refuse it
        options += [
            "-o",
            "addopts=--import-mode=importlib --strict-markers",
            "-W",
            "ignore::pytest.PytestConfigWarning",
        ]
    # -P: the checkout's root would hide the installed distributions
    command = [*prefix, sys.executable, "-P", "-m", "pytest", *options, *arguments]
    path = os.pathsep.join(filter(None, [str(ROOT / "tests"), os.environ.get("PYTHONPATH")]))
    env = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=limit, check=False, env=env)
    lines = done.stdout.strip().splitlines()
    if done.returncode == 5:  # nothing was collected
        return {"passed": 0, "failed": 0, "skipped": 0}, []
    if done.returncode not in (0, 1) or not report.exists():
        lines = [*lines[-8:], *done.stderr.strip().splitlines()[-4:]]
        raise Failed("\n".join([f"pytest ended with {done.returncode}", *lines]), pytrace=False)
    return read_junit(report)


def read_junit(path: Path) -> tuple[dict[str, int], list[str]]:
    """The result of :func:`run_pytest`, from the XML file that pytest wrote."""
    counts, failed = {"passed": 0, "failed": 0, "skipped": 0}, []
    for case in ET.parse(path).iter("testcase"):
        kinds = {child.tag: child for child in case}
        problem = kinds.get("failure", kinds.get("error"))
        if problem is not None:
            message = (problem.get("message") or "no message").splitlines()[0]
            failed.append(f"{case.get('name')}: {message}")
        counts["failed" if problem is not None else "skipped" if "skipped" in kinds else "passed"] += 1
    return counts, failed
