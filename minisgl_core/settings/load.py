"""Merging the sources (flag > environment > file > default) and checking every name and value."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final, TypeVar

from pydantic import BaseModel, ValidationError

from minisgl_core.errors import ConfigError, nearest
from minisgl_core.plugin_api import OP_NAMES, PARSER_PARTS, ROLES

from .schema import SECTIONS, DebugSettings, EngineSettings, ModelSettings, ServerSettings, Settings
from .sources import PREFIX, Given, parse_backend_flags, plugin_lists, read_file, split_list
from .variables import check_variables

__all__ = ["backend_variables", "flag_name", "load_settings", "setting_variables", "variable_name"]

M = TypeVar("M", bound=BaseModel)

_SHORT: Final = {("model", "path"): "model"}
"""Settings whose flag and variable are not named by their key alone."""
_SHADOW: Final = "shadow"
"""In ``[backends]``, in addition to the roles: ``--backend shadow.attention=NAME`` means its keys too."""
_PARTS: Final[Mapping[str, tuple[str, ...]]] = {
    "attention": ("prefill", "decode"),
    "ops": OP_NAMES,
    "parser": PARSER_PARTS,
}
"""What a role can be chosen for one by one."""
_TABLES: Final = (*SECTIONS, "backends", "plugins")


def flag_name(section: str, key: str) -> str:
    """The command-line flag of a setting, such as ``--page-size``."""
    return "--" + _SHORT.get((section, key), key).replace("_", "-")


def variable_name(section: str, key: str) -> str:
    """The environment variable of a setting, such as ``MINISGL_PAGE_SIZE``."""
    return PREFIX + _SHORT.get((section, key), key).upper()


def load_settings(
    config: str | Path | None = None,
    flags: Mapping[str, Any] | None = None,
    backend_flags: Iterable[str] = (),
    environ: Mapping[str, str] | None = None,
) -> Settings:
    """The settings in force. ``flags`` are by ``section.key``, None = not given.

    Raises :class:`ConfigError`, naming the nearest known one, for an unknown table, key or ``MINISGL_*`` variable, and
    for a value that does not fit, naming where it was written.
    """
    environ = os.environ if environ is None else environ
    check_variables(environ)
    tables, file = read_file(config, environ)
    for table, content in tables.items():
        _check_table(table, content, file)
    given: dict[tuple[str, str], Given] = {}
    given.update(_from_file(tables, file))
    given.update(_from_environment(environ))
    for name, value in (flags or {}).items():
        section, _, key = name.partition(".")
        if value is not None:
            given[section, key] = Given(value, flag_name(section, key))
    allow, deny = plugin_lists(tables, file, environ)
    for key in tables.get("plugins", {}):
        _check_key(key, ("allow", "deny"), "key", f"[plugins] of {file}")
    backends, options, shadow = _backends(tables.get("backends", {}), file, environ, backend_flags)
    sources = {f"{section}.{key}": item.source for (section, key), item in given.items()}
    sources.update({f'backends.options."{key}"': file for key in options})
    return Settings(
        model=_validated("model", ModelSettings, given),
        engine=_validated("engine", EngineSettings, given),
        server=_validated("server", ServerSettings, given),
        debug=_validated("debug", DebugSettings, given),
        allow=allow.value,
        deny=deny.value,
        backends=backends,
        options=options,
        shadow=shadow,
        sources=sources,
    )


def _check_key(key: str, known: Iterable[str], what: str, where: str) -> None:
    known = list(known)
    if key not in known:
        raise ConfigError(
            f"unknown {what} {key!r} in {where}",
            field=key,
            value=key,
            remedy=nearest(key, known) or f"known are {', '.join(known)}",
        )


def _check_table(name: str, content: object, file: str) -> None:
    """A key outside any table belongs below one; a table must be known."""
    below = _owner(name)
    if name in _TABLES or (below is None and isinstance(content, Mapping)):
        _check_key(name, _TABLES, "table", file)
    elif below is not None:
        raise ConfigError(
            f"key {name!r} of {file} is outside a table", field=name, value=content, remedy=f"write it below [{below}]"
        )
    else:
        keys = [key for model in SECTIONS.values() for key in model.model_fields]
        near = nearest(name, keys)
        close = next((key for key in keys if near.endswith(f"{key!r}?")), "")
        raise ConfigError(
            f"unknown key {name!r} in {file}",
            field=name,
            value=content,
            remedy=f"did you mean {close!r}, below [{_owner(close)}]?" if close else f"tables are {', '.join(_TABLES)}",
        )


def _owner(key: str) -> str | None:
    """The table that a key belongs in; None if there is no such key."""
    owners = {key: name for name, model in SECTIONS.items() for key in model.model_fields}
    owners |= dict.fromkeys((*ROLES, "options", _SHADOW), "backends") | dict.fromkeys(("allow", "deny"), "plugins")
    return owners.get(key)


def setting_variables() -> dict[str, tuple[str, str]]:
    """Settings by environment variable."""
    return {variable_name(name, key): (name, key) for name, model in SECTIONS.items() for key in model.model_fields}


def backend_variables() -> dict[str, str]:
    """``ROLE`` or ``ROLE.PART``, as ``--backend`` takes it, by environment variable."""
    parts = [f"{role}.{part}" for role, names in _PARTS.items() for part in names]
    return {f"{PREFIX}BACKEND_{key.replace('.', '_').upper()}": key for key in (*ROLES, *parts)}


def _from_file(tables: Mapping[str, Any], file: str) -> dict[tuple[str, str], Given]:
    given: dict[tuple[str, str], Given] = {}
    for section, model in SECTIONS.items():
        table = tables.get(section, {})
        if not isinstance(table, Mapping):
            first = next(iter(model.model_fields))
            remedy = f"write it as a table: [{section}] with {first} = ..."
            raise ConfigError(f"{section} in {file} is {table!r}", field=section, value=table, remedy=remedy)
        for key in table:
            _check_key(key, model.model_fields, "key", f"[{section}] of {file}")
        found = {(section, key): Given(value, file) for key, value in table.items()}
        _validated(section, model, found, strict=True)  # a file has types: "16" is no integer
        given.update(found)
    return given


def _from_environment(environ: Mapping[str, str]) -> dict[tuple[str, str], Given]:
    return {place: Given(environ[name], name) for name, place in setting_variables().items() if environ.get(name)}


def _validated(
    section: str, model: type[M], given: Mapping[tuple[str, str], Given], *, strict: bool | None = None
) -> M:
    values = {key: item.value for (name, key), item in given.items() if name == section}
    try:
        return model.model_validate(values, strict=strict)
    except ValidationError as error:
        key = str(error.errors()[0]["loc"][0])
        item = given[section, key]
        raise ConfigError(
            f"{section}.{key} is {item.value!r} (from {item.source})",
            field=f"{section}.{key}",
            value=item.value,
            remedy=f"{_wanted(error, key)} ({model.model_fields[key].description})",
        ) from error


def _wanted(error: ValidationError, key: str) -> str:
    """What pydantic says of each alternative of a key's type: ``input should be ... or input should be ...``."""
    texts = [problem["msg"].removeprefix("Value error, ") for problem in error.errors() if problem["loc"][0] == key]
    return " or ".join(dict.fromkeys(text[0].lower() + text[1:].partition(", unable")[0] for text in texts))


