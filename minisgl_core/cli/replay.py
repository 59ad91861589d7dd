"""``minisgl replay``: runs a recorded step on any backend, and shrinks it to the smallest part that still fails."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from minisgl_core.plugin_api.devices import DEVICE_CHOICES

from .output import json_option, print_json, print_table

if TYPE_CHECKING:
    from minisgl_core.capsule.base import Capsule
    from minisgl_core.capsule.replay import ReplayReport
    from minisgl_core.testing import BackendUnderTest, DeviceFixture

__all__ = ["command"]


@click.command(name="replay")
@click.argument("file", metavar="FILE", type=click.Path(path_type=Path))
@click.option("--backend", required=True, metavar="ROLE:NAME", help="Backend to run it on.")
@click.option("--device", metavar="DEVICE", type=click.Choice(DEVICE_CHOICES), default="auto")
@click.option("--repeats", metavar="N", type=click.IntRange(min=0), default=20, help="Timings to take; 0 = none. [20]")
@click.option(
    "--shrink", "shrunk", metavar="OUT", type=click.Path(path_type=Path), help="Write the smallest part that fails."
)
@json_option
def command(file: Path, backend: str, device: str, repeats: int, shrunk: Path | None, as_json: bool) -> int:
    """Replay a step recording on a backend, without the model.

    Its result is compared with what was recorded and with a float64 reference, which decides. Exits with 1 if it is
    further away than the conformance kit allows, or raises.

    --shrink reduces a step that fails to fewer layers, tokens, heads or experts that still fail, to be kept as a test.
    """
    from minisgl_core.capsule.format import load_capsule
    from minisgl_core.capsule.replay import replay
    from minisgl_core.testing import BackendUnderTest, DeviceFixture

    capsule = load_capsule(file)
    fixture = DeviceFixture(device)
    under_test = BackendUnderTest.of(backend, fixture.facts, role=capsule.ROLE)
    report = replay(capsule, under_test, fixture, repeats=repeats)
    small = None if shrunk is None else _shrink(capsule, under_test, fixture, shrunk)
    if as_json:
        about = None if small is None else {"file": str(shrunk), "summary": small.summary()}
        print_json({**report.to_json(), "shrunk": about})
    else:
        _print(report)
        if small is not None and shrunk is not None:
            _print_use(small, shrunk, under_test)
    return 0 if report.passed else 1


def _shrink(capsule: Capsule, under_test: BackendUnderTest, fixture: DeviceFixture, path: Path) -> Capsule:
    from rich.console import Console
    from rich.progress import Progress

    from minisgl_core.capsule.shrink import shrink

    with Progress(transient=True, disable=not sys.stderr.isatty(), console=Console(stderr=True)) as bar:
        task = bar.add_task("shrinking", total=None)
        small = shrink(
            capsule, under_test, fixture, lambda tried, failed: bar.update(task, advance=1, description=tried.summary())
        )
    small.save(path)
    return small


def _print(report: ReplayReport) -> None:
    click.echo(f"{report.capsule}, recorded by {report.recorded_by or 'an unknown backend'}")
    versions = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    click.echo(f"{report.backend} on {report.device} ({versions})\n")
    rows = [
        (
            layer.layer,
            f"{layer.error:.2e}",
            f"{layer.against_recorded:.2e}",
            f"{layer.recorded_error:.2e}",
            layer.worst,
        )
        for layer in report.layers
    ]
    if rows:
        print_table(("LAYER", "ERROR", "FROM RECORDED", "RECORDED'S ERROR", "WORST"), rows)
    if report.layer_us is not None:
        metadata = "" if report.metadata_us is None else f"metadata {report.metadata_us:.1f} us a step, "
        click.echo(f"\n{metadata}{report.role} {report.layer_us:.1f} us a layer")
    verdict = f"PASSED: no error above {report.tolerance:.3g}" if report.passed else f"FAILED: {report.failure()}"
    click.secho(verdict, fg="green" if report.passed else "red")


def _print_use(small: Capsule, path: Path, under_test: BackendUnderTest) -> None:
    spec = repr(under_test.label) if under_test.installed else "SPEC"
    click.echo(f"\nthe smallest that still fails: {small.summary()}, in {path}")
    click.echo(
        "keep it next to a test:\n\n"
        "    from pathlib import Path\n"
        "    from minisgl_core.capsule.replay import check_capsule\n\n"
        f"    def test_{path.stem.replace('-', '_').replace('.', '_')}():\n"
        f"        check_capsule(Path(__file__).parent / {path.name!r}, {spec})"
    )
