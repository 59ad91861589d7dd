"""Capsules of experts: only what the step used is in the file, and any executor replays it as it was."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from minisgl_core.capsule.format import load_capsule
from minisgl_core.capsule.moe.capsule import MoECapsule
from minisgl_core.capsule.replay import check_capsule, replay
from minisgl_core.errors import BackendError, CheckpointError, UsageError
from minisgl_core.testing import BackendUnderTest, DeviceFixture, Mismatch


def rewritten(path: Path, **changes: Any) -> None:
    """The same file with another header."""
    with safe_open(path, "pt") as file:
        header = json.loads(file.metadata()["minisgl.capsule"])
    save_file(load_file(path), path, metadata={"minisgl.capsule": json.dumps({**header, **changes})})


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_capsule_comes_back_as_it_was(make_moe_capsule: Any, tmp_path: Path, dtype: str) -> None:
    capsule = make_moe_capsule((2, 1), padded=1, dtype=dtype)
    capsule.save(tmp_path / "x.safetensors")
    again: Any = load_capsule(tmp_path / "x.safetensors")
    assert type(again) is MoECapsule
    for name in ("step", "phase", "geometry", "q_lens", "uids", "origin"):
        assert getattr(again, name) == getattr(capsule, name)
    for mine, theirs in zip(again.layers, capsule.layers, strict=True):
        assert (mine.layer_id, mine.experts) == (theirs.layer_id, theirs.experts)
        for name in ("tokens", "x", "topk_ids", "topk_weights", "size", "out", "w13", "w2"):
            assert torch.equal(getattr(mine, name), getattr(theirs, name)), name
    assert again.summary() == capsule.summary()
    assert again.summary().startswith("step 7, prefill, 2 rows (3 new), top 2 of 8 experts, ")


def test_only_used_experts_are_kept_and_their_numbers_too(make_moe_capsule: Any) -> None:
    capsule: MoECapsule = make_moe_capsule((1,), layers=1)
    (layer,) = capsule.layers
    assert capsule.geometry.num_experts == 8 and capsule.geometry.activation == "silu(gate) * up"
    assert len(layer.experts) == 1, "one of the two choices is padding"
    assert layer.topk_ids.tolist() == [[-1, 0]] and layer.original_ids().tolist() == [[-1, layer.experts[0]]]
    assert (layer.w13.shape, layer.w2.shape) == ((1, 24, 16), (1, 16, 12))
    assert capsule.nbytes == 4 * (24 * 16 + 16 * 12 + 2 * 16 + 2 * 2 + 2)


def test_what_it_does_not_know_is_refused(make_moe_capsule: Any, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    make_moe_capsule().save(path)
    rewritten(path, role="linear")
    with pytest.raises(CheckpointError, match="holds 'linear', format 1; this version reads attention and moe"):
        load_capsule(path)
    rewritten(path, role="attention")
    with pytest.raises(CheckpointError, match="is incomplete: KeyError: 'kv_lens'"):
        load_capsule(path)


@pytest.mark.parametrize("name", ["torch", "cpu"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_right_backends_pass(make_moe_capsule: Any, fixture: DeviceFixture, name: str, dtype: str) -> None:
    capsule = make_moe_capsule(padded=2, dtype=dtype)
    report = replay(capsule, BackendUnderTest.of(f"moe:{name}", fixture.facts), fixture, repeats=1)
    assert report.passed, report.failure()
    assert [layer.layer for layer in report.layers] == [10, 11]
    assert report.layer_us is not None and report.layer_us > 0 and report.metadata_us is None
    for layer in report.layers:
        assert max(layer.error, layer.recorded_error, layer.against_recorded) <= report.tolerance
    assert report.tolerance == {"float32": 1e-4, "bfloat16": 4e-2}[dtype], "the suite's of the role"


def test_the_backend_sees_the_model_as_it_was(
    make_moe_capsule: Any, make_moe_under_test: Any, fixture: DeviceFixture
) -> None:
    capsule: MoECapsule = make_moe_capsule((1,), layers=1)
    (layer,), seen = capsule.layers, []

    def look(out: torch.Tensor, x: torch.Tensor, ids: torch.Tensor, weights: Any) -> torch.Tensor:
        seen.append((ids.clone(), *(tensor.clone() for tensor in weights)))
        return out

    assert replay(capsule, make_moe_under_test(look), fixture, repeats=0).passed
    ((ids, w13, w2),) = seen
    (expert,) = layer.experts
    assert ids.tolist() == [[-1, expert]] and ids.dtype == torch.int32
    assert (len(w13), len(w2)) == (8, 8)
    assert torch.equal(w13[expert], layer.w13[0]) and torch.equal(w2[expert], layer.w2[0])
    assert w13.count_nonzero() == layer.w13.count_nonzero(), "the others are zero"


def test_a_wrong_element_is_named_with_its_experts(
    make_moe_capsule: Any, make_moe_under_test: Any, fixture: DeviceFixture
) -> None:
    capsule: MoECapsule = make_moe_capsule()

    def wrong(out: torch.Tensor, *_: Any) -> torch.Tensor:
        out[4, 5] += 1.0
        return out

    report = replay(capsule, make_moe_under_test(wrong), fixture, repeats=0)
    experts = ", ".join(map(str, capsule.layers[0].original_ids()[4].tolist()))
    assert f"row 2, new token 0, column 5 of experts {experts}: expected" in report.layers[0].worst
    assert report.failure().startswith("layer 1") and not report.passed


def test_a_layer_may_have_the_last_token_of_each_row_only(
    make_moe_capsule: Any, make_moe_under_test: Any, fixture: DeviceFixture
) -> None:
    capsule: MoECapsule = make_moe_capsule((3, 1, 4), last_rows=True)
    assert [layer.tokens.tolist() for layer in capsule.layers] == [list(range(8)), [2, 3, 7]]
    assert replay(capsule, BackendUnderTest.of("moe:cpu", fixture.facts), fixture, repeats=0).passed

    def wrong(out: torch.Tensor, *_: Any) -> torch.Tensor:
        out[2] += 1.0 if len(out) == 3 else 0.0
        return out

    report = replay(capsule, make_moe_under_test(wrong), fixture, repeats=0)
    assert report.failure().startswith("layer 11: row 2, new token 3, column")


def test_a_lossy_executor_is_judged_by_the_tolerance_that_it_states(
    make_moe_capsule: Any, make_moe_under_test: Any, fixture: DeviceFixture
) -> None:
    """What the second product alone loses: 4 % of its terms' sizes, by hand for each token and choice."""
    capsule: MoECapsule = make_moe_capsule()

    def lossy(out: torch.Tensor, x: torch.Tensor, ids: torch.Tensor, weights: Any) -> torch.Tensor:
        w13, w2 = (tensor.double() for tensor in weights)
        for token, row in enumerate(ids.tolist()):
            for expert in (expert for expert in row if expert >= 0):
                gate, up = (w13[expert] @ x[token].double()).chunk(2)
                size = (torch.nn.functional.silu(gate) * up).abs()
                out[token] += 0.04 * 0.1 * (w2[expert].abs() @ size).to(out.dtype)  # 0.1: the least routing weight
        return out

    assert replay(capsule, make_moe_under_test(lossy, tolerance=0.05), fixture, repeats=0).passed
    assert not replay(capsule, make_moe_under_test(lossy), fixture, repeats=0).passed
    wrong = make_moe_under_test(lambda out, *_: out * 3, tolerance=0.05)
    assert not replay(capsule, wrong, fixture, repeats=0).passed


