"""The environment of child processes that import what the test can import."""

from __future__ import annotations

import os
import sys
from pathlib import Path

__all__ = ["child_env"]


def child_env(*folders: Path, **variables: str) -> dict[str, str]:
    """This process's environment, its import path with ``folders`` first, and ``variables``."""
    path = [*map(str, folders), *filter(None, sys.path)]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path), **variables}
