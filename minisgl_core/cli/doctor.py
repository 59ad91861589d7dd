"""``minisgl doctor``: what is wrong with this installation."""

from __future__ import annotations

from pathlib import Path

import click

from minisgl_core.builtin.devices import detect_device
from minisgl_core.doctor import Diagnosis, diagnose
from minisgl_core.modelconfig import ModelConfig, read_model_config
from minisgl_core.modelconfig.geometries import GEOMETRIES, geometry
from minisgl_core.settings.schema import Settings

from .explain import plan_query
from .options import settings_options
from .output import json_option, print_json, print_table
from .start import find_model, refuse_two_models

__all__ = ["command"]

GIB = 2**30


@click.command(name="doctor")
@settings_options("model", "engine")
@click.option("--geometry", "geometry_name", metavar="NAME", help=f"A shape without weights: {', '.join(GEOMETRIES)}.")
@click.option("--timeout", "timeout_s", type=click.FloatRange(min=1), default=60.0, help="Seconds per question. [60]")
@json_option
def command(settings: Settings, geometry_name: str | None, timeout_s: float, as_json: bool) -> int:
    """Diagnose the installation and suggest remedies.

    Looks at metadata, imports every plugin in a fresh process, loads every backend for this device in another, and
    with a model (or --geometry) makes the plan of each tensor-parallel rank. Exits with 1 if anything is wrong.
    """
    click.echo("importing every plugin and loading every backend, each in a process of its own: some 10 s", err=True)
    device = detect_device(settings.engine.device)
    model, path = _model(settings, geometry_name)
    answer = diagnose(
        device,
        query=plan_query(settings, model, device) if model else None,
        model=path,
        allow=settings.allow,
        deny=settings.deny,
        timeout_s=timeout_s,
    )
    if as_json:
        print_json(answer.to_json())
    else:
        _print(answer)
    return 0 if answer.well else 1


def _model(settings: Settings, geometry_name: str | None) -> tuple[ModelConfig | None, Path | None]:
    """(its config, where its weights are); nothing is downloaded unless it is named."""
    refuse_two_models(settings, geometry_name)
    if geometry_name:
        return geometry(geometry_name), None
    if not settings.model.path:
        return None, None
    path = find_model(settings)
    return read_model_config(path), path


def _print(answer: Diagnosis) -> None:
    machine = answer.machine
    memory = ", ".join(f"{free / GIB:.1f} GiB free" for free in machine.free_bytes)
    devices = ", ".join(map(str, machine.devices))
    compiler = machine.compiler or "no C++ compiler"
    click.echo(f"Python {machine.python}, torch {machine.torch or 'missing'}, {devices}, {memory}, {compiler}\n")
    rows = [
        (
            item.distribution,
            item.module,
            "-" if item.ms is None else f"{item.ms:.1f}",
            ", ".join(item.heavy) or "-",
            "yes" if item.device_use else "no",
        )
        for item in answer.imports
    ]
    print_table(("DISTRIBUTION", "MODULE", "IMPORT MS", "HEAVY IMPORTS", "USES A DEVICE"), rows)
    for rank in answer.ranks:
        heads = f"{rank.q_heads} query heads, {rank.kv_heads} kv heads"
        click.echo(f"\nrank {rank.rank}: {rank.device}, {heads}, plan {rank.plan.digest()}")
        click.echo("  " + ", ".join(f"{entry}={backend}" for entry, backend in rank.plan.summary().items()))
    click.echo()
    for finding in answer.findings:
        click.echo(f"{finding.level.ljust(5)}  {finding}")
    wrong = sum(finding.level == "wrong" for finding in answer.findings)
    click.echo(f"{wrong} wrong, {len(answer.findings) - wrong} to note" if answer.findings else "nothing is wrong")
