"""Every backend on offer for this device: is what it needs there, and can its code be loaded?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from packaging.requirements import InvalidRequirement, Requirement

from minisgl_core.plugin_api import ROLES
from minisgl_core.registry import Candidate, Choice, DeviceFacts, Registry
from minisgl_core.registry.checks import run_checks
from minisgl_core.registry.claims import undeclared, unused_words
from minisgl_core.registry.matching import match
from minisgl_core.registry.query import Need
from minisgl_core.registry.records import CORE
from minisgl_core.registry.requirements import Environment, check_requirements

from .finding import Finding
from .isolated import Ending, Isolated

__all__ = ["check_claims", "check_clashes", "check_code", "check_needs", "offered"]

_SLOW_REMEDY: Final = "give it longer with --timeout; if it never ends, repair it, or do not choose this backend"


def offered(registry: Registry, device: DeviceFacts) -> list[Candidate]:
    """The plugins' backends whose caps speak of this device. The core's own need nothing that the core does not."""
    return [
        item
        for role in ROLES
        for item in registry.candidates(role)
        if item.distribution != CORE and match(item.spec, Need(device=device))[0] is not None
    ]


def check_clashes(registry: Registry) -> Iterator[Finding]:
    """A name that two distributions offer means neither of them, unless one of them is an incumbent."""
    for role in ROLES:
        owners: dict[str, list[str]] = {}
        for item in registry.candidates(role):
            if item.qualified:
                text = f"its bare name means another distribution's backend, so it is {item.typed_name}"
                yield Finding("note", "clash", item.key, text, f"write {item.typed_name} to use it, or rename it")
                continue
            names = owners.setdefault(item.spec.name, [])
            if item.distribution not in names:
                names.append(item.distribution)
        for name, names in owners.items():
            if len(names) > 1:
                choices = " or ".join(f"{name}@{distribution}" for distribution in names)
                text = f"it is offered by {' and '.join(names)}, so neither is used"
                yield Finding("wrong", "clash", f"{role}:{name}", text, f"write {choices}, or deny one of them")


def check_claims(registry: Registry) -> Iterator[Finding]:
    """Boxes in which nothing can lie, and features that look misspelt; on whatever device."""
    for item in (item for role in ROLES for item in registry.candidates(role)):
        dead = undeclared(item.spec)
        for index, fields in dead:
            alone = len(dead) == len(item.spec.caps)
            text = f"caps[{index}] does not declare {', '.join(fields)}, so " + (
                "it can never be chosen" if alone else "that box never fits"
            )
            remedy = "what is not declared is unsupported: declare it, as ANY where there is no limit"
            yield Finding("wrong" if alone else "note", "claims", item.key, text, remedy)
        for text in unused_words(item.spec):
            yield Finding("note", "claims", item.key, f"it {text}", "correct it; it may belong to a later core")


def check_needs(candidates: Sequence[Candidate], environment: Environment) -> Iterator[Finding]:
    """Unmet requirements and checks. It is wrong if no variant of a name can run; an unused variant is a note."""
    unmet = {item.key: check_requirements(item.spec, environment) for item in candidates}
    ready = {(item.spec.role, item.spec.name, item.distribution) for item in candidates if not unmet[item.key]}
    for item in candidates:
        for reason in unmet[item.key]:
            own = _own_module(item, reason.wanted)
            served = (item.spec.role, item.spec.name, item.distribution) in ready
            fix = reason.fix or ("wait for a release that has it" if own else f"install what provides {reason.wanted}")
            text = f"it needs {reason.wanted}, found {reason.supported}"
            yield Finding("note" if own or served else "wrong", "requirement", item.key, text, fix)
    for key, reason in run_checks(item for item in candidates if not unmet[item.key]).items():
        text = f"{reason.field}: it wants {reason.wanted}, found {reason.supported}"
        yield Finding("wrong", "requirement", key, text, reason.fix or "repair it, or choose another backend")


def _own_module(item: Candidate, requirement: str) -> bool:
    """Is it a part of the plugin itself, so that installing anything else could not help?"""
    return requirement.startswith(f"import:{item.spec.factory.partition(':')[0].partition('.')[0]}.")


def check_code(candidates: Sequence[Candidate], environment: Environment, timeout_s: float) -> Iterator[Finding]:
    """Import each factory whose requirements are met, in a process that may die of it, and check its methods."""
    ready = [item for item in candidates if not check_requirements(item.spec, environment)]
    with Isolated(timeout_s) as process:
        for item in ready:
            wrong, problem, ending = process.ask("load_factory", **_choice(item).to_json())
            if problem:
                remedy = _SLOW_REMEDY if ending is Ending.TIMED_OUT else _abi_remedy(item)
                yield Finding("wrong", "abi", item.key, f"loading {item.spec.factory}, the process {problem}", remedy)
            elif wrong and wrong[1] in ("ImportError", "OSError"):
                yield Finding("wrong", "abi", item.key, wrong[0], _abi_remedy(item))
            elif wrong:
                yield Finding("wrong", "factory", item.key, wrong[0], _plugin_remedy(item, wrong[1]))


def _plugin_remedy(item: Candidate, error: str) -> str:
    """Python code that does not fit the spec, or lacks a module: installing it again would change nothing."""
    if error == "ModuleNotFoundError":
        return "install that module; the plugin should list it in `requires`"
    if error == "AttributeError":
        return f"correct `factory` of its spec, {item.spec.factory!r}, or the module"
    return f"correct {item.spec.factory}, or do not choose this backend"


def _choice(item: Candidate) -> Choice:
    spec = item.spec
    ops = tuple(dict.fromkeys(op for box in spec.caps for op in box.ops))
    return Choice(spec.role, spec.name, spec.variant, item.distribution, item.version, spec.factory, ops=ops)


def _abi_remedy(item: Candidate) -> str:
    """Compiled code that was built for another torch is the usual cause."""
    needed = [_distribution_of(one) for one in item.spec.requires if isinstance(one, str)]
    built = [item.distribution, *(name for name in needed if name)]
    return f"reinstall {' and '.join(built)} for the torch that is here, or do not choose this backend"


def _distribution_of(requirement: str) -> str:
    if requirement.startswith(("import:", "exec:")):
        return ""
    try:
        return Requirement(requirement).name
    except InvalidRequirement:
        return ""
