"""Tables and plots of a sweep."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from minisgl_core.bench.plot import Panel, line_charts

__all__ = ["client_warning", "error_lines", "plot", "point_rows", "sweep_rows"]

_LATENCIES: Final = (
    ("time to first token", "ttft_ms"),
    ("time per token after it", "tpot_ms"),
    ("between two events", "itl_ms"),
    ("end to end", "e2e_ms"),
)
_COLUMNS: Final = ("mean", "p50", "p90", "p99")

SWEEP_HEADERS: Final = (
    "load", "done", "requests/s", "tokens out/s", "TTFT p50", "p99", "TPOT p50", "p99", "ITL p99", "E2E p99", "goodput",
)  # fmt: skip


def _ms(figure: Mapping[str, float] | None, column: str) -> str:
    return "-" if figure is None else f"{figure[column]:,.2f}"


def _done(point: Mapping[str, Any]) -> str:
    return f"{point['completed']}/{point['requests']}"


def _goodput(point: Mapping[str, Any]) -> str:
    found = point["goodput"]
    return "-" if found is None else f"{found['request_s']:,.2f} ({found['share']:.0%})"


def sweep_rows(points: Sequence[Mapping[str, Any]], labels: Sequence[str]) -> list[tuple[str, ...]]:
    """One row per point, under :data:`SWEEP_HEADERS`; milliseconds."""
    return [
        (
            label,
            _done(one),
            f"{one['request_s']:,.2f}",
            f"{one['output_tok_s']:,.0f}",
            *(_ms(one[name], column) for name in ("ttft_ms", "tpot_ms") for column in ("p50", "p99")),
            _ms(one["itl_ms"], "p99"),
            _ms(one["e2e_ms"], "p99"),
            _goodput(one),
        )
        for label, one in zip(labels, points, strict=True)
    ]


def point_rows(point: Mapping[str, Any]) -> tuple[list[tuple[str, str]], list[tuple[str, ...]]]:
    """The rates of one point, and its latencies under mean, p50, p90 and p99."""
    rates = [
        ("requests completed", _done(point)),
        ("whole run", f"{point['seconds']:.3f} s"),
        ("requests per second", f"{point['request_s']:,.2f}"),
        ("tokens out per second", f"{point['output_tok_s']:,.0f}"),
        ("tokens in and out per second", f"{point['total_tok_s']:,.0f}"),
        ("tokens per event", f"{point['tokens_out'] / point['events']:.2f}" if point["events"] else "-"),
        ("requests in flight, mean and most", f"{point['concurrency']['mean']:.1f}, {point['concurrency']['max']}"),
    ]
    if point["goodput"] is not None:
        limits = ", ".join(f"{name} <= {limit:g} ms" for name, limit in point["goodput"]["objectives_ms"].items())
        rates.append((f"goodput ({limits}), requests per second", _goodput(point)))
    latencies = [(title, *(_ms(point[name], column) for column in _COLUMNS)) for title, name in _LATENCIES]
    return rates, latencies


def error_lines(points: Sequence[Mapping[str, Any]], labels: Sequence[str]) -> list[str]:
    """A line for each kind of error of each point."""
    return [
        f"{label}: {found['count']} of {point['requests']} requests failed: {kind} ({found['example']})"
        for label, point in zip(labels, points, strict=True)
        for kind, found in point["errors"].items()
    ]


def client_warning(points: Sequence[Mapping[str, Any]], labels: Sequence[str]) -> str:
    """Which points the client itself distorted; empty if none."""
    found = [
        f"{label} (event loop late by {point['client']['loop_lag_p99_ms']:.0f} ms at p99, "
        f"CPU {point['client']['cpu_share']:.0%})"
        for label, point in zip(labels, points, strict=True)
        if point["client"]["saturated"]
    ]
    return f"warning: the client was saturated, its delays are part of the latencies: {'; '.join(found)}" * bool(found)


def plot(title: str, points: Sequence[Mapping[str, Any]], labels: Sequence[str]) -> str:
    """An SVG: p99 of TTFT and TPOT, and throughput, at each load."""

    def values(name: str) -> list[float | None]:
        return [None if one[name] is None else one[name]["p99"] for one in points]

    panels = (
        Panel("time to first token, p99 (ms)", values("ttft_ms")),
        Panel("time per output token, p99 (ms)", values("tpot_ms")),
        Panel("tokens out per second", [one["output_tok_s"] for one in points]),
    )
    return line_charts(title, labels, panels)
