"""docs/serve.md says what is true: its program runs, and its tables name what there is."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from minisgl_core.server.schema import ChatBody, CompletionBody
from support.http_server import Served

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "serve.md").read_text(encoding="utf-8")


def test_the_programs_print_answers(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {}
    for program in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        exec(program.replace("http://127.0.0.1:8000", served.url), names)
        assert capsys.readouterr().out
    names["client"].close()


def test_every_route_is_listed() -> None:
    listed = set(re.findall(r"`(?:GET|POST) (/[\w/]*)`", PAGE))
    from minisgl_core.server import create_app
    from minisgl_core.server.state import ServerOptions, ServerState

    served = set(create_app(ServerState(ServerOptions("x"))).openapi()["paths"])
    assert {re.sub(r"/\{.*", "", path) for path in served} | {"/", "/docs"} == listed


def test_every_field_is_named() -> None:
    named = set(re.findall(r"`([\w.]+)`", PAGE))
    fields = {*CompletionBody.model_fields, *ChatBody.model_fields} - {
        "model",
        "prompt",
        "messages",
        "user",
        "response_format",
    }
    assert {name if name != "stream_options" else "stream_options.include_usage" for name in fields} <= named
