"""``python tools/gpu_check``: see ``--help``."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
# The package's parent instead of the package itself. The checkout's root stays off the path: the installed
# distributions are what is checked.
sys.path[:1] = [str(HERE.parent), str(HERE.parents[1] / "tests")]

from gpu_check.command import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
