"""The provenance of figures: code, machine, versions, command line."""

from __future__ import annotations

import json
import platform
import shlex
import subprocess
import sys
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any, Final

import torch

from minisgl_core import __version__
from minisgl_core.builtin.devices import detect_device

__all__ = ["UNKNOWN", "commit", "invocation", "provenance", "versions"]

UNKNOWN: Final = "unknown"


def provenance(device: str = "auto", at_commit: str | None = None) -> dict[str, Any]:
    """Commit, device, versions and command line, as JSON data. ``at_commit``: the commit, if the caller knows it."""
    found = detect_device(device)
    return {
        "commit": at_commit or commit(),
        "device": found.name or str(found),
        "versions": versions(),
        "command": invocation(),
    }


def invocation() -> str:
    """The command line of this process."""
    return shlex.join([Path(sys.argv[0]).name, *map(_without_folder, sys.argv[1:])])


def _without_folder(argument: str) -> str:
    """Remove folder names of this machine."""
    return Path(argument).name if Path(argument).is_absolute() else argument


def versions() -> dict[str, str]:
    """Versions of what a figure depends on in addition to the distributions of the plan."""
    found = {"minisgl": __version__, "torch": str(torch.__version__), "python": platform.python_version()}
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    for name in ("triton", "transformers"):
        with suppress(PackageNotFoundError):
            found[name] = distribution(name).version
    return found


def commit(module: Path = Path(__file__)) -> str:
    """The commit of the running code, with ``-dirty`` if it was changed since; for a package built from git, the commit
    it was built from; else ``unknown``.
    """
    return _checked_out(module) or _built_from() or UNKNOWN


def _checked_out(module: Path) -> str | None:
    """The commit of the checkout; None if ``module`` is not in a git checkout, or there is no git."""
    git = ["git", "-C", str(module.parent)]
    try:
        subprocess.run([*git, "ls-files", "--error-unmatch", module.name], check=True, capture_output=True, timeout=10)
        described = subprocess.run(
            [*git, "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"],
            check=True, capture_output=True, text=True, timeout=10,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    return described.stdout.strip() or None


def _built_from() -> str | None:
    """The commit that pip recorded when it built the package from a repository."""
    try:
        noted = json.loads(distribution("minisgl-core").read_text("direct_url.json") or "{}")
    except (PackageNotFoundError, ValueError):
        return None
    found = noted.get("vcs_info", {}).get("commit_id")
    return found if isinstance(found, str) else None
