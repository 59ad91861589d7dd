"""``[backends.options."ROLE:NAME"]``: each table is checked by its backend's own model, also while it is not chosen."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from minisgl_core.errors import ConfigError, nearest
from minisgl_core.plugin_api import ROLES, Role
from minisgl_core.sandbox import diverted_output, import_object

from .records import Candidate, Registry
from .selection import selects

__all__ = ["OptionsModelError", "check_options", "options_for", "options_setting", "read_options"]


class OptionsModelError(Exception):
    """The plugin's model cannot be used; the message says why."""


def options_for(candidate: Candidate, options: Mapping[str, Mapping[str, Any]]) -> Mapping[str, Any]:
    """The table of a backend: ``ROLE:NAME``, or ``ROLE:NAME@DIST`` where the bare name is another distribution's."""
    role, name = candidate.spec.role, candidate.spec.name
    own = options.get(f"{role}:{name}@{candidate.distribution}")
    return own if own is not None else options.get(f"{role}:{candidate.typed_name}", {})


def options_setting(role: Role, name: str) -> str:
    """How errors call the table."""
    return f'backends.options."{role}:{name}"'


def read_options(setting: str, model_path: str, options: Mapping[str, Any], owner: str) -> Any:
    """``options`` as an instance of the model that ``model_path`` names. ``owner``: whose it is, for the message.

    Raises :class:`ConfigError` for unknown keys and wrong values, :class:`OptionsModelError` for a model that fails.
    """
    try:
        with diverted_output():
            model = import_object(model_path)
        known = {field.alias or name for name, field in model.model_fields.items()}
    except (Exception, SystemExit) as error:
        raise OptionsModelError(f"{type(error).__name__}: {error}") from error
    for key, value in options.items():
        if key not in known:
            raise ConfigError(
                f"unknown option {key!r} in {setting}",
                field=f"{setting}.{key}",
                value=value,
                remedy=nearest(key, known) or f"it has {', '.join(sorted(known)) or 'no options'}",
            )
    try:
        return model.model_validate(dict(options))
    except ValueError as error:
        raise ConfigError(
            f"{setting} is not valid: {_first_problem(error)}",
            field=setting,
            value=dict(options),
            remedy=f"options of {owner}",
        ) from error


def _first_problem(error: ValueError) -> str:
    """``field: message, got value`` of a pydantic error, on one line."""
    problems: list[Any] = getattr(error, "errors", list)()
    if not problems:
        return str(error)
    first = problems[0]
    return f"{'.'.join(map(str, first['loc']))}: {first['msg']}, got {first['input']!r}"


def check_options(options: Mapping[str, Any], registry: Registry) -> None:
    """Raise :class:`ConfigError` for options of no backend, and for those that no backend of the name accepts.

    Several variants may share a name; the chosen one is asked again when it is built.
    """
    for key, table in options.items():
        _check_table(key, table, _owners(key, registry))


def _owners(key: str, registry: Registry) -> list[Candidate]:
    role, _, name = key.partition(":")
    owners = [item for known in ROLES if known == role for item in registry.candidates(known) if selects(name, item)]
    if not owners:
        names = {f"{item.spec.role}:{item.typed_name}" for known in ROLES for item in registry.candidates(known)}
        raise ConfigError(
            f'backends.options."{key}" belongs to no installed backend',
            field=f'backends.options."{key}"',
            value=key,
            remedy=nearest(key, names) or "`minisgl plugins` lists the backends",
        )
    return owners


def _check_table(key: str, table: object, owners: list[Candidate]) -> None:
    setting = options_setting(owners[0].spec.role, owners[0].spec.name)
    if not isinstance(table, Mapping):
        raise ConfigError(f"{setting} is {table!r}", field=setting, value=table, remedy="give a table of options")
    models = {item.spec.options: item for item in owners if item.spec.options}
    if table and not models:
        raise ConfigError(
            f"{setting} is set, but {key} takes no options", field=setting, value=dict(table), remedy="remove it"
        )
    refused: list[ConfigError] = []
    for model, owner in models.items() if table else ():
        try:
            read_options(setting, model or "", table, f"{owner.distribution} {owner.version}")
        except ConfigError as error:
            refused.append(error)
        except OptionsModelError:
            return  # what it accepts is only known once it can be imported
    if models and len(refused) == len(models):
        raise refused[0]
