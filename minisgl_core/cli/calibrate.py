"""``minisgl calibrate``: times the backends that fit here, for the shapes of one model, and stores the result."""

from __future__ import annotations

import click

from minisgl_core.builtin.devices import detect_device
from minisgl_core.calibration.choose import apply, rules_of
from minisgl_core.modelconfig.geometries import GEOMETRIES
from minisgl_core.plugin_api.devices import DEVICE_CHOICES
from minisgl_core.progress import progress_counter
from minisgl_core.registry import discover
from minisgl_core.registry.explain import explain
from minisgl_core.settings.schema import Settings

from .explain import model_of, plan_query
from .measured import print_points
from .options import settings_options
from .output import json_option, print_json

__all__ = ["command"]


@click.command(name="calibrate")
@settings_options("model", "engine", without=("engine.device",))
@click.option("--geometry", "geometry_name", metavar="NAME", help=f"A shape without weights: {', '.join(GEOMETRIES)}.")
@click.option("--device", metavar="DEVICE", type=click.Choice(DEVICE_CHOICES), help="Where to measure. [auto]")
@click.option("--quick", is_flag=True, help="Fewer sizes and repetitions.")
@json_option
def command(settings: Settings, geometry_name: str | None, device: str | None, quick: bool, as_json: bool) -> int:
    """Measure which backends are fastest on this machine.

    Every backend that fits this model on this device is timed for every entry of the plan, over numbers of rows and
    lengths, at the shapes of one rank. From then on an open choice (`auto`) follows the measurements, on this machine
    and for these shapes, until a version changes; `minisgl explain` shows them. Exits with 1 if some backend could not
    be timed.
    """
    from minisgl_core.calibrate.measure import calibrate
    from minisgl_core.calibration.store import save
    from minisgl_core.testing import DeviceFixture

    model = model_of(settings, geometry_name)
    facts = detect_device(device or settings.engine.device)
    registry, query = discover(allow=settings.allow, deny=settings.deny), plan_query(settings, model, facts)
    found = calibrate(
        query,
        model,
        registry,
        DeviceFixture(facts),
        max_prefill_tokens=settings.engine.max_prefill_tokens,
        quick=quick,
        progress=progress_counter,
    )
    path = save(found)
    plan = explain(apply(query, model, registry)[0], registry).plan
    if as_json:
        rules = [] if plan is None else [item.to_json() for item in rules_of(plan, found.points)]
        print_json({**found.to_json(), "rules": rules, "file": str(path)})
    else:
        print_points(found, plan)
        for note in found.notes:
            click.echo(f"not measured: {note}")
        click.echo(f"\nkept in {path}; `minisgl explain` shows the whole plan")
    return 1 if found.notes else 0
