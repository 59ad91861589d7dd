"""``minisgl new-plugin``: writes a new plugin distribution."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import click

from minisgl_core.plugin_api import Role
from minisgl_core.registry import discover
from minisgl_core.scaffold import SCAFFOLDED_ROLES, write_distribution

from .output import json_option, print_json

__all__ = ["command"]


@click.command(name="new-plugin")
@click.argument("name")
@click.option("--role", required=True, type=click.Choice(SCAFFOLDED_ROLES), help="What the backend does.")
@click.option("--out", metavar="DIR", help="Folder to write, new or empty. [./minisgl_NAME]")
@json_option
def command(name: str, role: str, out: str | None, as_json: bool) -> None:
    """Write a new plugin from a template.

    The distribution minisgl-NAME offers the backend ROLE:NAME. It contains one spec, one class in plain torch to be
    replaced by a kernel, and tests that the conformance kit derives from the spec, which pass immediately. Existing
    files are not overwritten.
    """
    folder = Path(out or f"minisgl_{name}")
    made = write_distribution(name, cast("Role", role), folder, discover())
    paths = sorted(made.contents())
    if as_json:
        print_json(
            {
                "distribution": made.distribution,
                "package": made.package,
                "backend": f"{made.role}:{made.name}",
                "folder": str(folder.resolve()),
                "files": paths,
            }
        )
        return
    for path in paths:
        click.echo(folder / path)
    click.echo(f"\nnext: pip install -e {folder} && minisgl verify {made.role}:{made.name} && {made.serve}")
