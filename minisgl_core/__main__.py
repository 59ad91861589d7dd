"""``python -m minisgl_core``: the same as the program ``minisgl``."""

import sys

from minisgl_core.cli.app import main

if __name__ == "__main__":
    sys.exit(main())
