"""From a choice to an object: import the factory, validate the options, construct. Failures name the backend."""

from __future__ import annotations

from typing import Any, Final

from minisgl_core.errors import BackendError, ConfigError, MinisglError
from minisgl_core.plan import Choice
from minisgl_core.plugin_api import API_VERSIONS, CannotRun
from minisgl_core.plugin_api.protocols import PROTOCOLS
from minisgl_core.sandbox import diverted_output, import_object

from .options import OptionsModelError, options_setting, read_options

__all__ = ["build", "fuses", "load_class"]

_FUSING: Final = ("fused_rows", "forward_fused")
"""What :class:`FusingLinear` adds to :class:`LinearBackend`."""


def build(choice: Choice, setup: object) -> Any:
    """``Class(setup, options)`` of a chosen backend, its methods checked.

    Raises :class:`ConfigError` for options that it does not accept, :class:`BackendError` for its refusal
    (:class:`CannotRun`) and for anything else that it raises.
    """
    cls = load_class(choice)
    options = _options(choice)
    try:
        with diverted_output():
            return cls(setup, options)
    except CannotRun as refused:
        raise _error(choice, f"cannot run here: {refused.reason}") from refused
    except MinisglError:
        raise
    except (Exception, SystemExit) as error:
        raise _error(choice, f"failed to start: {type(error).__name__}: {error}") from error


def load_class(choice: Choice) -> Any:
    """The class of a choice (models and platforms are constructed by the engine). Its role's methods are checked."""
    try:
        with diverted_output():
            cls = import_object(choice.factory)
    except MinisglError:
        raise
    except (Exception, SystemExit) as error:
        raise _error(choice, f"cannot be imported: {type(error).__name__}: {error}") from error
    missing = [name for name in _methods(choice, cls) if not callable(getattr(cls, name, None))]
    if missing:
        version = API_VERSIONS[choice.role]
        raise _error(choice, f"{choice.factory} lacks {', '.join(missing)} of the {choice.role} API {version}")
    return cls


def fuses(linear: object) -> bool:
    """Has this linear backend, or its class, the optional methods of :class:`FusingLinear`?"""
    return all(callable(getattr(linear, name, None)) for name in _FUSING)


def _methods(choice: Choice, cls: object) -> list[str]:
    protocol = PROTOCOLS.get(choice.role)
    if protocol is None:
        return []
    if choice.role == "ops":
        return [*choice.ops, "close"]
    wanted = [name for name, value in vars(protocol).items() if callable(value) and not name.startswith("_")]
    # Half of what is optional is a mistake. Without either it fuses nothing, whatever its caps list: before 1.2 of the
    # linear API their `ops` were not read.
    begun = choice.role == "linear" and any(hasattr(cls, name) for name in _FUSING)
    return [*wanted, *_FUSING] if begun else wanted


def _options(choice: Choice) -> Any:
    setting = options_setting(choice.role, choice.name)
    if choice.options_model is None:
        if choice.options:
            raise ConfigError(
                f"{choice.role}:{choice.name} takes no options", field=setting, value=dict(choice.options)
            )
        return None
    try:
        return read_options(setting, choice.options_model, choice.options, f"{choice.distribution} {choice.version}")
    except OptionsModelError as error:
        raise _error(choice, f"its options model cannot be used: {error}") from error


def _error(choice: Choice, what: str) -> BackendError:
    return BackendError(
        f"{choice.role} backend {choice.label} {choice.version} {what}",
        field=f"backends.{choice.role}",
        value=choice.name,
        remedy=f"choose another with --backend {choice.role}=NAME",
    )
