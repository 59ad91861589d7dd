"""Does a plugin keep the contract? Checks of its hooks, its API ranges and its specs, before anything is registered."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from packaging.specifiers import InvalidSpecifier, SpecifierSet

from minisgl_core.errors import nearest
from minisgl_core.plugin_api import (
    API_VERSIONS,
    HOOK_OF_ROLE,
    PROJECT,
    ROLES,
    BackendSpec,
    Caps,
    PluginInfo,
)

from .claims import box_problems, requirement_problem
from .ranking import AUTO

__all__ = ["HOOKS", "OBSERVERS", "PluginFault", "check_api", "check_hooks", "check_specs"]

HOOKS: Final[Mapping[str, str]] = HOOK_OF_ROLE
"""Hook name by role."""
OBSERVERS: Final = ("minisgl_plan_resolved",)

_KNOWN: Final = frozenset({*HOOKS.values(), *OBSERVERS})
_PREFIX: Final = f"{PROJECT}_"
_IMPORT_STRING: Final = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
_BACKEND_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


class PluginFault(Exception):
    """A plugin breaks the contract; the message completes ``plugin X is not used: ...``."""


def check_hooks(plugin: object) -> tuple[str, ...]:
    """The names of the hooks that a plugin implements.

    Refuses misspelt names (decorated or not), undecorated hooks, wrappers, generators, and a plugin with no hook.
    """
    implemented = []
    for attribute in dir(plugin):
        value = getattr(plugin, attribute, None)
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
        _check_parameters(name, value)
        implemented.append(name)
    if not implemented:
        raise PluginFault(f"it implements no hook; the hooks are {', '.join(sorted(_KNOWN))}")
    return tuple(sorted(implemented))


def _check_parameters(name: str, hook: Any) -> None:
    """Parameters with a default are the plugin's own affair."""
    code = getattr(hook, "__code__", None)
    if code is None:
        return
    bound = 1 if getattr(hook, "__self__", None) is not None else 0
    asked = code.co_varnames[bound : code.co_argcount - len(hook.__defaults__ or ())]
    given = ("plan",) if name in OBSERVERS else ()
    if extra := [parameter for parameter in asked if parameter not in given]:
        takes = f"only {', '.join(given)}" if given else "no parameters"
        raise PluginFault(f"its {name} asks for {', '.join(extra)}; it takes {takes}")


def check_api(plugin: object, hooks: Sequence[str]) -> None:
    """Refuse a plugin without ``MINISGL_PLUGIN`` or written for role APIs that this core does not serve."""
    info = getattr(plugin, "MINISGL_PLUGIN", None)
    if not isinstance(info, PluginInfo):
        raise PluginFault('it has no MINISGL_PLUGIN = PluginInfo(name=..., api={"attention": ">=1,<2", ...})')
    if not _is_text(info.name):
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
    for role, hook in HOOKS.items():
        if hook in hooks and role not in info.api:
            raise PluginFault(f'MINISGL_PLUGIN.api has no range for {role}; add "{role}": ">=1,<2"')


def check_specs(hook: str, results: Sequence[Any]) -> list[BackendSpec]:
    """The specs that a hook returned (``results``: what pluggy collected), each checked field by field."""
    if not results:
        raise PluginFault(f"its {hook} returned None; return a list of BackendSpec")
    specs = results[0]
    if not isinstance(specs, list | tuple):
        raise PluginFault(f"its {hook} returned {type(specs).__name__}; return a list of BackendSpec")
    role = next(role for role, name in HOOKS.items() if name == hook)
    for spec in specs:
        if not isinstance(spec, BackendSpec):
            raise PluginFault(f"its {hook} returned a list holding {type(spec).__name__}; return a list of BackendSpec")
        if spec.role != role:
            raise PluginFault(f"its {hook} returned a spec of role {spec.role!r}")
        for problem in _problems(spec):
            raise PluginFault(f"the spec {role}:{spec.name}: {problem}")
    return list(specs)


def _problems(spec: Any) -> Iterable[str]:
    """Whatever the annotations promise, a plugin may break."""
    if not _is_text(spec.name) or not _BACKEND_NAME.fullmatch(spec.name):
        yield f"name is {spec.name!r}; use letters, digits, dots, dashes and underscores"
    elif spec.name.lower() == AUTO:
        yield f"name is {spec.name!r}, which means any backend wherever one is chosen; use another"
    if not isinstance(spec.variant, str) or (spec.variant and not _BACKEND_NAME.fullmatch(spec.variant)):
        yield f"variant is {spec.variant!r}; use letters, digits, dots, dashes and underscores"
    for field in ("factory", "probe", "check", "options"):
        value = getattr(spec, field)
        optional = field != "factory" and value is None
        if not optional and not (isinstance(value, str) and _IMPORT_STRING.fullmatch(value)):
            yield f'{field} is {value!r}; use "package.module:Name"'
    if isinstance(spec.requires, str) or not all(_is_requirement(item) for item in spec.requires):
        yield f"requires is {spec.requires!r}; use strings, or tuples of alternatives"
    else:
        items = [one for item in spec.requires for one in ([item] if isinstance(item, str) else item)]
        yield from (f"requires has {problem}" for item in items if (problem := requirement_problem(item)))
    if not isinstance(spec.tier, int):
        yield f"tier is {spec.tier!r}; use a number"
    if not isinstance(spec.caps, list | tuple) or not all(isinstance(box, Caps) for box in spec.caps):
        yield "caps is not a tuple of Caps"
        return
    if not spec.caps:
        yield "caps is empty, so it could never be chosen; say in at least one Caps what it can do"
    for box in spec.caps:
        yield from box_problems(box)


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value)


def _is_requirement(item: object) -> bool:
    return _is_text(item) or (isinstance(item, list | tuple) and bool(item) and all(map(_is_text, item)))
