"""The suite of the role on both backends. The tests that XGrammar 0.2.9 fails are listed, each with its reason."""

from __future__ import annotations

import pytest

from minisgl_core.testing import BackendUnderTest, DeviceFixture, checks_of, run_check

KNOWN_FAULTS = {
    "json_schema/mask": "xgrammar allows control characters in strings of limited length",
    "json_object/mask": "xgrammar allows control characters or halves of surrogates in strings",
    "ebnf/mask": "xgrammar forbids a token that closes one of several open levels",
    "ebnf/many": "xgrammar forbids a token that closes one of several open levels",
    "lifetime": "it repeats json_schema/mask",
}


@pytest.mark.parametrize("name", ["llguidance", "xgrammar"])
def test_it_conforms_but_for_known_faults_of_the_library(name: str) -> None:
    pytest.importorskip(name)
    fixture = DeviceFixture("cpu")
    under_test = BackendUnderTest.of(f"grammar:{name}", fixture.facts)
    failed = {}
    for check in checks_of(under_test, fixture, quick=True):
        outcome = run_check(under_test, check, fixture)
        if outcome.status == "failed" and not (name == "xgrammar" and check.name.startswith(tuple(KNOWN_FAULTS))):
            failed[check.name] = outcome.detail
    assert failed == {}
