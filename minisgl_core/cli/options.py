"""Options that several commands share, generated from the settings so that each is described once."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator
from typing import Any, TypeVar

import click

from minisgl_core.errors import ConfigError
from minisgl_core.settings.load import flag_name, load_settings
from minisgl_core.settings.schema import SECTIONS, Settings

__all__ = ["settings_options"]

F = TypeVar("F", bound=Callable[..., Any])


def settings_options(
    *sections: str, without: Collection[str] = ()
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Adds ``--config``, ``--backend`` and a flag for every setting of these sections except ``without``.

    The command receives them, merged with environment and file, as the argument ``settings``.
    """
    keys = [(name, key) for name in sections for key in SECTIONS[name].model_fields if f"{name}.{key}" not in without]

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        def command(config: str | None, backend: tuple[str, ...], **given: Any) -> Any:
            flags = {f"{name}.{key}": given.pop(_parameter(name, key)) for name, key in keys}
            settings = load_settings(config, flags, backend)
            with _naming_sources(settings):
                return function(settings=settings, **given)

        command.__doc__ = function.__doc__
        command.__name__ = function.__name__
        command.__click_params__ = list(getattr(function, "__click_params__", ()))  # type: ignore[attr-defined]
        for name, key in reversed(keys):
            command = _option(name, key)(command)
        command = click.option(
            "--backend",
            multiple=True,
            metavar="ROLE=NAME",
            help="Backend of a role, repeatable: attention=fa, attention.prefill=fa,flashinfer.",
        )(command)
        return click.option("--config", type=click.Path(), help="Config file instead of ./minisgl.toml.")(command)

    return decorate


@contextlib.contextmanager
def _naming_sources(settings: Settings) -> Iterator[None]:
    """Name the source of an option in errors of plugins, which do not know it."""
    try:
        yield
    except ConfigError as error:
        found = [source for name, source in settings.sources.items() if error.field.startswith(name)]
        if not error.field.startswith("backends.options.") or not found:
            raise
        message = f"{error.message} (from {found[0]})"
        raise ConfigError(message, field=error.field, value=error.value, remedy=error.remedy) from error


def _parameter(section: str, key: str) -> str:
    return f"{section}_{key}"


def _option(section: str, key: str) -> Callable[[F], F]:
    info = SECTIONS[section].model_fields[key]
    flag, default = flag_name(section, key), info.default
    shown = f"{info.description} [{default}]" if default not in (None, "") else info.description
    if info.annotation is bool:
        return click.option(f"{flag}/--no-{flag[2:]}", _parameter(section, key), default=None, help=shown)
    # values remain text here: the settings validate values from all sources
    return click.option(flag, _parameter(section, key), default=None, metavar=key.upper(), help=shown)
