"""Shared by all tests: without an NVIDIA driver, Triton kernels run in Triton's interpreter.

The switch is read when triton is imported, so it is thrown before any test module is.
"""

from __future__ import annotations

import os
from pathlib import Path

if not Path("/proc/driver/nvidia").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")
