"""The suite is tested by wrong parsers: it must catch each, in the check that is meant for its fault."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from minisgl_core.builtin.parsers.formats import HermesParser
from minisgl_core.plugin_api import (
    BackendSpec,
    CallArguments,
    CallBegin,
    CallEnd,
    Caps,
    Content,
    ParseRequest,
    ParserEvent,
    ParserSetup,
)
from minisgl_core.testing import BackendUnderTest, DeviceFixture, checks_of, run_check


class _Wrong(HermesParser):
    """A right parser whose events a mutant changes."""

    def open(self, request: ParseRequest) -> Any:
        return _Changed(super().open(request), self)

    def change(self, events: Sequence[ParserEvent], final: bool) -> Sequence[ParserEvent]:
        raise NotImplementedError


class _Changed:
    def __init__(self, right: Any, mutant: _Wrong) -> None:
        self._right, self._mutant = right, mutant

    def push(self, text: str) -> Sequence[ParserEvent]:
        return self._mutant.change(self._right.push(text), False)

    def finish(self) -> Sequence[ParserEvent]:
        return self._mutant.change(self._right.finish(), True)


class LosesWhatIsHeld(_Wrong):
    def change(self, events: Sequence[ParserEvent], final: bool) -> Sequence[ParserEvent]:
        return [] if final else events


class StripsContent(_Wrong):
    def change(self, events: Sequence[ParserEvent], final: bool) -> Sequence[ParserEvent]:
        return [Content(event.text.strip()) if isinstance(event, Content) else event for event in events]


class NumbersEachCallZero(_Wrong):
    def change(self, events: Sequence[ParserEvent], final: bool) -> Sequence[ParserEvent]:
        return [type(event)(0, *_rest(event)) if hasattr(event, "index") else event for event in events]


class ForgetsTheEnd(_Wrong):
    def change(self, events: Sequence[ParserEvent], final: bool) -> Sequence[ParserEvent]:
        return [event for event in events if not isinstance(event, CallEnd)]


class EmptiesArguments(_Wrong):
    def change(self, events: Sequence[ParserEvent], final: bool) -> Sequence[ParserEvent]:
        return [CallArguments(event.index, "{}") if isinstance(event, CallArguments) else event for event in events]


class LowersNames(_Wrong):
    def change(self, events: Sequence[ParserEvent], final: bool) -> Sequence[ParserEvent]:
        return [CallBegin(event.index, event.name[:3]) if isinstance(event, CallBegin) else event for event in events]


class LooksAtEachPieceAlone(HermesParser):
    def open(self, request: ParseRequest) -> Any:
        return _Forgetful(super().open, request)


class _Forgetful:
    def __init__(self, open_: Any, request: ParseRequest) -> None:
        self._open, self._request = open_, request

    def push(self, text: str) -> Sequence[ParserEvent]:
        state = self._open(self._request)
        return [*state.push(text), *state.finish()]

    def finish(self) -> Sequence[ParserEvent]:
        return []


class SharesOneState(HermesParser):
    def __init__(self, setup: ParserSetup, options: object) -> None:
        super().__init__(setup, options)
        self._state: Any = None

    def open(self, request: ParseRequest) -> Any:
        self._state = self._state or super().open(request)
        return self._state


class RaisesOnBrokenJSON(HermesParser):
    def open(self, request: ParseRequest) -> Any:
        return _Raising(super().open(request))


class _Raising:
    def __init__(self, right: Any) -> None:
        self._right = right

    def push(self, text: str) -> Any:
        return self._right.push(text)

    def finish(self) -> Any:
        events = self._right.finish()
        if any(isinstance(event, Content) and "tool_call" in event.text for event in events):
            raise ValueError("broken")
        return events


def _rest(event: Any) -> tuple[Any, ...]:
    return tuple(getattr(event, name) for name in ("name", "text") if hasattr(event, name))


@pytest.mark.parametrize(
    ("mutant", "where"),
    [
        (LosesWhatIsHeld, "broken"),
        (StripsContent, "plain"),
        (NumbersEachCallZero, "cuts"),
        (ForgetsTheEnd, "calls"),
        (EmptiesArguments, "calls"),
        (LowersNames, "calls"),
        (LooksAtEachPieceAlone, "calls"),
        (SharesOneState, "many"),
        (RaisesOnBrokenJSON, "broken"),
    ],
)
def test_the_suite_catches(mutant: type, where: str) -> None:
    spec = BackendSpec(
        "parser", "mutant", f"{__name__}:{mutant.__name__}", caps=(Caps(ops=("tools",), templates=("x",)),)
    )
    fixture, under_test = DeviceFixture("cpu"), BackendUnderTest(spec)
    object.__setattr__(under_test, "build", lambda setup, caps=None: mutant(setup, None))
    checks = [check for check in checks_of(under_test, fixture, quick=True) if where in check.name]
    outcomes = [run_check(under_test, check, fixture) for check in checks if "lifetime" not in check.name]
    assert outcomes and any(outcome.status == "failed" for outcome in outcomes), outcomes
