"""The namespace of this plugin's kernels: ``torch.ops.minisgl_moe``."""

from __future__ import annotations

from minisgl_core.plugin_api import KernelLibrary

__all__ = ["DEVICES", "library"]

library = KernelLibrary("minisgl_moe")
DEVICES = ("CUDA", "CPU")
"""On a CPU the Triton interpreter runs the same kernels (``TRITON_INTERPRET=1``)."""
