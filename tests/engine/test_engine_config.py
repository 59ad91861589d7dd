"""Settings that make no sense are refused where they are given."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from minisgl_core.core import SamplingParams
from minisgl_core.distributed import DistributedInfo
from minisgl_core.engine import EngineConfig
from minisgl_core.engine.backend_factory import capture_sizes
from minisgl_core.errors import AdmissionError, ConfigError


@pytest.mark.parametrize(
    ("name", "value", "remedy"),
    [
        ("model_path", 5, "a folder or file"),
        ("tp_info", (0, 1), "DistributedInfo"),
        ("max_running_req", 0, "an integer of at least 1"),
        ("max_prefill_tokens", True, "an integer of at least 1"),
        ("max_seq_len_override", 1, "at least 2"),
        ("page_size", "large", "at least 1"),
        ("num_page_override", 1.5, "at least 1"),
        ("memory_ratio", math.nan, "a share above 0"),
        ("memory_ratio", "x", "a share above 0"),
        ("memory_ratio", 1.5, "a share above 0"),
        ("cache", "lru", "radix or naive"),
        ("launcher", "mpi", "processes or torchrun"),
        ("device", ["cpu"], "auto, cpu or cuda"),
        ("cuda_graph_modes", "greedy", "a list of names"),
        ("seed", 2**64, "an integer from -9223372036854775808 to 18446744073709551615"),
        ("seed", True, "an integer from"),
        ("distributed_port", 99999, "an integer from 1 to 65535"),
        ("distributed_port", 0, "an integer from 1 to 65535"),
        ("distributed_timeout_s", math.inf, r"seconds above 0 and at most 1e\+09"),
        ("distributed_timeout_s", 0, "seconds above 0"),
        ("backends", "torch", "attention"),
        ("backends", {1: "torch"}, "attention"),
        ("backend_options", [], "ROLE:NAME"),
        ("allow_plugins", "minisgl-cpu-sim", "a list of names"),
        ("deny_plugins", "minisgl-cpu-sim", "a list of names"),
        ("deny_plugins", [5], "a list of names"),
        ("deny_plugins", None, "a list of names"),
        ("calibrated", "no", "True or False"),
        ("dummy_weights", 1, "True or False"),
        ("progress", None, "True or False"),
        ("plan", "auto", "JSON data"),
        ("observer", "capsules", "an ObserverFactory"),
    ],
)
def test_refused_with_name_value_and_remedy(name: str, value: Any, remedy: str) -> None:
    with pytest.raises(ConfigError, match=rf"`{name}` is .*; (give|use) .*{remedy}") as caught:
        EngineConfig(**{"model_path": "model", name: value})
    assert (caught.value.field, caught.value.exit_code) == (name, 2)
    assert caught.value.value is value


@pytest.mark.parametrize(("rank", "size", "field"), [(2, 2, "rank"), (-1, 1, "rank"), (0, 0, "size"), (0, "2", "size")])
def test_ranks_that_do_not_exist(rank: Any, size: Any, field: str) -> None:
    with pytest.raises(ConfigError, match=f"`tp_info.{field}` is "):
        EngineConfig("model", DistributedInfo(rank, size), distributed_port=1234)


def test_several_ranks_need_a_port() -> None:
    with pytest.raises(ConfigError, match="`distributed_port` is missing for 2 ranks"):
        EngineConfig("model", DistributedInfo(1, 2))
    assert EngineConfig("model", DistributedInfo(1, 2), distributed_port=65535).init_method.endswith(":65535")


def test_options_of_a_backend_are_named() -> None:
    with pytest.raises(ConfigError, match=r"`backend_options\['attention:torch'\]` is 5; give the options by name"):
        EngineConfig("model", backend_options={"attention:torch": 5})  # type: ignore[dict-item]


@pytest.mark.parametrize("seed", [-(2**63), 0, 2**64 - 1, 2**64, -(2**63) - 1, 1.0])
def test_engine_and_requests_accept_the_same_seeds(seed: Any) -> None:
    def refuses(make: Any, error: type[Exception]) -> bool:
        try:
            make()
        except error:
            return True
        return False

    of_engine = refuses(lambda: EngineConfig("model", seed=seed), ConfigError)
    of_request = refuses(lambda: SamplingParams(seed=seed), AdmissionError)
    assert of_engine == of_request == (not isinstance(seed, int) or not -(2**63) <= seed < 2**64)


def test_good_settings_of_every_kind() -> None:
    EngineConfig(
        Path("model"),
        backends={"attention": ["torch", "cpu"], "kv": "torch"},
        backend_options={"attention:torch": {"x": 1}},
        allow_plugins=("a",),
        deny_plugins=["b"],  # type: ignore[arg-type]
        cuda_graph_modes=("greedy",),
        distributed_timeout_s=1,
        memory_ratio=1,
        seed=2**64 - 1,
    )


@pytest.mark.parametrize(("graph", "sizes"), [(True, (1, 2, 4, 8, 12)), (False, ())])
def test_a_plan_without_graphs_records_none_whatever_runner_is_named(graph: bool, sizes: tuple[int, ...]) -> None:
    plan: Any = SimpleNamespace(graph=graph, choice=lambda role: SimpleNamespace(graph="decode"))
    assert capture_sizes(EngineConfig("m", max_running_req=12), plan) == sizes
