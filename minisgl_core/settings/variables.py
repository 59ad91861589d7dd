"""The names of all ``MINISGL_*`` variables. One that is misspelt is refused wherever minisgl starts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from minisgl_core.env import ENV
from minisgl_core.errors import ConfigError, nearest

from .sources import CONFIG_VARIABLE, PREFIX

__all__ = ["check_variables"]

_LIGHT: Final = frozenset({CONFIG_VARIABLE, f"{PREFIX}PLUGINS_ALLOW", f"{PREFIX}PLUGINS_DENY"})


def check_variables(environ: Mapping[str, str]) -> None:
    """Raise :class:`ConfigError`, naming the nearest known one, for an unknown ``MINISGL_*`` variable."""
    known = _LIGHT | {item.name for item in ENV.all()}
    if all(name in known for name in environ if name.startswith(PREFIX)):
        return
    from .load import backend_variables, setting_variables  # they bring pydantic

    known |= setting_variables().keys() | backend_variables().keys()
    for name in sorted(environ):
        if name.startswith(PREFIX) and name not in known:
            raise ConfigError(
                f"unknown environment variable {name}",
                field=name,
                value=environ[name],
                remedy=nearest(name, known) or "unset it",
            )
