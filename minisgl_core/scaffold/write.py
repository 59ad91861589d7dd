"""Checks names, fills in templates and writes files; existing files are not touched."""

from __future__ import annotations

import keyword
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from string import Template
from typing import Final

from packaging.version import Version

from minisgl_core import __version__
from minisgl_core.errors import UsageError
from minisgl_core.files import require_writable_folder
from minisgl_core.plugin_api import Role
from minisgl_core.registry import Registry

__all__ = ["SCAFFOLDED_ROLES", "Scaffold", "write_distribution"]

_NAME: Final = re.compile(r"[a-z](_?[a-z0-9])*")
_MEANS_ANY: Final = "auto"
_USE: Final[Mapping[Role, tuple[str, ...]]] = {
    "attention": ("attention",),
    "graph": ("graph",),
    "kv": ("kv",),
    "moe": ("moe",),
    "ops": ("ops.rms_norm", "ops.act_and_mul"),
    "parser": ("parser.tools",),
    "grammar": ("grammar",),
}
"""The key of ``--backend`` for a scaffold of each role."""
_SPARSE: Final[tuple[Role, ...]] = ("moe",)
"""Roles that the demo model does not use: it has no experts."""
_SUITE: Final[Mapping[Role, str]] = {
    "attention": "AttentionSuite",
    "graph": "GraphSuite",
    "kv": "KVSuite",
    "moe": "MoESuite",
    "ops": "OpsSuite",
    "parser": "ParserSuite",
    "grammar": "GrammarSuite",
}
_NOTE: Final = "Without `--model PATH` the last two use the demo model, which is downloaded once."
_SPARSE_NOTE: Final = (
    "The last two use a small geometry with experts and random weights. Replace it with `--model PATH`, or run "
    "`minisgl generate --model PATH`, to use your own model with experts."
)

SCAFFOLDED_ROLES: Final[tuple[Role, ...]] = tuple(_USE)
"""Roles that have a template."""


@dataclass(frozen=True, slots=True)
class Scaffold:
    """A distribution to be written. ``name`` is the name of the backend."""

    name: str
    role: Role
    folder: Path

    @property
    def distribution(self) -> str:
        """Such as ``minisgl-demo-attn``."""
        return f"minisgl-{self.name.replace('_', '-')}"

    @property
    def package(self) -> str:
        """Such as ``minisgl_demo_attn``."""
        return f"minisgl_{self.name}"

    @property
    def class_name(self) -> str:
        """Such as ``DemoAttn``."""
        return "".join(part.title() for part in self.name.split("_"))

    @property
    def backend_flags(self) -> str:
        """The flags that select the backend, such as ``--backend attention=demo_attn``."""
        return " ".join(f"--backend {slot}={self.name}" for slot in _USE[self.role])

    @property
    def explain(self) -> str:
        """The command that shows whether the backend is chosen, and why."""
        shape = " --geometry tiny-moe" if self.role in _SPARSE else ""
        return f"minisgl explain{shape} {self.backend_flags}"

    @property
    def serve(self) -> str:
        """The command that serves a few tokens with it: the demo model's, or those of random weights with experts."""
        if self.role in _SPARSE:
            return f"minisgl bench latency --short --geometry tiny-moe {self.backend_flags}"
        return f'minisgl generate {self.backend_flags} --prompt "The capital of France is" --max-tokens 16'

    def contents(self) -> dict[str, str]:
        """The text of each file, by its path below the folder."""
        core = Version(__version__)
        values = {
            "name": self.name,
            "role": self.role,
            "distribution": self.distribution,
            "package": self.package,
            "class_name": self.class_name,
            "explain": self.explain,
            "serve": self.serve,
            "note": _SPARSE_NOTE if self.role in _SPARSE else _NOTE,
            "suite": _SUITE[self.role],
            "core_range": f">={core.major}.{core.minor}",  # no upper end: the ranges of role APIs decide
        }
        return {path: Template(text).substitute(values) for path, text in self._templates()}

    def _templates(self) -> Iterator[tuple[str, str]]:
        """The (path, template) of every file."""
        root = files("minisgl_core.scaffold").joinpath("templates")
        source = f"src/{self.package}"
        places = {
            "pyproject.toml": "distribution/pyproject.toml",
            "README.md": "distribution/README.md",
            f"tests/test_{self.name}.py": "distribution/test.py",
            f"{source}/__init__.py": "distribution/init.py",
            f"{source}/plugin.py": f"{self.role}/plugin.py",
            f"{source}/{self.role}.py": f"{self.role}/backend.py",
        }
        for path, template in places.items():
            yield path, root.joinpath(f"{template}.tmpl").read_text(encoding="utf-8")


def write_distribution(name: str, role: Role, folder: Path, registry: Registry) -> Scaffold:
    """Write a distribution for the backend ``role:name`` into ``folder``, which is created if necessary.

    Raises :class:`UsageError` for a role without a template, a name that is not a lower-case Python name or is used by
    an installed package or backend, and a folder that is not writable or not empty.
    """
    if role not in SCAFFOLDED_ROLES:
        raise UsageError(
            f"there is no scaffold for role {role!r}",
            field="role",
            value=role,
            remedy=f"there is one for {', '.join(SCAFFOLDED_ROLES)}",
        )
    made = Scaffold(name, role, folder)
    _check_name(made, registry)
    existed = os.path.exists(folder)  # unlike Path.exists, it does not raise for a name that is too long
    require_writable_folder(folder, "the plugin", field="--out")
    if any(folder.iterdir()):
        raise UsageError(
            f"{str(folder)!r} exists and is not an empty folder",
            field="--out",
            value=str(folder),
            remedy="nothing is overwritten: name another folder with --out",
        )
    try:
        for path, text in made.contents().items():
            place = folder / path
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(text, encoding="utf-8")
    except OSError as error:
        _remove(folder, keep=existed)
        raise UsageError(
            f"the plugin cannot be written to {str(folder)!r}: {error.strerror}; nothing is left there",
            field="--out",
            value=str(folder),
            remedy="make room, or name a folder on another disk",
        ) from error
    return made


def _remove(folder: Path, *, keep: bool) -> None:
    """Empty a folder that was empty before; remove it too if it was not there."""
    for child in folder.iterdir():
        if child.is_dir():
            shutil.rmtree(child, ignore_errors=True)
        else:
            child.unlink()
    if not keep:
        folder.rmdir()


def _check_name(made: Scaffold, registry: Registry) -> None:
    name = made.name
    if not _NAME.fullmatch(name):
        remedy = "use lower-case letters, digits and single underscores, a letter first and no underscore last"
        raise _bad_name(name, "is no name for a backend", remedy)
    if len(name) == 1:
        raise _bad_name(name, "is too short", "use two characters or more")
    if keyword.iskeyword(name):
        raise _bad_name(name, "is a keyword of Python", "choose another name")
    if name == _MEANS_ANY:
        raise _bad_name(name, "means any backend, wherever one is chosen", "choose another name")
    taken = [item for item in registry.candidates(made.role) if item.spec.name == name]
    if taken:
        raise _bad_name(name, f"is taken: {taken[0].distribution} offers {made.role}:{name}", "choose another name")
    if find_spec(made.package) is not None:
        raise _bad_name(name, f"is taken: there is a package {made.package}", "choose another name, or uninstall it")


def _bad_name(name: str, what: str, remedy: str) -> UsageError:
    return UsageError(f"NAME {name!r} {what}", field="NAME", value=name, remedy=remedy)
