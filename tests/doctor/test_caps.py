"""Claims that no query can meet, and features that look misspelt."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from minisgl_core.doctor.backends import check_caps
from minisgl_core.plugin_api import ANY, BackendSpec, Caps, OneOf
from minisgl_core.registry import Candidate, PluginRecord, Registry, discover

WHOLE = Caps(
    devices=("cpu", "cuda"),
    sm=ANY,
    dtypes=("float32",),
    kv_dtypes=ANY,
    head_dims=OneOf(64),
    gqa_ratios=ANY,
    page_sizes=ANY,
    kv_layouts=("NHD",),
    phases=("decode",),
    ops=("sample",),
    formats=("plain",),
    architectures=("A",),
)
NEVER = "so it can never be chosen"


def findings(role: Any, *sets: Caps) -> list[tuple[str, str, str]]:
    candidate = Candidate(BackendSpec(role, "mine", "m:C", caps=sets), "dist", "1")
    registry = Registry((PluginRecord("dist", "main = m", candidates=(candidate,)),))
    return [(one.level, one.text, one.remedy) for one in check_caps(registry)]


@pytest.mark.parametrize(
    ("role", "empty", "expected"),
    [
        ("attention", {"gqa_ratios": None}, "gqa_ratios"),
        ("attention", {"kv_dtypes": (), "head_dims": OneOf()}, "kv_dtypes, head_dims"),
        ("kv", {"kv_layouts": ()}, "kv_layouts"),
        ("moe", {"dtypes": ()}, "dtypes"),
        ("ops", {"ops": ()}, "ops"),
        ("linear", {"formats": ()}, "formats"),
        ("models", {"architectures": ()}, "architectures"),
        ("graph", {"devices": ()}, "devices"),
        ("platform", {"devices": ("cuda",), "sm": (0, -1)}, "sm"),
    ],
)
def test_a_set_without_what_is_always_required_never_fits(role: Any, empty: dict[str, Any], expected: str) -> None:
    assert findings(role, WHOLE) == []
    ((level, text, remedy),) = findings(role, replace(WHOLE, **empty))
    assert (level, text) == ("wrong", f"caps[0] does not declare {expected}, {NEVER}") and "ANY" in remedy
    ((level, text, _),) = findings(role, WHOLE, replace(WHOLE, **empty))
    assert (level, text) == ("note", f"caps[1] does not declare {expected}, so that capability set never fits")


@pytest.mark.parametrize(
    ("role", "empty"),
    [
        ("moe", {"kv_dtypes": (), "head_dims": None, "phases": ()}),
        ("graph", {"dtypes": ()}),
        ("models", {"devices": (), "sm": (0, -1)}),
        ("attention", {"devices": ("cpu",), "sm": (0, -1)}),
        ("comm", {"ops": (), "formats": (), "architectures": ()}),
    ],
)
def test_what_a_role_is_never_asked_may_be_left_out(role: Any, empty: dict[str, Any]) -> None:
    assert findings(role, replace(WHOLE, **empty)) == []


def test_a_feature_that_nothing_requests_is_a_note() -> None:
    features = frozenset({"windw", "window", "chunked_local_attention"})
    found = findings("attention", replace(WHOLE, features=features))
    assert [(level, text) for level, text, _ in found] == [
        ("note", "it lists 'chunked_local_attention' in features, which this core never requests"),
        ("note", "it lists 'windw' in features, which this core never requests; did you mean 'window'?"),
    ]
    assert findings("attention", replace(WHOLE, features=ANY)) == []


def test_our_own_claims_can_all_be_met() -> None:
    assert list(check_caps(discover())) == []
