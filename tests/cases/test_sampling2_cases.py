"""What may be asked of sampling: kinds of values, names of other libraries, the rules of top-k and top-p."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minisgl_core.builtin.ops import ComposedOps
from minisgl_core.core import SamplingParams
from minisgl_core.errors import AdmissionError, UsageError
from minisgl_core.plugin_api import OpsSetup, SampleArgs
from minisgl_core.scheduler import PromptOut
from support.driver import Answer, Driver
from support.edited_checkpoints import edited

NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
INTEGERS = ("top_k", "n", "max_tokens", "min_tokens", "seed", "logprobs", "prompt_logprobs")
FLAGS = ("ignore_eos",)
LISTS = ("stop", "stop_token_ids", "logit_bias")


class OneRank:
    """Stands in for the communicator of a single rank."""

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x


@pytest.fixture(params=["composed", "cpu"])
def sample_ops(request: pytest.FixtureRequest) -> Any:
    setup = OpsSetup(torch.device("cpu"), torch.float32, 4, 2, 8, 16, 32, 64, 8, None, OneRank())  # type: ignore[arg-type]
    if request.param == "composed":
        return ComposedOps(setup)
    return pytest.importorskip("minisgl_cpu_sim.native.ops").NativeOps(setup)


# ---- 114: kinds of values ------------------------------------------------------------------------------------------


def test_every_parameter_is_of_a_kind_listed_here() -> None:
    assert sorted(field.name for field in fields(SamplingParams)) == sorted(
        [*NUMBERS, *INTEGERS, *FLAGS, *LISTS, "grammar"]
    )


@given(
    name=st.sampled_from(NUMBERS),
    value=st.sampled_from([0.5, 1]),
    kind=st.sampled_from([float, np.float64, np.float32, np.float16]),
)
def test_case_114_numpy_numbers_are_numbers(name: str, value: float, kind: Callable[[float], Any]) -> None:
    found = getattr(SamplingParams(**{name: kind(value)}), name)
    assert (found, type(found)) == (value, float)


@given(
    name=st.sampled_from(INTEGERS),
    value=st.integers(1, 20),
    kind=st.sampled_from([int, np.int64, np.int32, np.uint8, np.uint64]),
)
def test_case_114_numpy_integers_are_integers(name: str, value: int, kind: Callable[[int], Any]) -> None:
    found = getattr(SamplingParams(**{name: kind(value)}), name)
    assert (found, type(found)) == (value, int)


def test_case_114_numpy_values_inside_lists() -> None:
    params = SamplingParams(
        ignore_eos=np.bool_(True), stop_token_ids=[np.int64(3), 4], logit_bias={np.int32(5): np.float32(0.5)}
    )
    assert params == SamplingParams(ignore_eos=True, stop_token_ids=[3, 4], logit_bias={5: 0.5})
    assert [type(token) for token in params.stop_token_ids] == [int, int]
    assert params.ignore_eos is True


@pytest.mark.parametrize("name", [*NUMBERS, *INTEGERS, *FLAGS, *LISTS])
def test_case_114_none_means_unset(name: str) -> None:
    given_none = SamplingParams(**{name: None})
    if name == "max_tokens":
        assert given_none.max_tokens is None
    else:
        assert given_none == SamplingParams()


UNKNOWN_KINDS = st.sampled_from(
    ["1", b"1", "", 1j, [1.0], {"a": 1}, (1, 2), object(), np.array(1), np.array([1]), torch.tensor(1)]
)


@given(name=st.sampled_from([*NUMBERS, *INTEGERS, *FLAGS]), value=UNKNOWN_KINDS)
def test_case_114_other_kinds_are_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(AdmissionError, match=f"`{name}`") as caught:
        SamplingParams(**{name: value})
    assert caught.value.field == name


@given(name=st.sampled_from([*NUMBERS, *INTEGERS]), value=st.sampled_from([True, np.bool_(False)]))
def test_case_114_flags_are_no_numbers(name: str, value: Any) -> None:
    with pytest.raises(AdmissionError, match=f"`{name}`"):
        SamplingParams(**{name: value})


@given(name=st.sampled_from(INTEGERS), value=st.sampled_from([1.0, np.float32(2), -(2**70), 2**70]))
def test_case_114_integers_stay_integers_in_range(name: str, value: Any) -> None:
    with pytest.raises(AdmissionError, match=f"`{name}`"):
        SamplingParams(**{name: value})


@pytest.mark.parametrize(
    ("params", "name"),
    [
        ({"min_tokens": 6, "max_tokens": 5}, "min_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 0, "prompt_logprobs": 1, "n": 2}, "max_tokens"),
        ({"n": 0}, "n"),
        ({"n": 1025}, "n"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ],
)
def test_combinations_that_make_no_sense_are_refused(params: dict[str, Any], name: str) -> None:
    with pytest.raises(AdmissionError, match=f"`{name}`"):
        SamplingParams(**params)
    assert SamplingParams(min_tokens=6, max_tokens=None).min_tokens == 6


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("max_new_tokens", "max_tokens"),
        ("do_sample", "temperature"),
        ("num_return_sequences", "`n`"),
        ("stop_strings", "`stop`"),
        ("use_beam_search", "beam search"),
        ("min_new_tokens", "min_tokens"),
        ("temprature", "temperature"),
        ("qqqq", "repetition_penalty"),
    ],
)
def test_case_132_names_of_other_libraries_get_a_hint(name: str, ours: str) -> None:
    with pytest.raises(UsageError) as caught:
        SamplingParams(**{name: 1})
    assert caught.value.field == name
    assert ours in caught.value.remedy


# ---- 113: the rules of top-k and top-p -----------------------------------------------------------------------------


def survivors(ops: Any, logits: list[float], *, top_k: int = 0, top_p: float = 1.0, draws: int = 400) -> set[int]:
    """Every token that is ever drawn."""
    rows = torch.tensor([logits]).repeat(draws, 1)
    whole = torch.arange(draws, dtype=torch.int32)
    zero = torch.zeros(draws)
    args = SampleArgs(zero + 1, (zero + top_k).int(), zero + top_p, zero, whole, whole * 0, whole * 0)
    return set(ops.sample(rows, args, "filtered").tolist())


def test_case_113_ties_at_the_kth_place_all_survive_and_top_p_stops_at_its_mass(sample_ops: Any) -> None:
    ops = sample_ops
    assert survivors(ops, [3.0, 2.0, 1.0, 2.0, 2.0], top_k=1) == {0}
    assert survivors(ops, [3.0, 2.0, 1.0, 2.0, 2.0], top_k=2) == {0, 1, 3, 4}
    # Four tokens of a quarter each: two of them make up one half, just so, and the lower ids are these.
    assert survivors(ops, [1.0] * 4, top_p=0.5) == {0, 1}
    assert survivors(ops, [1.0] * 4, top_p=0.51) == {0, 1, 2}
    # Top-p takes its share of what top-k has left: one of two halves; of the whole it would need both.
    assert survivors(ops, [1.0, 1.0, 0.0, 0.0], top_p=0.5) == {0, 1}
    assert survivors(ops, [1.0, 1.0, 0.0, 0.0], top_k=2, top_p=0.5) == {0}
    assert survivors(ops, [1.0, -torch.inf, 1.0, -torch.inf], top_p=0.5) == {0}


# ---- several answers -----------------------------------------------------------------------------------------------


def serve_choices(driver: Driver, prompt: list[int], params: SamplingParams) -> tuple[list[list[int]], list[PromptOut]]:
    uid = driver.submit(prompt, params)
    uids = range(uid, uid + params.n)
    for other in uids[1:]:
        assert next(driver._uids) == other
        driver.answers[other] = Answer()
    prompts = []
    while driver.runner.has_work:
        outs = driver.runner.step()
        for out in outs:
            driver.answers[out.uid].add(out)
        prompts += [part for part in outs.parts if isinstance(part, PromptOut)]
    return [driver.answers[one].tokens for one in uids], prompts


def test_case_132_choices_have_seeds_of_their_own_and_the_first_the_plain_one(
    small: Path, random_prompt: Callable[..., list[int]], overlap: bool
) -> None:
    prompt = random_prompt(20)
    hot: dict[str, Any] = {"temperature": 6.0, "max_tokens": 10, "ignore_eos": True}
    with Driver(small, overlap=overlap, page_size=4, num_page_override=128, cuda_graph_max_bs=4) as driver:
        (plain,) = driver.tokens([prompt], SamplingParams(seed=7, **hot))
        four, prompts = serve_choices(driver, prompt, SamplingParams(seed=7, n=4, **hot))
        assert [out.cached_tokens for out in prompts] == [16]
        again, _ = serve_choices(driver, prompt, SamplingParams(seed=7, n=4, **hot))
        fewer, _ = serve_choices(driver, prompt, SamplingParams(seed=7, n=2, **hot))
        following, _ = serve_choices(driver, prompt, SamplingParams(seed=8, n=4, **hot))
        unseeded, _ = serve_choices(driver, prompt, SamplingParams(n=4, **hot))
        (greedy, same), _ = serve_choices(driver, prompt, SamplingParams(n=2, max_tokens=10, ignore_eos=True))
    assert four[0] == plain
    assert again == four and fewer == four[:2]
    assert greedy == same
    assert len({tuple(tokens) for tokens in four + following + unseeded}) == 12


# ---- planted faults ------------------------------------------------------------------------------------------------


def test_ids_that_pad_the_vocabulary_are_never_sampled(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    """31 tokens on two ranks: the second has a row of zeros at the end, whose logit would be as good as any here."""

    def cut(tensors: dict[str, torch.Tensor]) -> None:
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            if name in tensors:
                tensors[name] = tensors[name][:31].clone()

    folder = edited(tiny("mistral-full"), tmp_path / "model", config={"vocab_size": 31}, tensors=cut)
    params = SamplingParams(temperature=1e4, max_tokens=100, ignore_eos=True, seed=1, n=4)
    with Driver(folder, tp=2, page_size=1, num_page_override=512) as driver:
        answers, _ = serve_choices(driver, [4, 5, 6], params)
    assert {token for tokens in answers for token in tokens} == set(range(31))
