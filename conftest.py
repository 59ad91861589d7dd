"""Shared by all tests: the same surroundings, however they are started.

Without an NVIDIA driver, Triton kernels run in Triton's interpreter. The switch is read when triton is imported, so it
is thrown before any test module is. Jobs in the background of a shell ignore Ctrl-C, and so would everything that they
start; tests of Ctrl-C need it to work.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

if not Path("/proc/driver/nvidia").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
