"""``PYTHONPATH=tests python -P -m support.gpu``: see ``--help``."""

import sys

from .command import main

if __name__ == "__main__":
    sys.exit(main())
