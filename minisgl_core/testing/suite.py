"""The suites of checks, for pytest and for ``minisgl verify``."""

from __future__ import annotations

import atexit
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Final, cast
from unittest import SkipTest

from minisgl_core.errors import UsageError
from minisgl_core.plugin_api import BackendSpec, Role

from .attention_checks import attention_checks
from .backend_under_test import BackendUnderTest
from .check_process import CheckProcess
from .comm import comm_checks
from .compare import Mismatch
from .contract import contract_checks
from .device_fixture import DeviceFixture
from .grammar import grammar_checks
from .graph import graph_checks
from .kv import kv_checks
from .leftovers import nothing_running
from .linear_checks import linear_checks
from .moe import moe_checks
from .ops_checks import ops_checks
from .parser import parser_checks
from .refusal import check_refused, refusal_of

if TYPE_CHECKING:
    from .check import Check
    from .run import Outcome

__all__ = [
    "SUITES",
    "AttentionSuite",
    "CommSuite",
    "GrammarSuite",
    "GraphSuite",
    "KVSuite",
    "LinearSuite",
    "MoESuite",
    "OpsSuite",
    "ParserSuite",
    "Suite",
    "checks_of",
    "suite_for",
]

Generator = Callable[[BackendUnderTest, DeviceFixture, bool], Sequence["Check"]]


class Suite:
    """Inherit it in a test module, and pytest runs every check as a test of its own::

        class TestMine(AttentionSuite):
            spec = SPEC  # or "attention:mine", of an installed plugin

    A spec needs no installed plugin. If no capability set covers the device, the tests are skipped.
    Resolving is asked about checks outside the caps; ``minisgl verify`` also tries them. What a backend refuses with
    :class:`~minisgl_core.plugin_api.CannotRun` is a skipped test.
    """

    role: ClassVar[Role]
    _check_process: ClassVar[CheckProcess]
    spec: ClassVar[BackendSpec | str]
    options: ClassVar[Mapping[str, Any]] = {}
    device: ClassVar[str] = "auto"
    quick: ClassVar[bool] = True
    """Fewer values per claim."""
    isolated: ClassVar[bool] = False
    """Run the checks in a child process, as ``minisgl verify`` does: a crash, a hang or an exit then fails one test. A
    debugger, coverage and what fixtures patch see only this process."""

    def pytest_generate_tests(self, metafunc: Any) -> None:
        """Called by pytest when it collects: one test per check."""
        if "conformance" in metafunc.fixturenames:
            found = self._checks()
            metafunc.parametrize("conformance", found, ids=[getattr(item[2], "name", "none") for item in found])

    def test_conforms(self, conformance: tuple[BackendUnderTest | None, DeviceFixture, Check | None]) -> None:
        """One check."""
        under_test, fixture, check = conformance
        if under_test is None or check is None:
            raise SkipTest(f"its caps do not cover {fixture.facts}")
        if check.outside:
            check_refused(under_test, check, fixture)
        elif self.isolated:
            _judge(self._process(under_test, fixture).run(check))
        else:
            _conform(check, under_test, fixture)

    @classmethod
    def _process(cls, under_test: BackendUnderTest, fixture: DeviceFixture) -> CheckProcess:
        """One child process for all tests of the class."""
        found: CheckProcess | None = cls.__dict__.get("_check_process")
        if found is None:
            found = cls._check_process = CheckProcess(under_test, fixture.facts)
            atexit.register(found.close)
        return found

    @classmethod
    def _checks(cls) -> list[tuple[BackendUnderTest | None, DeviceFixture, Check | None]]:
        fixture = DeviceFixture(cls.device)
        under_test = BackendUnderTest.of(cls.spec, fixture.facts, role=cls.role, options=cls.options)
        if under_test.spec.role != cls.role:
            raise UsageError(
                f"{cls.__name__} tests role {cls.role}, its spec is of role {under_test.spec.role}",
                field="spec",
                value=under_test.spec.role,
                remedy="inherit from that role's suite",
            )
        if not under_test.capability_sets(fixture.facts):
            return [(None, fixture, None)]
        return [(under_test, fixture, check) for check in checks_of(under_test, fixture, quick=cls.quick)]


def _conform(check: Check, under_test: BackendUnderTest, fixture: DeviceFixture) -> None:
    try:
        with nothing_running():
            check.conform(under_test, fixture)
    except Exception as error:
        refusal = refusal_of(error)
        if refusal is None:
            raise
        raise SkipTest(f"refused here: {refusal}") from error


def _judge(outcome: Outcome) -> None:
    if outcome.status in ("skipped", "refused"):
        raise SkipTest(outcome.detail)
    if outcome.status == "failed":
        raise Mismatch(outcome.detail)


class AttentionSuite(Suite):
    """Paged attention."""

    role = "attention"


class KVSuite(Suite):
    """Row scatter and gather."""

    role = "kv"


class MoESuite(Suite):
    """Routed experts."""

    role = "moe"


class GraphSuite(Suite):
    """Graph runners."""

    role = "graph"


class CommSuite(Suite):
    """Collectives."""

    role = "comm"


class OpsSuite(Suite):
    """The operations that a spec offers."""

    role = "ops"


class LinearSuite(Suite):
    """Matrix products."""

    role = "linear"


class ParserSuite(Suite):
    """Parsers of answers."""

    role = "parser"


class GrammarSuite(Suite):
    """Libraries that keep answers to a grammar."""

    role = "grammar"


SUITES: Final[Mapping[Role, Generator]] = {
    "attention": attention_checks,
    "graph": graph_checks,
    "kv": kv_checks,
    "moe": moe_checks,
    "ops": ops_checks,
    "linear": linear_checks,
    "comm": comm_checks,
    "parser": parser_checks,
    "grammar": grammar_checks,
}
"""What generates the checks of each role."""


def suite_for(role: str) -> Generator:
    """Raises :class:`UsageError` for a role that has no suite."""
    generate = SUITES.get(cast("Role", role))
    if generate is None:
        raise UsageError(
            f"there is no suite for role {role!r}",
            field="role",
            value=role,
            remedy=f"there are suites for {', '.join(SUITES)}",
        )
    return generate


def checks_of(under_test: BackendUnderTest, fixture: DeviceFixture, *, quick: bool) -> list[Check]:
    """Every check that this backend's role and caps call for."""
    return [*contract_checks(), *suite_for(under_test.spec.role)(under_test, fixture, quick)]
