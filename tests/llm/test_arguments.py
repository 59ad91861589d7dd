"""What people pass by mistake: one clear error, before any work."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from minisgl_core.bench.model_folder import write_geometry
from minisgl_core.core import SamplingParams
from minisgl_core.errors import AdmissionError, CheckpointError, ConfigError, EngineError, UsageError
from minisgl_core.llm import LLM
from minisgl_core.modelconfig.geometries import geometry


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_geometry(geometry("tiny"), tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(folder, dummy_weights=True, num_page_override=64, max_seq_len_override=64, progress=False) as made:
        yield made


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"tp_size": "two"}, "tp_size"),
        ({"tp_size": float("nan")}, "tp_size"),
        ({"backends": "torch"}, "backends"),
        ({"memory_ratio": "x"}, "memory_ratio"),
        ({"seed": "x"}, "seed"),
    ],
)
def test_settings_of_the_wrong_kind_are_named(folder: Path, given: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError, match=f"`{field}` is "):
        LLM(folder, dummy_weights=True, **given)


def test_a_path_must_be_one() -> None:
    with pytest.raises(ConfigError, match="`path` is None"):
        LLM(None)  # type: ignore[arg-type]


def test_a_name_is_looked_for_on_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(CheckpointError, match="'some/model' is no local path and cannot be fetched"):
        LLM("some/model", progress=False)


@pytest.mark.parametrize("setting", ["num_page_override", "max_seq_len_override"])
def test_sizes_beyond_the_machine_name_the_setting(folder: Path, setting: str) -> None:
    with pytest.raises(EngineError, match=f"`{setting}` 999999999999 needs .* GB"):
        LLM(folder, dummy_weights=True, progress=False, **{setting: 999_999_999_999})


@pytest.mark.parametrize("prompts", [None, 5, b"hi", [None], [b"hi"], [["a"]]])
def test_prompts_of_the_wrong_kind(llm: LLM, prompts: Any) -> None:
    with pytest.raises(AdmissionError, match="give a text"):
        llm.generate(prompts, progress=False)


@pytest.mark.parametrize("params", [{"max_tokens": 2}, ["x"], 5])
def test_parameters_of_the_wrong_kind(llm: LLM, params: Any) -> None:
    with pytest.raises(AdmissionError, match="give a SamplingParams"):
        llm.generate([[1, 2]], params, progress=False)


@pytest.mark.parametrize("given", [{"stop": 5}, {"stop_token_ids": 5}, {"ignore_eos": "no"}])
def test_sampling_parameters_of_the_wrong_kind(given: dict[str, Any]) -> None:
    with pytest.raises(AdmissionError, match=f"`{next(iter(given))}` is "):
        SamplingParams(**given)


@pytest.mark.parametrize("bias", [5, "text", [1, 2], [(1,)], {1: None}, {1: "x"}, {"1": 1.0}, {-1: 1.0}, [([], 1.0)]])
def test_biases_of_the_wrong_kind(bias: Any) -> None:
    with pytest.raises(AdmissionError, match=r"sampling parameter `logit_bias` (is|holds) ") as caught:
        SamplingParams(logit_bias=bias)
    assert caught.value.remedy


def test_biases_as_pairs_or_by_id() -> None:
    pairs = ((1, 2.0), (3, -4.0))
    assert SamplingParams(logit_bias={1: 2, 3: -4}).logit_bias == pairs
    assert SamplingParams(logit_bias=[[1, 2], (3, -4.0)]).logit_bias == pairs  # type: ignore[list-item]


@pytest.mark.parametrize("given", [{"logit_bias": {600: 1.0}}, {"stop_token_ids": [512]}])
def test_token_ids_beyond_the_vocabulary(llm: LLM, given: dict[str, Any]) -> None:
    with pytest.raises(AdmissionError, match=f"prompt 1: .*`{next(iter(given))}` names .* ids go from 0 to 511"):
        llm.generate([[1], [1]], [SamplingParams(), SamplingParams(**given)], progress=False)
    known = SamplingParams(max_tokens=1, logit_bias={511: 1e5}, stop_token_ids=[510])
    assert llm.generate([[1]], known, progress=False)[0]["token_ids"] == [511]


def test_nothing_works_after_shutdown(folder: Path) -> None:
    made = LLM(folder, dummy_weights=True, num_page_override=64, max_seq_len_override=64, progress=False)
    step = made.scheduler.step
    made.scheduler.step = lambda: (time.sleep(0.02), step())[1]  # type: ignore[method-assign]
    streams = [made.stream([1, 2], SamplingParams(max_tokens=50, ignore_eos=True)) for _ in range(3)]
    assert next(streams[0]).token_ids
    made.shutdown()
    for call in (
        made.clear_cache,
        lambda: made.generate([[1]], progress=False),
        lambda: made.stream([1]),
        lambda: list(streams[0]),  # begun
        lambda: list(streams[1]),  # not yet begun
    ):
        with pytest.raises(UsageError, match="this LLM has been shut down; make a new one"):
            call()
    for stream in streams:
        stream.close()
    made.shutdown()
