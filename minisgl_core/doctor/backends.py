"""Every backend on offer for this device: is what it needs there, and can its code be loaded?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from packaging.requirements import InvalidRequirement
from packaging.requirements import Requirement as PackageRequirement

from minisgl_core.installation import Environment, check_requires
from minisgl_core.plugin_api import ROLES
from minisgl_core.plugin_api.spec_validation import undeclared, unused_words
from minisgl_core.registry import Candidate, Choice, DeviceFacts, Registry
from minisgl_core.registry.matching import match
from minisgl_core.registry.probe import run_checks
from minisgl_core.registry.query import Requirement
from minisgl_core.registry.records import CORE

from .child import load_factory
from .finding import Finding
from .isolated import Ending, Isolated

__all__ = ["check_caps", "check_clashes", "check_code", "check_requirements", "offered"]


def offered(registry: Registry, device: DeviceFacts) -> list[Candidate]:
    """The plugins' backends whose caps list this device. The core's own require nothing that the core does not."""
    return [
        item
        for role in ROLES
        for item in registry.candidates(role)
        if item.distribution != CORE and match(item.spec, Requirement(device=device))[0] is not None
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


def check_caps(registry: Registry) -> Iterator[Finding]:
    """Capability sets that nothing fits, and features that look misspelt, on any device."""
    for item in (item for role in ROLES for item in registry.candidates(role)):
        dead = undeclared(item.spec)
        for index, fields in dead:
            alone = len(dead) == len(item.spec.caps)
            text = f"caps[{index}] does not declare {', '.join(fields)}, so " + (
                "it can never be chosen" if alone else "that capability set never fits"
            )
            remedy = "what is not declared is unsupported: declare it, as ANY where there is no limit"
            yield Finding("wrong" if alone else "note", "claims", item.key, text, remedy)
        for text in unused_words(item.spec):
            remedy = f"correct the word in the spec of {item.distribution}, or keep it for a later core"
            yield Finding("note", "claims", item.key, f"it {text}", remedy)


def check_requirements(candidates: Sequence[Candidate], environment: Environment) -> Iterator[Finding]:
    """Unmet requirements and checks. It is wrong if no variant of a name can run; an unused variant is a note."""
    unmet = {item.key: check_requires(item.spec, environment) for item in candidates}
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
        yield Finding("wrong", "requirement", key, text, reason.fix or another(key))


def _own_module(item: Candidate, requirement: str) -> bool:
    """Is it a part of the plugin itself, so that installing anything else could not help?"""
    return requirement.startswith(f"import:{item.spec.factory.partition(':')[0].partition('.')[0]}.")


def check_code(candidates: Sequence[Candidate], environment: Environment, timeout_s: float) -> Iterator[Finding]:
    """Import each factory whose requirements are met, in a process that may die of it, and check its methods."""
    ready = [item for item in candidates if not check_requires(item.spec, environment)]
    with Isolated(timeout_s) as process:
        for item in ready:
            wrong, problem, ending = process.ask(load_factory, **_choice(item).to_json())
            if problem:
                longer = f"give it longer with --timeout SECONDS; if it never ends, {another(item.key)}"
                remedy = longer if ending is Ending.TIMED_OUT else _abi_remedy(item)
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
    return f"correct {item.spec.factory}, or {another(item.key)}"


def another(key: str) -> str:
    """How to do without a backend."""
    return f"choose another with --backend {key.partition(':')[0]}=NAME"


def _choice(item: Candidate) -> Choice:
    spec = item.spec
    ops = tuple(dict.fromkeys(op for caps in spec.caps for op in caps.ops))
    return Choice(spec.role, spec.name, spec.variant, item.distribution, item.version, spec.factory, ops=ops)


def _abi_remedy(item: Candidate) -> str:
    """Compiled code that was built for another torch is the usual cause."""
    needed = [_distribution_of(one) for one in item.spec.requires if isinstance(one, str)]
    built = [item.distribution, *(name for name in needed if name)]
    reinstall = f"pip install --force-reinstall {' '.join(built)}"
    return f"reinstall {' and '.join(built)} for the torch that is here ({reinstall}), or {another(item.key)}"


def _distribution_of(requirement: str) -> str:
    if requirement.startswith(("import:", "exec:")):
        return ""
    try:
        return PackageRequirement(requirement).name
    except InvalidRequirement:
        return ""