def _check_choice(chosen: Mapping[str, Any], file: str) -> None:
    """Resolving checks the whole choice, but no longer knows which of its keys the file holds."""
    for role, value in chosen.items():
        _check_names(role, value, file)
        _check_key(role, (*ROLES, "options", _SHADOW), "key", f"[backends] of {file}")
        if role in _PARTS and isinstance(value, Mapping):
            for part in value:
                _check_key(part, (*_PARTS[role], "*"), "key", f"[backends.{role}] of {file}")


def _check_names(role: str, value: object, file: str) -> None:
    """A choice is a name, a list of names, or a table of these by part."""
    parts = list(value.values()) if isinstance(value, Mapping) else [value]
    names = [name for part in parts for name in (part if isinstance(part, list) else [part])]
    if not all(isinstance(name, str) and name for name in names):
        raise ConfigError(
            f"backends.{role} in {file} is {value!r:.80}",
            field=f"backends.{role}",
            value=value,
            remedy='give the name of a backend, such as "torch", or a list of names',
        )


def _backends(
    table: Any, file: str, environ: Mapping[str, str], flags: Iterable[str]
) -> tuple[dict[str, Any], dict[str, dict[str, Any]], dict[str, Any]]:
    """The choice by role, the options, and the shadow.

    A word on a whole role overrides what a weaker source says of its parts.
    """
    if not isinstance(table, Mapping):
        raise ConfigError(f"backends in {file} is {table!r}", field="backends", value=table, remedy="make it a table")
    options = table.get("options", {})
    if not isinstance(options, Mapping) or not all(isinstance(value, Mapping) for value in options.values()):
        raise ConfigError(
            f"backends.options in {file} is {options!r}",
            field="backends.options",
            value=options,
            remedy='write one table for each backend: [backends.options."ROLE:NAME"]',
        )
    shadow = table.get(_SHADOW, {})
    if not isinstance(shadow, Mapping):
        raise ConfigError(
            f"backends.shadow in {file} is {shadow!r}",
            field="backends.shadow",
            value=shadow,
            remedy='write a table: [backends.shadow] with attention or moe = "NAME", and every = N',
        )
    shadow = dict(shadow)
    chosen: dict[str, Any] = {role: value for role, value in table.items() if role not in ("options", _SHADOW)}
    _check_choice(chosen, file)
    from_environment = {
        key: split_list(environ[name]) for name, key in backend_variables().items() if environ.get(name)
    }
    for source in (from_environment, parse_backend_flags(flags)):
        for key, names in sorted(source.items()):
            role, _, part = key.partition(".")
            value: Any = names[0] if len(names) == 1 else names
            if role == _SHADOW:
                shadow[part or "attention"] = value
                continue
            if part:
                whole = chosen.get(role, "auto")
                value = {**(whole if isinstance(whole, Mapping) else {"*": whole}), part: value}
            chosen[role] = value
    return chosen, {key: dict(value) for key, value in options.items()}, shadow
