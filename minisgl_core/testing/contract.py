"""The rules for all backends: clean imports, valid caps, validated options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

from minisgl_core.errors import ConfigError
from minisgl_core.plugin_api import FUSABLE_OPS, OP_NAMES, PARSER_PARTS, Caps, Role
from minisgl_core.plugin_api.spec_validation import undeclared
from minisgl_core.registry import build, fuses, load_class
from minisgl_core.sandbox import Sandbox, SandboxError, import_object
from minisgl_core.sandbox.imports import import_plugin, private_imports

from .check import Check, Result
from .compare import Mismatch, expect

if TYPE_CHECKING:
    from .backend_under_test import BackendUnderTest
    from .device_fixture import DeviceFixture

__all__ = ["ContractCheck", "contract_checks"]

IMPORT_LIMIT_S: Final = 120.0


@dataclass(frozen=True, kw_only=True, repr=False)
class ContractCheck(Check):
    """A rule that does not depend on the arithmetic of the role."""

    scenario: Literal["imports", "caps", "methods", "options"]

    def run(self, under_test: BackendUnderTest, fixture: DeviceFixture) -> Result:
        note: str = getattr(self, f"_{self.scenario}")(under_test, fixture) or ""
        return Result(note=note)

    def _imports(self, under_test: BackendUnderTest, fixture: DeviceFixture) -> str:
        """In a fresh process, the plugin's entry module (or the factory's top package) imports nothing heavy.

        Neither it nor the factory's module changes the environment, and from the core both import only public modules.
        """
        module = under_test.module or under_test.spec.factory.partition(":")[0].partition(".")[0]
        if not under_test.module and module == under_test.spec.factory.partition(":")[0]:
            return "the factory lives in a module of its own: no package to import"
        factory = under_test.spec.factory.partition(":")[0]
        request = {"module": module, "factories": [factory]}
        try:
            with Sandbox(IMPORT_LIMIT_S) as process:
                answer = process.call(f"{import_plugin.__module__}:{import_plugin.__name__}", request)
        except SandboxError as crash:
            raise Mismatch(f"importing {module}, the process {crash}") from crash
        expect(answer["ok"], f"importing {module} fails: {answer.get('error')}")
        heavy, effects = answer["value"]["heavy"], answer["value"]["effects"]
        inside = "import them inside functions or in the factory"
        expect(not heavy, f"importing {module} imports {', '.join(heavy)}: {inside}")
        expect(not effects, f"importing {module} or {factory} {' and '.join(effects)}")
        private = sorted({name for one in (module, factory) for name in private_imports(one)})
        expect(not private, f"it imports what is no part of the contract: {', '.join(private)}")
        return ""

    def _caps(self, under_test: BackendUnderTest, fixture: DeviceFixture) -> None:
        """Every capability set can be satisfied."""
        expect(bool(under_test.spec.caps), "the spec declares no caps: nothing is supported")
        for number, fields in undeclared(under_test.spec):
            names = ", ".join(f"`{name}`" for name in fields)
            expect(False, f"capability set {number} leaves {names} empty: nothing fits it")
        for caps in under_test.spec.caps:
            _check_ops(caps, under_test.spec.role)

    def _methods(self, under_test: BackendUnderTest, fixture: DeviceFixture) -> None:
        """The factory can be imported and has every method of its role."""
        capability_sets: list[Caps | None] = [*under_test.capability_sets(fixture.facts)]
        for caps in capability_sets or [None]:
            cls = load_class(under_test.choice(caps))
            if under_test.spec.role == "linear" and caps is not None and caps.ops:
                what = f"its caps list {' and '.join(caps.ops)}, but {under_test.spec.factory}"
                expect(fuses(cls), f"{what} lacks fused_rows and forward_fused")

    def _options(self, under_test: BackendUnderTest, fixture: DeviceFixture) -> None:
        """Options have defaults; an unknown one is refused by name."""
        if under_test.spec.options is not None:
            import_object(under_test.spec.options).model_validate({})
        unknown = "no_such_option"
        try:
            build(under_test.choice(options={unknown: 1}), None)  # refused before anything is constructed
        except ConfigError as error:
            name = f"{under_test.spec.role}:{under_test.spec.name}"
            expect(name in str(error), f"the error about an unknown option does not name {name}: {error}")
            return
        raise Mismatch(f"the unknown option {unknown!r} is accepted")


def contract_checks() -> list[Check]:
    """The four contract checks of every role."""
    return [
        ContractCheck(name="contract/imports", scenario="imports"),
        ContractCheck(name="contract/caps", scenario="caps"),
        ContractCheck(name="contract/methods", scenario="methods"),
        ContractCheck(name="contract/options", scenario="options"),
    ]


_OPS: Final[Mapping[Role, tuple[tuple[str, ...], str]]] = {
    "linear": (FUSABLE_OPS, "products cannot be fused with"),
    "parser": (PARSER_PARTS, "are no parts of the role"),
}
"""What the caps of a role may list as ``ops``, and what is wrong with anything else."""


def _check_ops(caps: Caps, role: Role) -> None:
    known, what = _OPS.get(role, (OP_NAMES, "do not exist"))
    unknown = [name for name in caps.ops if name not in known]
    expect(not unknown, f"the caps offer operations that {what}: {', '.join(unknown)}")
