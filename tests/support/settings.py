"""Settings of small engines, and what a backend declares that can do everything."""

from __future__ import annotations

from typing import Any, Final

import torch

from minisgl_core.plugin_api import ANY

__all__ = ["ANY_MODEL", "PAGED", "SHARED", "SMALL"]

SMALL: Final[dict[str, Any]] = {
    "dtype": torch.float32,
    "device": "cpu",
    "max_running_req": 4,
    "num_page_override": 64,
    "max_seq_len_override": 64,
    "progress": False,
}
"""A few short Reqs in float32 on the CPU"""

PAGED: Final[dict[str, Any]] = {**SMALL, "page_size": 4}
""":data:`SMALL` with pages of four tokens: page tables are not identities."""

SHARED: Final[dict[str, Any]] = {
    "dtype": torch.float32,
    "num_page_override": 512,
    "max_seq_len_override": 64,
    "max_running_req": 8,
    "progress": False,
}
"""An engine that many callers share"""

ANY_MODEL: Final[dict[str, Any]] = {
    "dtypes": ANY,
    "kv_dtypes": ANY,
    "head_dims": ANY,
    "gqa_ratios": ANY,
    "page_sizes": ANY,
    "kv_layouts": ("NHD",),
    "phases": ("prefill", "decode"),
    "graph": "decode",
}
"""Fields of ``Caps`` of a backend that serves every model without special features"""
