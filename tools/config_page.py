"""Writes the tables of docs/configuration.md from the models that the program itself checks settings with.

Its parts between marks (see ``marked.py``) are what :func:`parts` says; all else is written by hand.
``make config-page`` runs this; a test fails while the page says something else.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
from marked import rewritten, table
from pydantic import BaseModel

from minisgl_core.cli.app import COMMANDS
from minisgl_core.env import ENV
from minisgl_core.plugin_api import HOOK_OF_ROLE, BackendSpec
from minisgl_core.settings.load import backend_variables, flag_name, variable_name
from minisgl_core.settings.schema import SECTIONS

__all__ = ["PAGE", "parts"]

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "configuration.md"
_BOUNDS = {
    "minimum": "from {}",
    "exclusiveMinimum": "above {}",
    "maximum": "up to {}",
    "exclusiveMaximum": "below {}",
}


def parts() -> dict[str, str]:
    """The generated parts by name, each of whole lines."""
    found = {section: _section(section, model) for section, model in SECTIONS.items()}
    return {**found, "backend variables": _backend_variables(), "options": _options(), "switches": _switches()}


def _section(section: str, model: type[BaseModel]) -> str:
    commands = _commands_with(section)
    text = f"Flags of {', '.join(f'`{name}`' for name in commands)}." if commands else "No command has flags for these."
    schema = model.model_json_schema()["properties"]
    rows = []
    for key, info in model.model_fields.items():
        flag = flag_name(section, key)
        if info.annotation is bool:
            flag += f"` `--no-{flag[2:]}"
        names = f"`{flag}` `{variable_name(section, key)}`" if commands else f"`{variable_name(section, key)}`"
        rows.append((f"`{key}`", type_text(schema[key]), _default(info.default), names, info.description or ""))
    heads = ("key", "value", "default", "flag, variable" if commands else "variable", "meaning")
    return f"{text}\n\n{table(heads, rows)}"


def _commands_with(section: str) -> list[str]:
    """The commands that take flags of a section."""
    parameters = {f"{section}_{key}" for key in SECTIONS[section].model_fields}
    found = []
    for name, entry in COMMANDS.items():
        command: click.Command = importlib.import_module(entry.module).command
        if parameters & {parameter.name for parameter in command.params}:
            found.append(name)
    return found


def _backend_variables() -> str:
    rows = [(f"`{key}`", f"`{variable}`") for variable, key in backend_variables().items()]
    return table(("key", "variable"), rows)


def _options() -> str:
    texts = []
    for name, (package, model) in sorted(_option_models().items()):
        schema, meanings = model.model_json_schema()["properties"], _meanings(model)
        rows = [
            (f"`{key}`", type_text(schema[key]), _default(info.default), meanings[key])
            for key, info in model.model_fields.items()
        ]
        title = f'### `[backends.options."{name}"]`'
        texts.append(f"{title}\n\nOf {package}.\n\n{table(('key', 'value', 'default', 'meaning'), rows)}")
    return "\n\n".join(texts)


def _option_models() -> dict[str, tuple[str, type[BaseModel]]]:
    """(distribution, options model) by ``ROLE:NAME``, of the plugins in this repository."""
    found = {}
    for folder in sorted(ROOT.glob("plugins/*/src/*/plugin.py")):
        package = folder.parent.name
        for spec in _specs(importlib.import_module(f"{package}.plugin")):
            if spec.options:
                module, _, name = spec.options.partition(":")
                model = getattr(importlib.import_module(module), name)
                found[f"{spec.role}:{spec.name}"] = package.replace("_", "-"), model
    return found


def _specs(plugin: object) -> Iterator[BackendSpec]:
    for hook in HOOK_OF_ROLE.values():
        yield from getattr(plugin, hook, list)()


def _meanings(model: type[BaseModel]) -> dict[str, str]:
    """What each field describes itself with, or else the text below it. Raises :class:`ValueError` for one without."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(model))).body
    assert isinstance(tree, ast.ClassDef)
    found = {key: info.description or "" for key, info in model.model_fields.items()}
    for field, text in zip(tree.body, tree.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
            line = " ".join(str(text.value.value).split())
            found[ast.unparse(field.target)] = line.replace("``", "`").replace("None = ", "unset = ")
    silent = [key for key, meaning in found.items() if not meaning]
    if silent:
        raise ValueError(f"{model.__name__} does not say what {', '.join(silent)} means")
    return found


def _switches() -> str:
    rows = []
    for item in ENV.all():
        default = item.default
        text = "in the user's cache" if isinstance(default, Path) else f"`{json.dumps(default)}`"
        rows.append((f"`{item.name}`", item.accepts, text.replace("`false`", "`0`"), item.help))
    return table(("variable", "value", "default", "meaning"), rows)


def type_text(schema: Mapping[str, Any]) -> str:
    """What a JSON schema accepts, in words; null is not a word of TOML."""
    if "anyOf" in schema:
        return " or ".join(type_text(one) for one in schema["anyOf"] if one.get("type") != "null")
    values = schema.get("enum", [schema["const"]] if "const" in schema else [])
    if values:
        return _listed([f"`{json.dumps(value)}`" for value in values])
    if schema.get("type") == "array":
        return f"list of {type_text(schema['items'])}"
    if schema.get("format") == "directory-path":
        return "a folder"
    kind = {"string": "text", "integer": "whole number", "number": "number", "boolean": "true or false"}[schema["type"]]
    return " ".join([kind, *(text.format(schema[key]) for key, text in _BOUNDS.items() if key in schema)])


def _listed(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"


def _default(value: object) -> str:
    return "unset" if value in (None, "") else f"`{json.dumps(value)}`"


if __name__ == "__main__":
    PAGE.write_text(rewritten(PAGE.read_text(encoding="utf-8"), parts()), encoding="utf-8")
