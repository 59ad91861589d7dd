"""Bodies drawn from the server's own OpenAPI document, right and wrong: none makes the server fail."""

from __future__ import annotations

from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings

from minisgl_core.server import create_app
from minisgl_core.server.state import ServerOptions, ServerState
from support.http_server import Served

DOCUMENT = schemathesis.openapi.from_dict(create_app(ServerState(ServerOptions("tiny"))).openapi())
OPERATIONS = {each.ok().label: each.ok() for each in DOCUMENT.get_all_operations()}
MODES = list(schemathesis.GenerationMode)


def hammer(operation: Any, served: Served, mode: Any, examples: int) -> int:
    """Send bodies to it; returns how many."""
    sent = 0

    @given(case=operation.as_strategy(generation_mode=mode))
    @settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    def send(case: Any) -> None:
        nonlocal sent
        answer = case.call(base_url=served.url, timeout=60)
        assert answer.status_code < 500, answer.text
        if answer.status_code >= 400:
            assert answer.json()["error"].keys() == {"message", "type", "param", "code"}
        sent += 1

    send()
    assert served.rests()
    return sent


def test_the_document_has_every_route_with_a_body() -> None:
    assert {"POST /v1/completions", "POST /v1/chat/completions", "POST /v1/responses", "POST /tokenize"} <= set(
        OPERATIONS
    )


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("label", [each for each in OPERATIONS if each.startswith("POST")])
def test_no_body_makes_it_fail(served: Served, label: str, mode: Any) -> None:
    assert hammer(OPERATIONS[label], served, mode, 10)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("label", OPERATIONS)
def test_none_of_many_bodies_makes_it_fail(served: Served, label: str, mode: Any) -> None:
    assert hammer(OPERATIONS[label], served, mode, 300)
