"""Does a plugin keep the contract? Checks of its hooks, its API ranges and what its hooks return."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any, Final

from packaging.specifiers import InvalidSpecifier, SpecifierSet

from minisgl_core.errors import nearest
from minisgl_core.plugin_api import API_VERSIONS, HOOK_OF_ROLE, PROJECT, ROLES, BackendSpec, PluginInfo
from minisgl_core.plugin_api.spec_validation import spec_problems

__all__ = ["OBSERVER", "PluginFault", "check_api", "check_hooks", "check_specs"]

OBSERVER: Final = "minisgl_plan_resolved"

_KNOWN: Final = frozenset({*HOOK_OF_ROLE.values(), OBSERVER})
_PREFIX: Final = f"{PROJECT}_"


class PluginFault(Exception):
    """A plugin breaks the contract; the message completes ``plugin X is not used: ...``."""


def check_hooks(plugin: object) -> dict[str, Callable[..., Any]]:
    """The hooks that a plugin implements, by name. They are called directly: no plugin can affect another one's call.

    Refuses misspelt names (decorated or not), undecorated hooks, wrappers, generators, and a plugin with no hook.
    """
    implemented: dict[str, Callable[..., Any]] = {}
    for attribute in dir(plugin):
        value: Any = getattr(plugin, attribute, None)
        options = getattr(value, f"{PROJECT}_impl", None)
        decorated = isinstance(options, Mapping)
        if not decorated and not (attribute.startswith(_PREFIX) and inspect.isroutine(value)):
            continue
        name = (options.get("specname") if isinstance(options, Mapping) else None) or attribute
        if name not in _KNOWN:
            hint = nearest(name, _KNOWN) or f"the hooks are {', '.join(sorted(_KNOWN))}"
            raise PluginFault(f"it has an unknown hook {name}; {hint}")
        if not isinstance(options, Mapping):
            raise PluginFault(f"its {name} is not marked with @hookimpl")
        if options.get("hookwrapper") or options.get("wrapper"):
            raise PluginFault(f"its {name} is a hook wrapper, which could change other plugins' backends")
        if inspect.isgeneratorfunction(value) or inspect.iscoroutinefunction(value):
            raise PluginFault(f"its {name} is a generator or coroutine; return a list")
        if name in implemented:
            raise PluginFault(f"it implements {name} twice")
        _check_parameters(name, value)
        implemented[name] = value
    if not implemented:
        raise PluginFault(f"it implements no hook; the hooks are {', '.join(sorted(_KNOWN))}")
    return dict(sorted(implemented.items()))


def _check_parameters(name: str, hook: Any) -> None:
    """Parameters with a default are the plugin's own affair."""
    code = getattr(hook, "__code__", None)
    if code is None:
        return
    bound = 1 if getattr(hook, "__self__", None) is not None else 0
    required = code.co_varnames[bound : code.co_argcount - len(hook.__defaults__ or ())]
    given = ("plan",) if name == OBSERVER else ()
    if extra := [parameter for parameter in required if parameter not in given]:
        takes = f"only {', '.join(given)}" if given else "no parameters"
        raise PluginFault(f"its {name} requires {', '.join(extra)}; it takes {takes}")


def check_api(plugin: object, hooks: Collection[str]) -> None:
    """Refuse a plugin without ``MINISGL_PLUGIN`` or written for role APIs that this core does not serve."""
    info = getattr(plugin, "MINISGL_PLUGIN", None)
    if not isinstance(info, PluginInfo):
        raise PluginFault('it has no MINISGL_PLUGIN = PluginInfo(name=..., api={"attention": ">=1,<2", ...})')
    name: Any = info.name
    if not isinstance(name, str) or not name:
        raise PluginFault(f"MINISGL_PLUGIN.name is {info.name!r}; give the plugin a name")
    for role, text in info.api.items():
        if role not in API_VERSIONS:
            raise PluginFault(f"MINISGL_PLUGIN.api names the unknown role {role!r}; {nearest(role, ROLES)}".strip("; "))
        try:
            wanted = SpecifierSet(text)
        except InvalidSpecifier as error:
            raise PluginFault(f"MINISGL_PLUGIN.api[{role!r}] is {text!r}, not a version range") from error
        if not wanted.contains(API_VERSIONS[role], prereleases=True):
            raise PluginFault(f"it needs {role} API {text}, this core serves {API_VERSIONS[role]}")
    for role, hook in HOOK_OF_ROLE.items():
        if hook in hooks and role not in info.api:
            raise PluginFault(f'MINISGL_PLUGIN.api has no range for {role}; add "{role}": ">=1,<2"')


def check_specs(hook: str, specs: Any) -> list[BackendSpec]:
    """The specs that a hook returned, each checked field by field."""
    if not isinstance(specs, list | tuple):
        kind = "None" if specs is None else type(specs).__name__
        raise PluginFault(f"its {hook} returned {kind}; return a list of BackendSpec")
    role = next(role for role, name in HOOK_OF_ROLE.items() if name == hook)
    for spec in specs:
        if not isinstance(spec, BackendSpec):
            raise PluginFault(f"its {hook} returned a list holding {type(spec).__name__}; return a list of BackendSpec")
        if spec.role != role:
            raise PluginFault(f"its {hook} returned a spec of role {spec.role!r}")
        for problem in spec_problems(spec):
            raise PluginFault(f"the spec {role}:{spec.name}: {problem}")
    return list(specs)
