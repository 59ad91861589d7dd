"""``minisgl demo-model``: downloads the demo model and prints its path."""

from __future__ import annotations

import hashlib

import click

from minisgl_core.demo_model import DEMO_SHA256, ensure_demo_model
from minisgl_core.errors import CheckpointError

from .output import json_option, print_json

__all__ = ["command"]


@click.command(name="demo-model")
@json_option
def command(as_json: bool) -> None:
    """Download the demo model and print its path.

    Nothing is downloaded if it is in the cache. Its size and sha256 are verified; the result is reported on standard
    error.
    """
    path = ensure_demo_model()
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != DEMO_SHA256:
        raise CheckpointError(
            f"the demo model {str(path)!r} has sha256 {digest}, expected {DEMO_SHA256}",
            field="model",
            value=digest,
            remedy="delete the file and run this again",
        )
    size = path.stat().st_size
    if as_json:
        print_json({"path": str(path), "size": size, "sha256": digest})
    else:
        click.echo(path)
        click.echo(f"{size / 1e6:.1f} MB, sha256 {digest} as expected", err=True)
