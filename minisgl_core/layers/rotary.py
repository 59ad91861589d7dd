"""The table of rotary angles (Su et al. 2021, half-split pairing)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from minisgl_core.modelconfig import rope_inv_freq

if TYPE_CHECKING:
    from minisgl_core.modelconfig import RopeConfig

__all__ = ["rotary_table"]


def rotary_table(rope: RopeConfig, max_seq_len: int, device: torch.device) -> torch.Tensor:
    """(max_seq_len, R) float32: R/2 cosines, then R/2 sines, for each position."""
    inverse, scale = rope_inv_freq(rope, max_seq_len)
    angles = torch.outer(torch.arange(max_seq_len, dtype=torch.float32), torch.from_numpy(inverse))
    return torch.cat((angles.cos() * scale, angles.sin() * scale), dim=-1).to(device)
