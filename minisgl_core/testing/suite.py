"""The suites: what pytest inherits, and what ``minisgl verify`` runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Final, cast
from unittest import SkipTest

from minisgl_core.errors import UsageError
from minisgl_core.plugin_api import BackendSpec, Role

from .attention_cases import attention_cases
from .comm import comm_cases
from .contract import contract_cases
from .graph import graph_cases
from .kv import kv_cases
from .linear_cases import linear_cases
from .moe import moe_cases
from .ops_cases import ops_cases
from .outside import check_refused
from .rig import Rig
from .subject import Subject

if TYPE_CHECKING:
    from .case import Case

__all__ = [
    "SUITES",
    "AttentionSuite",
    "CommSuite",
    "GraphSuite",
    "KVSuite",
    "LinearSuite",
    "MoESuite",
    "OpsSuite",
    "Suite",
    "cases_of",
    "suite_for",
]

Generator = Callable[[Subject, Rig, bool], Sequence["Case"]]


class Suite:
    """Inherit it in a test module, and pytest runs every case as a test of its own::

        class TestMine(AttentionSuite):
            spec = SPEC  # or "attention:mine", of an installed plugin

    A spec needs no installed plugin. Where the device is not one that its caps speak of, the tests are skipped.
    Resolving is asked about cases outside the caps; ``minisgl verify`` also tries them.
    """

    role: ClassVar[Role]
    spec: ClassVar[BackendSpec | str]
    options: ClassVar[Mapping[str, Any]] = {}
    device: ClassVar[str] = "auto"
    quick: ClassVar[bool] = True
    """Fewer values per claim."""

    def pytest_generate_tests(self, metafunc: Any) -> None:
        """Called by pytest when it collects: one test per case."""
        if "conformance" in metafunc.fixturenames:
            found = self._cases()
            metafunc.parametrize("conformance", found, ids=[getattr(item[2], "name", "none") for item in found])

    def test_conforms(self, conformance: tuple[Subject | None, Rig, Case | None]) -> None:
        """One case."""
        subject, rig, case = conformance
        if subject is None or case is None:
            raise SkipTest(f"its caps do not speak of {rig.facts}")
        if case.outside:
            check_refused(subject, case, rig)
            return
        case.conform(subject, rig)

    @classmethod
    def _cases(cls) -> list[tuple[Subject | None, Rig, Case | None]]:
        rig = Rig(cls.device)
        subject = Subject.of(cls.spec, rig.facts, role=cls.role, options=cls.options)
        if subject.spec.role != cls.role:
            raise UsageError(
                f"{cls.__name__} tests role {cls.role}, its spec is of role {subject.spec.role}",
                field="spec",
                value=subject.spec.role,
                remedy="inherit from that role's suite",
            )
        if not subject.boxes(rig.facts):
            return [(None, rig, None)]
        return [(subject, rig, case) for case in cases_of(subject, rig, quick=cls.quick)]


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


SUITES: Final[Mapping[Role, Generator]] = {
    "attention": attention_cases,
    "graph": graph_cases,
    "kv": kv_cases,
    "moe": moe_cases,
    "ops": ops_cases,
    "linear": linear_cases,
    "comm": comm_cases,
}
"""What generates the cases of each role."""


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


def cases_of(subject: Subject, rig: Rig, *, quick: bool) -> list[Case]:
    """Every case that this backend's role and caps call for."""
    return [*contract_cases(), *suite_for(subject.spec.role)(subject, rig, quick)]
