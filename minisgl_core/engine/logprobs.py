"""Log-probabilities of sampled tokens, and of the likeliest ones, from the device to the host."""

from __future__ import annotations

from typing import NamedTuple

import torch

__all__ = ["LogprobRows", "TokenLogprobs", "read_logprobs", "to_host"]


class TokenLogprobs(NamedTuple):
    """Natural-log probabilities under the model's own distribution, before temperature and penalties."""

    token: int
    logprob: float
    top: list[tuple[int, float]]
    """(token id, logprob), likeliest first."""


class LogprobRows(NamedTuple):
    """Log-probabilities on their way to the host, for the rows of a batch that asked."""

    rows: list[int]
    wanted: list[int]
    chosen: torch.Tensor
    """(R,) float32, R the number of ``rows``"""
    values: torch.Tensor
    """(R, N) float32, N the most that any of them ``wanted``, at least 1"""
    ids: torch.Tensor
    """(R, N) int64"""

    def collect(self, tokens: list[int]) -> list[TokenLogprobs | None]:
        """One entry per row of the batch, None where not asked; ``tokens``: every row's."""
        found: list[TokenLogprobs | None] = [None] * len(tokens)
        chosen, values, ids = self.chosen.tolist(), self.values.tolist(), self.ids.tolist()
        for i, (row, n) in enumerate(zip(self.rows, self.wanted, strict=True)):
            top = list(zip(ids[i][:n], values[i][:n], strict=True))
            found[row] = TokenLogprobs(tokens[row], chosen[i], top)
        return found


def to_host(values: torch.Tensor) -> torch.Tensor:
    """A copy that is there when the device has come so far: nothing waits, not even for the passes launched later."""
    return values.to("cpu", non_blocking=True)


def read_logprobs(
    logits: torch.Tensor, tokens: torch.Tensor, count: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """logits (R, V), tokens (R,) int32 -> their log-probabilities (R,), the ``count`` largest ones (R, N), and of which
    tokens these are. A token of -1, NaN logits, counts as token 0.
    """
    table = torch.log_softmax(logits, dim=-1, dtype=torch.float32)
    chosen = table.gather(-1, tokens.clamp(min=0)[:, None].to(torch.int64))[:, 0]
    values, ids = table.topk(count, dim=-1)
    return chosen, values, ids
