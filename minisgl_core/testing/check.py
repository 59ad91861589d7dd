"""Checks: plain data with a name, which runs against a backend and can be pasted into a test."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, ClassVar

from minisgl_core.registry.matching import match

from .hygiene import same_process

if TYPE_CHECKING:
    from minisgl_core.plugin_api import Caps
    from minisgl_core.registry.query import Requirement

    from .backend_under_test import BackendUnderTest
    from .device_fixture import DeviceFixture

__all__ = ["Check", "Result", "caps_of"]


@dataclass(frozen=True, slots=True)
class Result:
    """The measurements of a passed check."""

    errors: Mapping[str, float] = field(default_factory=dict)
    """Worst error by dtype name, as :func:`~minisgl_core.testing.compare.close` measures it."""
    note: str = ""


@dataclass(frozen=True, kw_only=True, repr=False)
class Check:
    """A check with its parameters.

    :meth:`run` returns a :class:`Result`, or raises if the backend failed. ``outside``: the check is outside the
    declared caps, so resolving must refuse it.
    """

    imports: ClassVar[str] = ""
    """Names that a snippet with this check imports in addition to ``assert_conforms`` and the class."""

    name: str
    outside: bool = False

    def run(self, under_test: BackendUnderTest, fixture: DeviceFixture) -> Result:
        """Run against a new backend; ``fixture`` is active (see :meth:`conform`)."""
        raise NotImplementedError

    def conform(self, under_test: BackendUnderTest, fixture: DeviceFixture) -> Result:
        """Like :meth:`run`, but on the engine's stream, and checks that the process is left unchanged."""
        with fixture.active(), same_process():
            return self.run(under_test, fixture)

    def requirement(self, fixture: DeviceFixture) -> Requirement | None:
        """The requirement that resolving would match; None for checks that caps do not cover."""
        return None

    def __repr__(self) -> str:
        """Python code that creates this check; fields at their defaults are omitted."""
        shown = [
            f"{item.name}={value!r}"
            for item in fields(self)
            if (value := getattr(self, item.name)) != item.default and item.name != "outside"
        ]
        return f"{type(self).__name__}({', '.join(shown)})"

    def needed_imports(self) -> list[str]:
        """Lines of Python that its ``repr`` needs."""
        return [self.imports] if self.imports else []

    def snippet(self, under_test: BackendUnderTest, device: str) -> str:
        """A program that runs only this check."""
        target = repr(under_test.label) if under_test.installed else "SPEC"
        comment = "" if under_test.installed else "  # SPEC: your BackendSpec"
        names = f"{type(self).__name__}, assert_conforms"
        lines = [f"from minisgl_core.testing import {names}", *self.needed_imports()]
        return "\n".join([*lines, f"assert_conforms({target}, {self!r}, device={device!r}){comment}"])


def caps_of(under_test: BackendUnderTest, check: Check, fixture: DeviceFixture) -> Caps | None:
    """The capability set that contains a check; None outside."""
    required = check.requirement(fixture)
    return None if required is None else match(under_test.spec, required)[0]
