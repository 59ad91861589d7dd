from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel, Field

from minisgl_core.errors import BackendError, ConfigError
from minisgl_core.plugin_api import CannotRun, MoESetup, Reason
from minisgl_core.registry import Choice, build, fuses, load_class


class Options(BaseModel):
    depth: int = Field(1, ge=1)
    block_size: int = Field(16, alias="block-size")


class Executor:
    """A moe backend that remembers what it was given."""

    def __init__(self, setup: Any, options: Any) -> None:
        self.setup, self.options = setup, options

    def prepare_weights(self, layer_id: int, w13: Any, w2: Any) -> Any:
        return layer_id

    def forward(self, *args: Any) -> Any:
        return args

    def close(self) -> None:
        pass


class Refusing(Executor):
    def __init__(self, setup: Any, options: Any) -> None:
        raise CannotRun(Reason("shape", "num_experts", "60", "multiples of 8", "another moe backend"))


class Failing(Executor):
    def __init__(self, setup: Any, options: Any) -> None:
        raise RuntimeError("no such symbol")


class Unfinished:
    """Lacks ``prepare_weights`` and ``close``."""

    def __init__(self, setup: Any, options: Any) -> None:
        pass

    def forward(self, *args: Any) -> Any:
        return args


class SomeOps:
    def __init__(self, setup: Any, options: Any) -> None:
        pass

    def sample(self, *args: Any) -> Any:
        return args

    def close(self) -> None:
        pass


class Product:
    def __init__(self, setup: Any, options: Any) -> None:
        pass

    def prepare_weights(self, weight: Any) -> Any:
        return weight

    def weight_of(self, weights: Any) -> Any:
        return weights

    def forward(self, *args: Any) -> Any:
        return args

    def close(self) -> None:
        pass


class HalfFused(Product):
    def fused_rows(self, *args: Any) -> int:
        return 1


class Fused(HalfFused):
    def forward_fused(self, *args: Any) -> Any:
        return args


SETUP = MoESetup(None, None, 8, 2, 64, 32, 1, 128)  # type: ignore[arg-type]


@pytest.fixture
def choose(world: Any) -> Any:
    """``choose("Class", **fields)``: a choice whose factory is that class of this file."""
    world.module("built", **{name: value for name, value in globals().items() if isinstance(value, type)})

    def make(name: str, role: str = "moe", **fields: Any) -> Choice:
        return Choice(role, "mine", "", "my-plugin", "2.0", f"built:{name}", **fields)  # type: ignore[arg-type]

    return make


def test_a_backend_is_constructed_from_setup_and_validated_options(choose: Any) -> None:
    backend = build(choose("Executor", options_model="built:Options", options={"depth": 3, "block-size": 8}), SETUP)
    assert backend.setup is SETUP
    assert (backend.options.depth, backend.options.block_size) == (3, 8)


def test_defaults_fill_the_options_and_none_means_no_model(choose: Any) -> None:
    assert build(choose("Executor", options_model="built:Options"), SETUP).options.depth == 1
    assert build(choose("Executor"), SETUP).options is None


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"options_model": "built:Options", "options": {"dept": 3}}, r"unknown option 'dept'.*did you mean 'depth'\?"),
        ({"options_model": "built:Options", "options": {"depth": 0}}, r"depth: .*greater than or equal to 1, got 0"),
        ({"options_model": "built:Options", "options": {"depth": "x"}}, r'backends\.options\."moe:mine" .*got \'x\''),
        ({"options": {"depth": 1}}, "moe:mine takes no options"),
    ],
)
def test_options_are_checked_by_the_plugins_own_model(choose: Any, fields: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        build(choose("Executor", **fields), SETUP)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("Refusing", r"cannot run here: num_experts: wanted 60, supported multiples of 8 \(another moe backend\)"),
        ("Failing", "failed to start: RuntimeError: no such symbol"),
        ("Absent", "cannot be imported: AttributeError"),
    ],
)
def test_a_failing_factory_names_backend_distribution_and_version(choose: Any, name: str, text: str) -> None:
    with pytest.raises(BackendError, match=f"moe backend mine@my-plugin 2.0 {text}"):
        build(choose(name), SETUP)


def test_an_options_model_that_cannot_be_used_is_the_plugins_fault(choose: Any) -> None:
    with pytest.raises(BackendError, match="options model cannot be used: AttributeError"):
        build(choose("Executor", options_model="built:Nothing"), SETUP)


def test_case_86_missing_methods_are_named_at_start(choose: Any) -> None:
    with pytest.raises(BackendError, match=r"built:Unfinished lacks prepare_weights, close of the moe API 1\.1"):
        load_class(choose("Unfinished"))


def test_an_ops_backend_needs_the_operations_that_it_offers(choose: Any) -> None:
    assert load_class(choose("SomeOps", role="ops", ops=("sample",))) is SomeOps
    with pytest.raises(BackendError, match="lacks route of the ops API"):
        load_class(choose("SomeOps", role="ops", ops=("sample", "route")))


def test_a_product_need_not_take_anything_in_whatever_its_caps_list(choose: Any) -> None:
    """Before 1.2 of the linear API the operations that a linear backend lists were not read."""
    for ops in ((), ("add_rms_norm", "act_and_mul"), ("sample", "route")):
        assert not fuses(build(choose("Product", role="linear", ops=ops), None))
        assert fuses(build(choose("Fused", role="linear", ops=ops), None))
        with pytest.raises(BackendError, match=r"lacks forward_fused of the linear API 1\.2"):
            load_class(choose("HalfFused", role="linear", ops=ops))


def test_models_are_loaded_without_a_protocol(choose: Any) -> None:
    assert load_class(choose("Unfinished", role="models")) is Unfinished
