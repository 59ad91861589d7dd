"""Output of the measurements of ``minisgl calibrate``, for ``explain`` and ``calibrate``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click

from minisgl_core.calibration.choose import NOISE, rules_of
from minisgl_core.calibration.store import Calibration, Loaded, unmeasured
from minisgl_core.registry import Plan

from .output import print_table

__all__ = ["calibration_json", "print_calibration", "print_points"]

Candidates = Sequence[tuple[str, str]]
"""(entry, backend) of every candidate."""


def calibration_json(
    measured: Loaded, plan: Plan | None, candidates: Candidates, left_out: str | None
) -> dict[str, Any]:
    """The points, noise and rules of the plan (null without a calibration), what is ignored, and what was never
    measured.

    ``left_out``: why the calibration was not looked up, None = it was.
    """
    found = measured.calibration
    return {
        "points": None if found is None else found.to_json()["points"],
        "noise": None if found is None else found.noise,
        "rules": None if found is None or plan is None else [item.to_json() for item in rules_of(plan, found.points)],
        "left_out": left_out,
        "ignored": list(measured.ignored),
        "unmeasured": [] if found is None else unmeasured(found, candidates),
    }


def print_calibration(measured: Loaded, plan: Plan | None, candidates: Candidates, left_out: str | None) -> None:
    """Print the same as text; one line if there is no calibration."""
    if left_out is not None:
        click.echo(f"\nmeasurements of `minisgl calibrate` are left out: {left_out}")
        return
    for line in measured.ignored:
        click.echo(f"\ncalibration ignored: {line}; `minisgl calibrate` measures again")
    found = measured.calibration
    if found is None:
        if not measured.ignored:
            click.echo("\nnot measured on this machine: `minisgl calibrate` would do it")
        return
    click.echo("\nMeasured by `minisgl calibrate`\n")
    print_points(found, plan)
    for line in unmeasured(found, candidates):
        click.echo(f"not measured: {line}; measured ones come first")


def print_points(found: Calibration, plan: Plan | None) -> None:
    """Print a line for each size of each entry, then the resulting rule of the plan."""
    sizes: dict[tuple[str, int, int], list[str]] = {}
    for point in sorted(found.points, key=lambda point: point.microseconds):
        graph = " (graph)" if point.captured else ""
        sizes.setdefault((point.entry, point.rows, point.length), []).append(
            f"{point.backend} {point.microseconds:.4g}{graph}"
        )
    rows = [(entry, count, length or "", ", ".join(texts)) for (entry, count, length), texts in sorted(sizes.items())]
    print_table(("ENTRY", "ROWS", "TOKENS", "MICROSECONDS, FASTEST FIRST"), rows)
    if found.noise > NOISE:
        click.echo(
            f"\nnoise: equal measurements were up to {found.noise:.0%} apart, so smaller gains do not count; "
            "measure again on a quiet machine"
        )
    click.echo("\nThe plan that follows")
    for item in rules_of(plan, found.points) if plan is not None else ():
        click.echo(f"  {item}")
