"""Figures of one point from the times of its answers.

Definitions: the page ``bench-online.md`` of the documentation.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from minisgl_core.errors import UsageError, nearest

from .answer import Answer

__all__ = ["OBJECTIVES", "Client", "figures", "parse_objectives", "summary"]

OBJECTIVES: Final = ("ttft", "tpot", "e2e")
"""Latencies of a request that an objective can limit."""
MAX_LAG_MS: Final = 10.0
MAX_CPU_SHARE: Final = 0.9


@dataclass(frozen=True, slots=True)
class Client:
    """The state of the client while it measured."""

    lags: Sequence[float]
    """Seconds by which its event loop was late, sampled at fixed intervals."""
    cpu_s: float
    wall_s: float

    def to_json(self, answers: Sequence[Answer]) -> dict[str, Any]:
        """With ``saturated``: whether the client's own delays distort the figures."""
        lag = float(np.percentile(self.lags, 99)) * 1e3 if self.lags else 0.0
        late = [answer.sent - answer.due for answer in answers]
        cpu = self.cpu_s / self.wall_s if self.wall_s else 0.0
        return {
            "loop_lag_p99_ms": lag,
            "loop_lag_max_ms": max(self.lags, default=0.0) * 1e3,
            "sent_late_p99_ms": float(np.percentile(late, 99)) * 1e3 if late else 0.0,
            "cpu_share": cpu,
            "saturated": lag > MAX_LAG_MS or cpu > MAX_CPU_SHARE,
        }


def summary(seconds: Sequence[float]) -> dict[str, float] | None:
    """Mean, percentiles (interpolated linearly) and maximum, in milliseconds; None without a value."""
    if not seconds:
        return None
    values = np.asarray(seconds) * 1e3
    names = ("p50", "p90", "p99")
    found = dict(zip(names, map(float, np.percentile(values, (50, 90, 99))), strict=True))
    return {"mean": float(values.mean()), **found, "max": float(values.max())}


def figures(answers: Sequence[Answer], objectives: Mapping[str, float], client: Client) -> dict[str, Any]:
    """The figures of one point as JSON data. Latencies and throughput are of the answers without an error."""
    good = [answer for answer in answers if answer.error is None]
    begin = min((answer.sent for answer in answers), default=0.0)
    seconds = max((answer.end for answer in answers), default=begin) - begin
    gaps = [later - sooner for one in good for sooner, later in itertools.pairwise(one.times)]
    tokens_in, tokens_out = sum(one.prompt_tokens for one in good), sum(one.tokens for one in good)
    rate = 1 / seconds if seconds > 0 else 0.0
    met = sum(_meets(answer, objectives) for answer in good)
    return {
        "requests": len(answers),
        "completed": len(good),
        "errors": _errors(answers),
        "seconds": seconds,
        "request_s": len(good) * rate,
        "output_tok_s": tokens_out * rate,
        "total_tok_s": (tokens_in + tokens_out) * rate,
        "goodput": {"objectives_ms": dict(objectives), "request_s": met * rate, "share": met / max(1, len(answers))}
        if objectives
        else None,
        "tokens_in": tokens_in,
        "cached_tokens": sum(one.cached_tokens for one in good),
        "tokens_out": tokens_out,
        "events": sum(len(one.times) for one in good),
        "concurrency": {"mean": _mean_concurrency(answers, seconds), "max": _max_concurrency(answers)},
        "ttft_ms": summary([one.ttft for one in good]),
        "tpot_ms": summary([one.tpot for one in good if one.tpot is not None]),
        "itl_ms": summary(gaps),
        "e2e_ms": summary([one.latency for one in good]),
        "client": client.to_json(answers),
    }


def _meets(answer: Answer, objectives: Mapping[str, float]) -> bool:
    """Whether a request meets every objective; a single token has no TPOT to miss."""
    found = {"ttft": answer.ttft, "tpot": answer.tpot or 0.0, "e2e": answer.latency}
    return all(found[name] * 1e3 <= limit for name, limit in objectives.items())


def _errors(answers: Sequence[Answer]) -> dict[str, dict[str, Any]]:
    """By kind, the number of requests and one message."""
    found: dict[str, dict[str, Any]] = {}
    for answer in answers:
        if answer.error is not None:
            found.setdefault(answer.error, {"count": 0, "example": answer.detail})["count"] += 1
    return found


def _mean_concurrency(answers: Sequence[Answer], seconds: float) -> float:
    return sum(one.end - one.sent for one in answers) / seconds if seconds > 0 else 0.0


def _max_concurrency(answers: Sequence[Answer]) -> int:
    changes = sorted([(one.sent, 1) for one in answers] + [(one.end, -1) for one in answers])
    return max(itertools.accumulate(change for _, change in changes), default=0)


def parse_objectives(text: str) -> dict[str, float]:
    """``ttft:200,tpot:30`` in milliseconds; a space separates too. Raises :class:`UsageError`."""
    found: dict[str, float] = {}
    for part in text.replace(",", " ").split():
        name, _, limit = part.partition(":")
        try:
            found[name] = float(limit)
        except ValueError:
            found[name] = 0.0
        if name not in OBJECTIVES or not found[name] > 0:
            hint = nearest(name, OBJECTIVES) if name not in OBJECTIVES else ""
            remedy = hint or f"give milliseconds for {', '.join(OBJECTIVES)}, such as ttft:200,tpot:30"
            raise UsageError(f"--goodput has {part!r}", field="--goodput", value=text, remedy=remedy)
    return found
