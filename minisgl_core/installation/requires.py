"""Is what a backend's ``requires`` lists installed?"""

from __future__ import annotations

from functools import lru_cache

from packaging.requirements import InvalidRequirement, Requirement

from minisgl_core.plugin_api import BackendSpec, Reason

from .environment import Environment, Installed

__all__ = ["check_requires"]


def check_requires(spec: BackendSpec, environment: Environment | None) -> list[Reason]:
    """One reason for each unmet item of ``spec.requires``.

    Environment None is a machine elsewhere, which may have anything but what the plugin's own distribution lacks.
    """
    reasons = []
    wanted = spec.requires
    if environment is None:
        own = spec.factory.partition(":")[0].partition(".")[0]
        wanted = tuple(i for i in wanted if isinstance(i, str) and i.startswith(f"import:{own}."))
        environment = Installed()
    for item in wanted:
        alternatives = (item,) if isinstance(item, str) else item
        failed = [reason for one in alternatives if (reason := _check(one, environment)) is not None]
        if len(failed) < len(alternatives):
            continue
        reasons.append(
            Reason(
                code="requires",
                field="requires",
                wanted=" or ".join(alternatives),
                supported="; ".join(dict.fromkeys(reason.supported for reason in failed)),
                fix=" or ".join(dict.fromkeys(reason.fix for reason in failed if reason.fix)),
            )
        )
    return reasons


def _check(item: str, environment: Environment) -> Reason | None:
    kind, _, name = item.partition(":")
    if kind == "import":
        return None if environment.has_module(name) else _missing(item, f"no module {name}", "")
    if kind == "exec":
        return None if environment.has_program(name) else _missing(item, f"no {name} on PATH", f"install {name}")
    try:
        requirement = _parsed(item)
    except InvalidRequirement as error:
        return _missing(item, f"an unreadable requirement: {error}".splitlines()[0], "")
    if requirement.marker is not None and not requirement.marker.evaluate():
        return None
    version = environment.version(requirement.name)
    if version is None:
        return _missing(item, f"{requirement.name} is not installed", f"pip install '{item}'")
    if not requirement.specifier.contains(version, prereleases=True):
        return _missing(item, f"{requirement.name} {version}", f"pip install '{item}'")
    return None


@lru_cache(maxsize=256)
def _parsed(item: str) -> Requirement:
    """Many specs require the same; a requirement is never changed."""
    return Requirement(item)


def _missing(item: str, found: str, fix: str) -> Reason:
    return Reason("requires", "requires", item, found, fix)
