"""Shrinking: every cut keeps a capsule right, and what is left of a failing one is what the failure needs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minisgl_core.capsule.attention.capsule import AttentionCapsule
from minisgl_core.capsule.attention.cuts import (
    with_kv_heads,
    with_rows,
    without_pages,
    without_queries,
    without_tail,
)
from minisgl_core.capsule.replay import replay
from minisgl_core.capsule.shrink import shrink, shrink_while
from minisgl_core.errors import UsageError
from minisgl_core.plugin_api import LayerFacts
from minisgl_core.testing import BackendUnderTest, DeviceFixture

PREFILL, DECODE = ((3, 9), (5, 5), (2, 17)), ((1, 9), (1, 5), (1, 17))


def assert_right(capsule: AttentionCapsule, fixture: DeviceFixture) -> None:
    """What it holds as recorded is the reference's answer on what it holds as inputs, and a right backend agrees."""
    for place, layer in enumerate(capsule.layers):
        assert capsule.errors(place, (layer.out,))[0] < 1e-6
    report = replay(capsule, BackendUnderTest.of("attention:torch", fixture.facts), fixture, repeats=0)
    assert report.passed, report.failure()
    live = capsule.page_ids[capsule.page_ids < capsule.num_pages]
    assert sorted(set(live.tolist())) == list(range(capsule.num_pages)), "no page is left over"
    for layer in capsule.layers:  # new tokens' keys are where out_loc says, as when it was recorded
        slots = capsule.out_loc.long()
        assert torch.equal(layer.k_pages.flatten(0, 1)[slots], layer.k)
    assert capsule.positions.tolist() == [
        at for new, total in zip(capsule.q_lens, capsule.kv_lens, strict=True) for at in range(total - new, total)
    ]


@pytest.mark.parametrize("rows", [PREFILL, DECODE])
def test_every_cut_keeps_a_capsule_right(make_capsule: Any, fixture: DeviceFixture, rows: Any) -> None:
    phase = "prefill" if rows is PREFILL else "decode"
    capsule = make_capsule(phase, rows)
    assert_right(capsule, fixture)
    assert_right(capsule.with_layers([1]), fixture)
    assert_right(with_rows(capsule, [2, 0]), fixture)
    assert_right(with_kv_heads(capsule, [1]), fixture)
    assert_right(without_tail(capsule, 2, 1), fixture)
    assert_right(without_pages(capsule, 2, 2), fixture)
    if phase == "prefill":
        assert_right(without_queries(capsule, 1, 4), fixture)
    else:
        assert_right(without_tail(capsule, 2, 16), fixture)


def test_cuts_do_what_they_say(make_capsule: Any) -> None:
    capsule = make_capsule("prefill", PREFILL)
    assert (without_queries(capsule, 0, 2).q_lens, without_queries(capsule, 0, 2).kv_lens) == ((1, 5, 2), (9, 5, 17))
    assert (without_tail(capsule, 0, 2).q_lens, without_tail(capsule, 0, 2).kv_lens) == ((1, 5, 2), (7, 5, 17))
    assert without_pages(capsule, 0, 1).kv_lens == (5, 5, 17)
    heads = with_kv_heads(capsule, [1])
    assert torch.equal(heads.layers[0].q, capsule.layers[0].q[:, 2:])
    assert (heads.geometry.kv_heads, heads.geometry.q_heads) == (1, 2)
    assert with_rows(capsule, [2]).uids == (102,)
    assert without_tail(make_capsule("decode", DECODE), 1, 4).kv_lens == (9, 1, 17)


def wrong_when_long(backend: Any, out: torch.Tensor, batch: Any, layer: int) -> torch.Tensor:
    """The last head of rows with more than 20 keys, in layers with a large scale."""
    view = batch.view
    if backend._layers[layer].scale > 0.35:
        rows = torch.repeat_interleave(view.kv_lens_device, torch.tensor(view.q_lens_host))
        out[rows > 20, -1] += 1.0
    return out


@pytest.mark.parametrize(
    ("phase", "rows"),
    [("decode", ((1, 7), (1, 33), (1, 60), (1, 2))), ("prefill", ((7, 7), (9, 33), (4, 10)))],
)
def test_what_is_left_is_what_the_failure_needs(
    make_capsule: Any, make_under_test: Any, fixture: DeviceFixture, phase: str, rows: Any
) -> None:
    layers = (LayerFacts(0.3), LayerFacts(0.4), LayerFacts(0.3), LayerFacts(0.4))
    capsule, under_test = make_capsule(phase, rows, layers, kv_heads=4), make_under_test(wrong_when_long)
    tried = []
    small = shrink(capsule, under_test, fixture, lambda item, failed: tried.append(failed))
    assert (small.q_lens, small.kv_lens) == ((1,), (21,))
    assert len(small.layers) == 1 and small.layers[0].layer_id in (11, 13)
    assert (small.geometry.kv_heads, small.geometry.q_heads, small.num_pages) == (1, 2, 6)
    assert small.nbytes < capsule.nbytes / 20
    assert small.origin["shrunk_from"] == capsule.summary() and small.origin["failed_on"] == "attention:changed"
    assert len(tried) < 150
    assert not replay(small, under_test, fixture, repeats=0).passed
    assert_right(small, fixture)


def test_an_exception_is_not_traded_for_another(
    make_capsule: Any, make_under_test: Any, fixture: DeviceFixture
) -> None:
    def picky(backend: Any, out: torch.Tensor, batch: Any, layer: int) -> torch.Tensor:
        if batch.view.max_kv > 20:
            raise OverflowError("too long")
        raise ZeroDivisionError("too short")

    small = shrink(make_capsule(), make_under_test(picky), fixture)
    assert small.kv_lens == (21,)


def test_a_step_that_is_right_cannot_be_shrunk(make_capsule: Any, make_under_test: Any, fixture: DeviceFixture) -> None:
    with pytest.raises(UsageError, match="computes this capsule right, so there is nothing to shrink"):
        shrink(make_capsule(), make_under_test(), fixture)


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_whatever_the_failure_needs_stays(make_capsule: Any, data: st.DataObject) -> None:
    """For any wanted part: what is kept still has it, and nothing of the rest."""
    capsule: AttentionCapsule = make_capsule("decode", DECODE, (LayerFacts(0.3),) * 4)
    uid = data.draw(st.sampled_from(capsule.uids))
    layers = data.draw(st.sets(st.sampled_from([layer.layer_id for layer in capsule.layers]), min_size=1))
    length = data.draw(st.integers(1, capsule.kv_lens[capsule.uids.index(uid)]))

    def fails(item: AttentionCapsule) -> bool:
        has_layers = layers <= {layer.layer_id for layer in item.layers}
        return has_layers and uid in item.uids and item.kv_lens[item.uids.index(uid)] >= length

    small = shrink_while(capsule, fails)
    assert {layer.layer_id for layer in small.layers} == layers
    assert (small.uids, small.kv_lens, small.geometry.kv_heads) == ((uid,), (length,), 1)
