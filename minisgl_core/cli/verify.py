"""``minisgl verify``: the conformance kit on this machine, and its report card."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from minisgl_core.plugin_api import ROLES
from minisgl_core.plugin_api.devices import DEVICE_CHOICES
from minisgl_core.registry import discover
from minisgl_core.registry.selection import offers_of

from .output import json_option, print_json, print_table

if TYPE_CHECKING:
    from rich.console import Console

    from minisgl_core.testing import Report

__all__ = ["command"]

COLUMNS = ("passed", "failed", "note", "refused", "skipped")


@click.command(name="verify")
@click.argument("backend", metavar="ROLE:NAME[/VARIANT][@DISTRIBUTION]")
@click.option("--device", metavar="DEVICE", type=click.Choice(DEVICE_CHOICES), default="auto")
@click.option("--quick", is_flag=True, help="Fewer values per claim.")
@click.option("--check", "only", default="", metavar="TEXT", help="Only checks whose name contains TEXT.")
@click.option(
    "--limit", "limit_s", type=click.FloatRange(min=1), default=300.0, help="Seconds for one check. [300]", metavar="S"
)
@json_option
def command(backend: str, device: str, quick: bool, only: str, limit_s: float, as_json: bool) -> int:
    """Run the conformance kit on a backend.

    Every claim is tried at its limits; values just outside must be refused. The checks run in child processes, so that
    a crash, a hang or an exit fails only one check. Exits with 1 if a check fails.
    """
    role, registry = backend.partition(":")[0], discover()
    if role in ROLES:  # before torch is imported
        offers_of(backend, registry)

    from rich.progress import Progress

    from minisgl_core.testing import BackendUnderTest, DeviceFixture, suite_for, verify

    if ":" in backend:
        suite_for(role)
    fixture = DeviceFixture(device)
    under_test = BackendUnderTest.of(backend, fixture.facts, registry=registry)
    with Progress(transient=True, disable=not sys.stderr.isatty(), console=_console(stderr=True)) as bar:
        task = bar.add_task(under_test.label)
        report = verify(
            under_test,
            fixture,
            quick=quick,
            only=only,
            limit_s=limit_s,
            started=lambda total: bar.update(task, total=total),
            finished=lambda outcome: bar.update(task, advance=1, description=outcome.name),
        )
    if as_json:
        print_json(report.to_json())
    else:
        _print(report, _console())
    return 0 if report.passed else 1


def _console(*, stderr: bool = False) -> Console:
    from rich.console import Console

    return Console(stderr=stderr, highlight=False, soft_wrap=True, markup=False)


def _print(report: Report, console: Console) -> None:
    for outcome in report.of_status("failed"):
        console.print(f"FAILED {outcome.name}", style="bold red")
        console.print(f"  {outcome.detail}")
        if outcome.snippet:
            console.print("  " + outcome.snippet.replace("\n", "\n  ") + "\n", style="dim")
    for outcome in report.of_status("note"):
        console.print(f"note: {outcome.name}: {outcome.detail}", style="yellow")
    for reason, names in _refusals(report).items():
        console.print(f"refused here: {names[0]}{f' and {len(names) - 1} more' if names[1:] else ''}: {reason}")
    for print_part in (_print_summary, _print_groups, *([_print_speeds] if report.speeds else [])):
        click.echo()
        print_part(report)
    click.echo()
    counts = report.counts()
    verdict = "PASSED" if report.passed else "FAILED"
    parts = ", ".join(f"{counts[status]} {status}" for status in COLUMNS)
    console.print(f"{verdict}: {parts}, {report.seconds:.1f} s", style="green" if report.passed else "bold red")


def _refusals(report: Report) -> dict[str, list[str]]:
    """The checks that the backend refuses to run here, by reason."""
    found: dict[str, list[str]] = {}
    for outcome in report.of_status("refused"):
        found.setdefault(outcome.detail, []).append(outcome.name)
    return found


def _print_summary(report: Report) -> None:
    sm = f" sm{report.device['sm']}" if report.device["sm"] else ""
    rows = [
        ("device", f"{report.device['kind']}{sm} {report.device['name']}".rstrip()),
        ("versions", ", ".join(f"{name} {version}" for name, version in report.versions.items())),
    ]
    for dtype, (error, check) in report.worst_errors().items():
        rows.append((f"worst error, {dtype}", f"{error:.2e} in {check}" if error else "exact"))
    if report.finite_tail:
        rows.append(("finite_tail", "unused tails of pages held zeros; whole foreign pages held NaN"))
    print_table((report.backend, ""), rows)


def _print_groups(report: Report) -> None:
    groups: dict[str, dict[str, int]] = {}
    for outcome in report.outcomes:
        name = "/".join(outcome.name.split("/")[:-1][:2]) or outcome.name
        counts = groups.setdefault(name, dict.fromkeys(COLUMNS, 0))
        counts[outcome.status] += 1
    rows = [(name, *(counts[column] or "" for column in COLUMNS)) for name, counts in groups.items()]
    print_table(("CHECKS", *map(str.upper, COLUMNS)), rows)


def _print_speeds(report: Report) -> None:
    rows = [
        (
            speed.label,
            f"{speed.achieved:.4g} {speed.kind}",
            f"{speed.limit:.4g} {speed.kind}",
            f"{100 * speed.achieved / speed.limit:.0f} %",
            f"{speed.microseconds:.1f} us",
        )
        for speed in report.speeds
    ]
    print_table(("SPEED", "ACHIEVED", "THIS MACHINE'S LIMIT", "SHARE", "TIME"), rows)