def test_padding_is_run_but_not_judged(make_moe_capsule: Any, make_moe_under_test: Any, fixture: DeviceFixture) -> None:
    def spoil_the_last(out: torch.Tensor, *_: Any) -> torch.Tensor:
        assert len(out) == 10
        out[8:] = torch.nan
        return out

    assert replay(make_moe_capsule(padded=2), make_moe_under_test(spoil_the_last), fixture, repeats=0).passed


def test_a_step_in_which_no_expert_was_used(make_moe_capsule: Any, fixture: DeviceFixture, tmp_path: Path) -> None:
    capsule: MoECapsule = make_moe_capsule((1,), layers=1, top_k=1)
    assert capsule.layers[0].experts == () and not capsule.layers[0].out.any()
    capsule.save(tmp_path / "x.safetensors")
    check_capsule(tmp_path / "x.safetensors", "moe:cpu", device="cpu")


def test_errors_are_relative_to_the_size_of_each_tokens_result(
    make_moe_capsule: Any, make_moe_under_test: Any, fixture: DeviceFixture
) -> None:
    """However small a model's results are: a wrong one is wrong, and one that is rounded is not."""
    capsule: MoECapsule = make_moe_capsule()
    layer = capsule.layers[0]
    small = replace(layer, w2=layer.w2 * 1e-6, out=layer.out * 1e-6)
    report = replay(
        replace(capsule, layers=(small,)), make_moe_under_test(lambda out, *_: out * 1.01), fixture, repeats=0
    )
    want = capsule.expected(0)
    sizes = want.square().mean(1, keepdim=True).sqrt()
    worst = float((0.01 * want.abs() / (sizes + want.abs()))[sizes.flatten() > 0].max())
    assert report.layers[0].error == pytest.approx(worst, rel=1e-3) and not report.passed
    assert report.layers[0].recorded_error < 1e-6


