"""Where settings come from, before they are understood: the config file, the environment, the command line.

Light on purpose: ``minisgl plugins`` reads its two lists with this module alone, without pydantic.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from minisgl_core.errors import ConfigError, UsageError

__all__ = [
    "CONFIG_VARIABLE",
    "DEFAULT_FILE",
    "PREFIX",
    "Given",
    "parse_backend_flags",
    "plugin_lists",
    "read_file",
    "split_list",
]

PREFIX: Final = "MINISGL_"
DEFAULT_FILE: Final = "minisgl.toml"
CONFIG_VARIABLE: Final = f"{PREFIX}CONFIG"


class Given(NamedTuple):
    """A value and where it was written, for error messages."""

    value: Any
    source: str


def read_file(config: str | Path | None, environ: Mapping[str, str]) -> tuple[dict[str, Any], str]:
    """(tables, file name) of ``config``, else of MINISGL_CONFIG, else of ``minisgl.toml`` here if there is one."""
    named = config or environ.get(CONFIG_VARIABLE)
    path = Path(named or DEFAULT_FILE)
    if not named and not os.path.lexists(path):
        return {}, str(path)
    try:
        with path.open("rb") as file:
            return tomllib.load(file), str(path)
    except OSError as error:
        raise UsageError(
            f"config file {path} cannot be read: {error.strerror}",
            field="config",
            value=str(path),
            remedy="check --config and MINISGL_CONFIG" if named else "make it a file, or name another with --config",
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"config file {path} is not TOML: {error}", field="config", value=str(path), remedy="correct that line"
        ) from error


def split_list(text: str) -> list[str]:
    """``"a, b"`` -> ``["a", "b"]``"""
    return [part.strip() for part in text.split(",") if part.strip()]


def parse_backend_flags(flags: Iterable[str]) -> dict[str, list[str]]:
    """Flags ``ROLE[.PART]=NAME[,NAME...]`` -> names by ``ROLE[.PART]``. Raises :class:`UsageError` for others."""
    found: dict[str, list[str]] = {}
    for flag in flags:
        key, equals, text = flag.partition("=")
        names = split_list(text)
        if not (equals and key.strip() and names):
            raise UsageError(
                f"--backend {flag!r} is not ROLE=NAME",
                field="--backend",
                value=flag,
                remedy="write it like attention=fa or attention.prefill=fa,flashinfer",
            )
        if key.strip() in found:
            raise UsageError(
                f"--backend {key.strip()} is given twice",
                field="--backend",
                value=flag,
                remedy=f"write an ordered list: {key.strip()}={','.join([*found[key.strip()], *names])}",
            )
        found[key.strip()] = names
    return found


def plugin_lists(tables: Mapping[str, Any], file: str, environ: Mapping[str, str]) -> tuple[Given, Given]:
    """``plugins.allow`` (None = all) and ``plugins.deny``; the environment wins over the file."""
    table = tables.get("plugins", {})
    if not isinstance(table, Mapping):
        raise ConfigError(f"[plugins] of {file} is {table!r}", field="plugins", value=table, remedy="make it a table")
    return _list(table, "allow", None, file, environ), _list(table, "deny", (), file, environ)


def _list(
    table: Mapping[str, Any], key: str, default: Sequence[str] | None, file: str, environ: Mapping[str, str]
) -> Given:
    variable = f"{PREFIX}PLUGINS_{key.upper()}"
    if variable in environ:
        return Given(tuple(split_list(environ[variable])), variable)
    if key not in table:
        return Given(default, "default")
    value = table[key]
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise ConfigError(
            f"plugins.{key} is {value!r} (from {file})",
            field=f"plugins.{key}",
            value=value,
            remedy="give a list of distribution names",
        )
    return Given(tuple(value), file)
