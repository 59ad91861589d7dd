"""What a case is: plain data with a name, that runs against a backend and can be pasted into a test."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, ClassVar, TypeVar

from minisgl_core.registry.matching import match

from .hygiene import same_process

if TYPE_CHECKING:
    from minisgl_core.plugin_api import Caps
    from minisgl_core.registry.query import Need

    from .rig import Rig
    from .subject import Subject

__all__ = ["Case", "Finding", "box_of", "collect"]


@dataclass(frozen=True, slots=True)
class Finding:
    """What a passed case measured."""

    errors: Mapping[str, float] = field(default_factory=dict)
    """Worst error by dtype name, as :func:`~minisgl_core.testing.compare.close` measures it."""
    note: str = ""


@dataclass(frozen=True, kw_only=True, repr=False)
class Case:
    """A check with its parameters. :meth:`run` returns a :class:`Finding`, or raises: then the backend failed it.

    ``outside``: it lies outside the declared caps, so resolving must refuse it.
    """

    imports: ClassVar[str] = ""
    """What a snippet with this case must import beyond ``check`` and the class itself."""

    name: str
    outside: bool = False

    def run(self, subject: Subject, rig: Rig) -> Finding:
        """Run against a fresh backend; ``rig`` is active (see :meth:`conform`)."""
        raise NotImplementedError

    def conform(self, subject: Subject, rig: Rig) -> Finding:
        """:meth:`run` as the engine's thread would: on its stream, and leaving the process as it was."""
        with rig.active(), same_process():
            return self.run(subject, rig)

    def need(self, rig: Rig) -> Need | None:
        """What resolving would ask of the caps; None for cases that caps say nothing about."""
        return None

    def __repr__(self) -> str:
        """Python that makes it again; fields at their defaults are left out."""
        shown = [
            f"{item.name}={value!r}"
            for item in fields(self)
            if (value := getattr(self, item.name)) != item.default and item.name != "outside"
        ]
        return f"{type(self).__name__}({', '.join(shown)})"

    def snippet(self, subject: Subject, device: str) -> str:
        """A program that runs just this case."""
        target = repr(subject.label) if subject.installed else "SPEC"
        comment = "" if subject.installed else "  # SPEC: your BackendSpec"
        lines = [f"from minisgl_core.testing import {type(self).__name__}, check", *filter(None, [self.imports])]
        return "\n".join([*lines, f"check({target}, {self!r}, device={device!r}){comment}"])


def box_of(subject: Subject, case: Case, rig: Rig) -> Caps | None:
    """The box of caps that a case lies in; None outside."""
    need = case.need(rig)
    return None if need is None else match(subject.spec, need)[0]


C = TypeVar("C", bound=Case)


def collect(
    subject: Subject,
    rig: Rig,
    inside: Callable[[Caps], Iterable[C]],
    beyond: Callable[[Caps], Iterable[C]],
) -> list[C]:
    """The cases of every box that speaks of this device, then what lies beyond each and in none of the others.

    Names are unique: with several boxes they begin with the box's number, and of equal cases the first is kept.
    """
    boxes = subject.boxes(rig.facts)
    found: dict[str, C] = {}
    for number, box in enumerate(boxes):
        prefix = f"box{number}/" if len(boxes) > 1 else ""
        for case in inside(box):
            found.setdefault(prefix + case.name, replace(case, name=prefix + case.name))
    for box in boxes:
        others = [other for other in boxes if other is not box]
        for case in beyond(box):
            need = case.need(rig)
            if need is None or not subject.claims(need, others):
                found.setdefault(case.name, case)
    return list(found.values())