def test_a_token_without_experts_gives_zero(
    make_moe_capsule: Any, make_moe_under_test: Any, fixture: DeviceFixture
) -> None:
    def leaky(out: torch.Tensor, x: torch.Tensor, ids: torch.Tensor, weights: Any) -> torch.Tensor:
        out[(ids == -1).all(-1)] = 1e-9
        return out

    capsule = make_moe_capsule(top_k=1)
    assert not replay(capsule, make_moe_under_test(leaky), fixture, repeats=0).passed
    assert replay(capsule, make_moe_under_test(), fixture, repeats=0).passed


def test_other_roles_and_other_dtypes_are_refused(
    make_moe_capsule: Any, make_moe_under_test: Any, fixture: DeviceFixture
) -> None:
    capsule = make_moe_capsule(dtype="bfloat16")
    with pytest.raises(UsageError, match=r"is a backend of role attention, and the capsule is of moe; write moe:NAME"):
        replay(capsule, BackendUnderTest.of("attention:torch", fixture.facts), fixture)
    with pytest.raises(BackendError, match=r"cannot run this capsule .*bfloat16"):
        replay(capsule, make_moe_under_test(dtypes=("float32",)), fixture)


def test_check_capsule_is_an_assertion(
    make_moe_capsule: Any, make_moe_under_test: Any, fixture: DeviceFixture, tmp_path: Path
) -> None:
    path = tmp_path / "x.safetensors"
    capsule: MoECapsule = make_moe_capsule()
    lost = tuple(replace(layer, out=torch.full_like(layer.out, torch.nan)) for layer in capsule.layers)
    replace(capsule, layers=lost).save(path)
    check_capsule(path, "torch", device="cpu")
    with pytest.raises(Mismatch, match="layer 1"):
        check_capsule(path, make_moe_under_test(lambda out, *_: out * 2).spec, device="cpu")


@pytest.mark.parametrize("step", ["prepare_weights", "forward"])
def test_an_exception_is_a_failure_with_its_words(
    make_moe_capsule: Any, make_moe_under_test: Any, fixture: DeviceFixture, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    from minisgl_cpu_sim.pure.moe import TorchMoE

    def refuse(*_: Any) -> Any:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(TorchMoE, step, refuse)
    report = replay(make_moe_capsule(), make_moe_under_test(), fixture)
    assert report.failure() == "moe:changed raised RuntimeError: no such kernel" and report.layer_us is None
