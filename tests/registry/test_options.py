"""Options of backends are checked by their own models before anything is chosen, whether it will be or not."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel, ConfigDict, Field

from minisgl_core.errors import ConfigError
from minisgl_core.registry.options import OptionsModelError, check_options, read_options


class Depth(BaseModel):
    model_config = ConfigDict(extra="forbid")
    depth: int = Field(default=1, ge=1)


class Width(BaseModel):
    model_config = ConfigDict(extra="forbid")
    width: int = 1
    block_size: int = Field(default=1, alias="block-size")


@pytest.fixture
def registry(world: Any, make_spec: Any) -> Any:
    """moe:one with a model, moe:two with one a variant, moe:bare with none, moe:broken with none to be found."""
    world.module("some_options", Depth=Depth, Width=Width)
    world.plugin(
        "plugin",
        make_spec("moe", "one", options="some_options:Depth"),
        make_spec("moe", "two", variant="a", options="some_options:Depth"),
        make_spec("moe", "two", variant="b", options="some_options:Width"),
        make_spec("moe", "bare"),
        make_spec("moe", "broken", options="no_such_module:Options"),
    )
    return world.registry()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"moe:one": {"dept": 2}}, r"unknown option 'dept' in backends\.options\.\"moe:one\"; did you mean 'depth'"),
        ({"moe:one": {"depth": 0}}, r"moe:one\" is not valid: depth: .* got 0; options of plugin 1\.0"),
        ({"moe:two": {"height": 1}}, r"unknown option 'height' .*it has depth"),
        ({"moe:two": {"depth": 1, "width": 1}}, r"unknown option 'width'"),
        ({"moe:bare": {"depth": 1}}, r"moe:bare\" is set, but moe:bare takes no options; remove it"),
        ({"moe:one": 3}, r"moe:one\" is 3; give a table of options"),
        ({"moe:ones": {}}, r"belongs to no installed backend; did you mean 'moe:one'"),
        ({"mo:one": {}}, r"belongs to no installed backend; did you mean 'moe:one'"),
    ],
)
def test_a_wrong_table_is_refused(registry: Any, options: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=text) as refused:
        check_options(options, registry)
    assert refused.value.field.startswith(f'backends.options."{next(iter(options))}"')


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"moe:one": {}, "moe:bare": {}},
        {"moe:one": {"depth": 2}},
        {"moe:two": {"depth": 2}},
        {"moe:two": {"width": 2, "block-size": 4}},
        {"moe:broken": {"anything": 1}},
    ],
)
def test_what_one_of_a_names_backends_accepts_is_right(registry: Any, options: Any) -> None:
    check_options(options, registry)


def test_resolving_checks_them_all(world: Any, cpu_sim: None, registry: Any, resolve: Any) -> None:
    with pytest.raises(ConfigError, match="unknown option 'dept'"):
        resolve(options={"moe:one": {"dept": 2}})


def test_a_model_that_is_none_differs_from_options_that_are_wrong(world: Any) -> None:
    world.module("bad_options", Options=3)
    with pytest.raises(OptionsModelError, match="AttributeError"):
        read_options("x", "bad_options:Options", {}, "plugin")
