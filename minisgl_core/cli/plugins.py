"""``minisgl plugins``: what is installed. Imports neither torch nor pydantic."""

from __future__ import annotations

import os

import click

from minisgl_core.registry import PluginRecord, Registry, discover
from minisgl_core.settings.sources import plugin_lists, read_file

from .output import json_option, print_json, print_table

__all__ = ["command"]


@click.command(name="plugins")
@click.option("--config", type=click.Path(), help="Config file instead of ./minisgl.toml.")
@json_option
def command(config: str | None, as_json: bool) -> None:
    """List installed plugins, their backends and failures."""
    tables, file = read_file(config, os.environ)
    allow, deny = plugin_lists(tables, file, os.environ)
    registry = discover(allow=allow.value, deny=deny.value)
    if as_json:
        notes = [{"distribution": note.distribution, "text": note.text} for note in registry.notes]
        print_json({"plugins": [plugin.to_json() for plugin in registry.plugins], "notes": notes})
    else:
        _print(registry)


def _print(registry: Registry) -> None:
    print_table(
        ("DISTRIBUTION", "VERSION", "IMPORT MS", "EDITABLE", "STATUS", "FILE"),
        [
            (
                plugin.distribution,
                plugin.version or "?",
                f"{plugin.import_ms:.1f}",
                "yes" if plugin.editable else "no",
                _status(plugin),
                plugin.file or "-",
            )
            for plugin in registry.plugins
        ],
    )
    for plugin in registry.plugins:
        click.echo()
        click.echo(f"{plugin.distribution} ({plugin.entry_point})")
        if plugin.failure:
            click.echo(f"  failed    {plugin.failure}")
        if plugin.name:
            click.echo(f"  name      {plugin.name}")
        if plugin.hooks:
            click.echo(f"  hooks     {', '.join(plugin.hooks)}")
        if plugin.heavy_imports:
            click.echo(f"  imported  {', '.join(plugin.heavy_imports)} (a plugin's top package should import neither)")
        for effect in plugin.effects:
            click.echo(f"  effect    its import {effect}")
        if plugin.printed:
            click.echo(f"  printed   {plugin.printed!r} (to standard output, which is the command's)")
        for candidate in plugin.candidates:
            name = candidate.label.partition("@")[0]
            click.echo(f"  {candidate.spec.role}:{name}".ljust(28) + candidate.spec.summary)
    for note in registry.notes:
        click.echo(f"\nnote: {note.distribution}: {note.text}")


def _status(plugin: PluginRecord) -> str:
    if plugin.excluded:
        return f"excluded by plugins.{plugin.excluded}"
    return "failed" if plugin.failure else "ok"
