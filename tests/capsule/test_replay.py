"""Replaying: right backends pass, wrong ones are distinguished from wrong recordings, and the timer is only a timer."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from minisgl_core.capsule.attention.capsule import AttentionCapsule
from minisgl_core.capsule.replay import check_capsule, replay
from minisgl_core.errors import BackendError
from minisgl_core.plugin_api import LayerFacts, OneOf
from minisgl_core.testing import BackendUnderTest, DeviceFixture, Mismatch

RAGGED = ((3, 9), (5, 5), (1, 17))


@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize("name", ["torch", "cpu"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_right_backends_pass(make_capsule: Any, fixture: DeviceFixture, phase: str, name: str, dtype: str) -> None:
    rows = RAGGED if phase == "prefill" else tuple((1, total) for _, total in RAGGED)
    report = replay(
        make_capsule(phase, rows, dtype=dtype),
        BackendUnderTest.of(f"attention:{name}", fixture.facts),
        fixture,
        repeats=0,
    )
    assert report.passed and report.failure() == ""
    assert [layer.layer for layer in report.layers] == [10, 11]
    assert report.layer_us is None
    for layer in report.layers:
        assert layer.error <= report.tolerance and layer.recorded_error <= report.tolerance


def test_pages_are_cut_for_kernels_of_smaller_pages(
    make_capsule: Any, make_under_test: Any, fixture: DeviceFixture
) -> None:
    seen = []

    def look(backend: Any, out: torch.Tensor, batch: Any, layer: int) -> torch.Tensor:
        seen.append((batch.view.page_size, tuple(batch.view.page_ids_device.shape)))
        return out

    capsule = make_capsule("decode", ((1, 33), (1, 5)), page_size=16)
    report = replay(capsule, make_under_test(look, page_sizes=OneOf(4)), fixture, repeats=0)
    assert report.passed, report.failure()
    assert seen[0] == (4, (2, 9))


def test_a_capsule_outside_the_caps_is_refused_with_the_reasons(
    make_capsule: Any, make_under_test: Any, fixture: DeviceFixture
) -> None:
    under_test = make_under_test(head_dims=OneOf(64), features=frozenset())
    with pytest.raises(BackendError, match=r"cannot run this capsule .*head_dim.*window"):
        replay(make_capsule(), under_test, fixture, repeats=0)


def test_a_lossy_backend_is_judged_by_the_tolerance_that_it_states(
    make_capsule: Any, make_under_test: Any, fixture: DeviceFixture
) -> None:
    """One key: the result is its value, so the sizes of the terms of P V are those of the result."""
    capsule = make_capsule("prefill", ((1, 1),))
    for factor, stated, right in ((1.04, 0.05, True), (1.04, 0.0, False), (1.06, 0.05, False), (0.94, 0.05, False)):
        tested = make_under_test(lambda _, out, *__, factor=factor: out * factor, tolerance=stated)
        assert replay(capsule, tested, fixture, repeats=0).passed == right, (factor, stated)


def wrong_in_one_place(backend: Any, out: torch.Tensor, batch: Any, layer: int) -> torch.Tensor:
    out[1, 3, 2] += 0.5 if layer == 1 else 0.0
    return out


def test_a_wrong_element_is_named(make_capsule: Any, make_under_test: Any, fixture: DeviceFixture) -> None:
    report = replay(make_capsule(), make_under_test(wrong_in_one_place), fixture, repeats=0)
    assert not report.passed
    assert report.layers[0].error < 1e-5 < 0.1 < report.layers[1].error
    assert "layer 11: row 1, new token 0, head 3: expected" in report.failure()
    assert json.loads(json.dumps(report.to_json()))["passed"] is False


def test_nan_is_an_infinite_error_and_json(make_capsule: Any, make_under_test: Any, fixture: DeviceFixture) -> None:
    def nan(backend: Any, out: torch.Tensor, batch: Any, layer: int) -> torch.Tensor:
        return torch.where(torch.arange(len(out))[:, None, None] == 1, torch.nan, out)

    report = replay(make_capsule(), make_under_test(nan), fixture, repeats=0)
    assert not report.passed and report.layers[0].error == float("inf")
    json.dumps(report.to_json(), allow_nan=False)


def test_a_right_backend_passes_although_what_was_recorded_is_wrong(
    make_capsule: Any, make_under_test: Any, fixture: DeviceFixture
) -> None:
    capsule: AttentionCapsule = make_capsule()
    layer = capsule.layers[0]
    capsule = replace(capsule, layers=(replace(layer, out=layer.out + 1), *capsule.layers[1:]))
    report = replay(capsule, make_under_test(), fixture, repeats=0)
    assert report.passed
    assert report.layers[0].against_recorded > 0.3 and report.layers[0].recorded_error > 0.3
    assert capsule.errors(0, (capsule.layers[0].out,))[0] == report.layers[0].recorded_error


def test_a_recorded_exception_has_no_errors_of_its_own(
    make_capsule: Any, make_under_test: Any, fixture: DeviceFixture
) -> None:
    capsule: AttentionCapsule = make_capsule()
    lost = tuple(replace(layer, out=torch.full_like(layer.out, torch.nan)) for layer in capsule.layers)
    report = replay(replace(capsule, layers=lost), make_under_test(), fixture, repeats=0)
    assert report.passed and report.layers[0].against_recorded == float("inf")


def test_an_exception_is_a_failure_with_its_words(
    make_capsule: Any, make_under_test: Any, fixture: DeviceFixture
) -> None:
    def refuse(backend: Any, out: torch.Tensor, batch: Any, layer: int) -> torch.Tensor:
        raise RuntimeError("no such kernel")

    report = replay(make_capsule(), make_under_test(refuse), fixture)
    assert not report.passed and report.layers == () and report.layer_us is None
    assert report.failure() == "attention:changed raised RuntimeError: no such kernel"


def test_a_wrong_shape_is_a_failure(make_capsule: Any, make_under_test: Any, fixture: DeviceFixture) -> None:
    report = replay(make_capsule(), make_under_test(lambda _, out, *__: out[:1]), fixture, repeats=0)
    assert "returned shape (1, 4, 8) instead of (2, 4, 8)" in report.failure()


def test_padding_is_run_but_not_judged(make_capsule: Any, make_under_test: Any, fixture: DeviceFixture) -> None:
    capsule: AttentionCapsule = make_capsule("decode", ((1, 33), (1, 5), (1, 1)))

    def spoil_the_last(backend: Any, out: torch.Tensor, batch: Any, layer: int) -> torch.Tensor:
        assert (batch.size, batch.padded_size) == (2, 3)
        out[2] = torch.nan
        return out

    padded = replace(capsule, uids=capsule.uids[:2])
    assert replay(padded, make_under_test(spoil_the_last), fixture, repeats=0).passed


def test_the_timer_gets_the_metadata_and_all_layers(
    make_capsule: Any, make_under_test: Any, fixture: DeviceFixture
) -> None:
    answers = iter([6.0, 1.0])
    report = replay(make_capsule(), make_under_test(), fixture, timer=lambda call, fixture: (call(), next(answers))[1])
    assert (report.layer_us, report.metadata_us) == (3e6, 1e6)


def test_check_capsule_is_an_assertion(
    make_capsule: Any, make_under_test: Any, fixture: DeviceFixture, tmp_path: Path
) -> None:
    path = tmp_path / "x.safetensors"
    make_capsule(layers=(LayerFacts(0.3), LayerFacts(0.3))).save(path)
    check_capsule(path, "attention:torch", device="cpu")
    with pytest.raises(Mismatch, match="layer 11: row 1, new token 0, head 3"):
        check_capsule(path, make_under_test(wrong_in_one_place).spec, device="cpu")
