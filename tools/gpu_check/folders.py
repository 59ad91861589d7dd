"""The pytest tests that are marked ``gpu``, folder by folder."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from minisgl_core.registry import DeviceFacts

from .checks import ROOT, Check, Failed, Here, Skipped

__all__ = ["checks", "gpu_test_files", "read_junit", "run_pytest"]

MARK: Final = re.compile(r"\bmark\.gpu\b")
SECONDS: Final[Mapping[bool, float]] = {True: 25.0, False: 80.0}
"""With ``--quick``, and without"""
MORE: Final = {"minisgl_cuda": 6.0, "minisgl_moe": 2.0}
"""How many times as long the tests of these plugins take: measured on an H200, beside other checks"""
LIMIT_S: Final = 560.0
TOOLS: Final = Path(__file__).resolve().parents[1]
"""The folder that holds this package"""
SHOWN: Final = 6
MADE_ELSEWHERE: Final = ("test_conforms", "test_every_pairing_follows_the_reference")
"""The kit and the pairs of attention backends have checks of their own: ``--quick`` does not make them twice."""
CASES: Final = {"minisgl_cuda": (1, 2, 38, 45, 68, 70), "minisgl_moe": (71, 72, 74, 75), "minisgl_cpu_sim": (89,)}
"""By plugin: the reported faults that its tests name or hold kernels to."""
ALONE: Final = ("tests/engine",)
"""Folders whose tests read how much memory the whole device has left"""


def checks(device: DeviceFacts, quick: bool) -> list[Check]:
    """One check per folder that has such tests."""
    found = []
    for folder in sorted({path.parent for path in gpu_test_files(ROOT)}):
        name = str(folder.relative_to(ROOT))
        plugin = next((plugin for plugin in {**CASES, **MORE} if plugin in name), "")
        found.append(
            Check(
                f"pytest/{name}",
                partial(run, folder),
                SECONDS[quick] * MORE.get(plugin, 1.0),
                cases=CASES.get(plugin, ()),
                limit_s=LIMIT_S,
                alone=name in ALONE,
            )
        )
    return found


def gpu_test_files(root: Path) -> list[Path]:
    """Test files that mark something ``gpu``."""
    every = [*root.glob("tests/*/test_*.py"), *root.glob("plugins/*/tests/test_*.py")]
    return sorted(path for path in every if MARK.search(path.read_text()))


def run(folder: Path, here: Here) -> dict[str, Any]:
    """The tests of the folder's files that mark something."""
    files = [str(path.relative_to(ROOT)) for path in gpu_test_files(ROOT) if path.parent == folder]
    marks = "gpu and not multi_gpu" + (" and not slow" if here.quick else "")
    others = ["-k", " and ".join(f"not {name}" for name in MADE_ELSEWHERE)] if here.quick else []
    counts, failed = run_pytest(["-m", marks, *others, *files], here.scratch, f"{folder.parent.name}-{folder.name}")
    here.note(**counts)
    if failed:
        raise Failed("\n".join([f"{len(failed)} of {sum(counts.values())} tests failed:", *failed[:SHOWN]]))
    if not counts["passed"]:
        raise Skipped(f"no test could be run here, {counts['skipped']} skipped")
    return {}


def run_pytest(
    arguments: Sequence[str], scratch: Path, name: str, prefix: Sequence[str] = (), limit: float = LIMIT_S
) -> tuple[dict[str, int], list[str]]:
    """(tests by outcome, ``test: message`` of each failed one) of a pytest run in the checkout.

    ``prefix``: a program that starts the interpreter. Raises :class:`Failed` if pytest itself could not do it.
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
    # plugins of pytest that are modules of this package
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(TOOLS), os.environ.get("PYTHONPATH")]))}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=limit, check=False, env=env)
    lines = done.stdout.strip().splitlines()
    if done.returncode == 5:  # nothing was collected
        return {"passed": 0, "failed": 0, "skipped": 0}, []
    if done.returncode not in (0, 1) or not report.exists():
        told = [*lines[-8:], *done.stderr.strip().splitlines()[-4:]]
        raise Failed("\n".join([f"pytest ended with {done.returncode}", *told]))
    return read_junit(report)


def read_junit(path: Path) -> tuple[dict[str, int], list[str]]:
    """As :func:`run_pytest`, from the XML file that pytest wrote."""
    counts, failed = {"passed": 0, "failed": 0, "skipped": 0}, []
    for case in ET.parse(path).iter("testcase"):
        kinds = {child.tag: child for child in case}
        problem = kinds.get("failure", kinds.get("error"))
        if problem is not None:
            message = (problem.get("message") or "no message").splitlines()[0]
            failed.append(f"{case.get('name')}: {message}")
        counts["failed" if problem is not None else "skipped" if "skipped" in kinds else "passed"] += 1
    return counts, failed
