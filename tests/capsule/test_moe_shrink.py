"""Shrinking experts: every cut keeps a capsule right, and what is left of a failing one is what the failure needs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minisgl_core.capsule.moe.capsule import MoECapsule
from minisgl_core.capsule.moe.cuts import (
    renumbered,
    used_experts,
    with_choices,
    with_experts,
    with_hidden,
    with_tokens,
    with_width,
)
from minisgl_core.capsule.replay import replay
from minisgl_core.capsule.shrink import shrink, shrink_while
from minisgl_core.testing import BackendUnderTest, DeviceFixture


def assert_right(capsule: MoECapsule, fixture: DeviceFixture) -> None:
    """What it holds as recorded is the reference's answer on what it holds as inputs, and a right backend agrees."""
    for place, layer in enumerate(capsule.layers):
        assert capsule.errors(place, (layer.out,))[0] < 1e-6
        named = layer.topk_ids[layer.topk_ids >= 0].unique().tolist()
        assert named == list(range(len(layer.experts))) and len(layer.w13) == len(layer.w2) == len(named)
        assert len(layer.tokens) == len(layer.x) and set(layer.tokens.tolist()) <= set(range(sum(capsule.q_lens)))
    assert len(capsule.uids) <= len(capsule.q_lens)
    report = replay(capsule, BackendUnderTest.of("moe:torch", fixture.facts), fixture, repeats=0)
    assert report.passed, report.failure()


def test_every_cut_keeps_a_capsule_right(make_moe_capsule: Any, fixture: DeviceFixture) -> None:
    capsule = make_moe_capsule(padded=1, top_k=3)
    short = make_moe_capsule((3, 1, 4), top_k=3, last_rows=True)
    for cut in (
        short,
        with_tokens(short, [1, 2, 7]),
        with_tokens(short, [0, 1, 4]),
        with_experts(short, [1, 4, 5]),
        with_width(short, 5),
        capsule,
        capsule.with_layers([1]),
        with_tokens(capsule, [1, 2, 8]),
        with_choices(capsule, [2, 0]),
        with_experts(capsule, [1, 4, 5]),
        renumbered(with_experts(capsule, [1, 4, 5])),
        with_width(capsule, 5),
        with_hidden(capsule, 7),
    ):
        assert_right(cut, fixture)


def test_cuts_do_what_they_say(make_moe_capsule: Any) -> None:
    capsule: MoECapsule = make_moe_capsule((3, 1, 4), padded=1)
    fewer = with_tokens(capsule, [1, 5, 8])
    assert (fewer.q_lens, fewer.uids, fewer.real_tokens) == ((1, 1, 1), (100, 102), 2)
    assert torch.equal(fewer.layers[1].x, capsule.layers[1].x[[1, 5, 8]])
    assert torch.equal(fewer.layers[1].original_ids(), capsule.layers[1].original_ids()[[1, 5, 8]])

    short = with_tokens(make_moe_capsule((3, 1, 4), last_rows=True), [1, 3, 7])
    assert [layer.tokens.tolist() for layer in short.layers] == [[0, 1, 2], [1, 2]]
    assert len(with_tokens(short, [0]).layers) == 1, "a layer without tokens is gone"

    one = with_choices(capsule, [1])
    assert one.geometry.top_k == 1
    assert torch.equal(one.layers[0].original_ids(), capsule.layers[0].original_ids()[:, 1:])

    kept = with_experts(capsule, [2, 6])
    assert used_experts(capsule) == list(range(8)) and used_experts(kept) == [2, 6]
    ids = capsule.layers[0].original_ids()
    assert torch.equal(kept.layers[0].original_ids(), torch.where((ids == 2) | (ids == 6), ids, -1))
    assert kept.geometry.num_experts == 8 and renumbered(kept).geometry.num_experts == 2
    assert used_experts(renumbered(kept)) == [0, 1]

    narrow, (first, *_) = with_width(capsule, 5), capsule.layers
    assert torch.equal(narrow.layers[0].w13, first.w13[:, [0, 1, 2, 3, 4, 12, 13, 14, 15, 16]]), "of gate and of up"
    assert torch.equal(narrow.layers[0].w2, first.w2[:, :, :5]) and narrow.geometry.intermediate_size == 5
    thin = with_hidden(capsule, 7)
    assert thin.layers[0].x.shape == thin.layers[0].out.shape == (9, 7) and thin.geometry.hidden_size == 7
    assert (thin.layers[0].w13.shape[2], thin.layers[0].w2.shape[1]) == (7, 7)


def wrong_for_expert_five(out: torch.Tensor, x: torch.Tensor, ids: torch.Tensor, weights: Any) -> torch.Tensor:
    """Tokens that go to the expert with the number 5, in models of at least 7."""
    if len(weights[0]) >= 7:
        out[(ids == 5).any(-1)] += 1.0
    return out


def test_what_is_left_is_what_the_failure_needs(
    make_moe_capsule: Any, make_moe_under_test: Any, fixture: DeviceFixture
) -> None:
    capsule, under_test = make_moe_capsule((5, 1, 6), layers=3, top_k=3), make_moe_under_test(wrong_for_expert_five)
    tried = []
    small = shrink(capsule, under_test, fixture, lambda item, failed: tried.append(failed))
    assert (small.q_lens, len(small.uids), len(small.layers)) == ((1,), 1, 1)
    assert (small.layers[0].experts, small.layers[0].topk_ids.tolist()) == ((5,), [[0]])
    g = small.geometry
    assert (g.num_experts, g.top_k, g.intermediate_size, g.hidden_size) == (7, 1, 1, 1), "its number matters"
    assert small.nbytes < 100 < capsule.nbytes
    assert small.origin["shrunk_from"] == capsule.summary() and small.origin["failed_on"] == "moe:changed"
    assert len(tried) < 100
    assert not replay(small, under_test, fixture, repeats=0).passed
    assert_right(small, fixture)


def test_numbers_that_do_not_matter_are_changed(
    make_moe_capsule: Any, make_moe_under_test: Any, fixture: DeviceFixture
) -> None:
    """Two tokens with one expert in common: both stay, and the model shrinks to that expert."""

    def busiest(out: torch.Tensor, x: torch.Tensor, ids: torch.Tensor, weights: Any) -> torch.Tensor:
        counts = torch.bincount(ids[ids >= 0], minlength=len(weights[0]))
        busy = (counts > 1).nonzero().flatten()
        out[torch.isin(ids, busy).any(-1)] += 1.0
        return out

    small = shrink(make_moe_capsule((5, 6)), make_moe_under_test(busiest), fixture)
    assert sum(small.q_lens) == 2
    assert (small.geometry.num_experts, small.geometry.top_k) == (1, 1)
    assert small.layers[0].topk_ids.tolist() == [[0], [0]]
    assert_right(small, fixture)


def test_widths_that_a_kernel_cannot_have_are_not_tried_in_its_place(
    make_moe_capsule: Any, make_moe_under_test: Any, fixture: DeviceFixture
) -> None:
    def picky(out: torch.Tensor, x: torch.Tensor, ids: torch.Tensor, weights: Any) -> torch.Tensor:
        if x.shape[1] % 4:
            raise ValueError("not a multiple of 4")
        return out + 1

    small = shrink(make_moe_capsule((2,)), make_moe_under_test(picky), fixture)
    assert (small.geometry.hidden_size, small.geometry.intermediate_size) == (4, 1)


def test_what_is_small_because_parts_are_missing_is_judged_like_the_whole(
    make_moe_capsule: Any, make_moe_under_test: Any, fixture: DeviceFixture
) -> None:
    """Else what rounding costs the whole would look wrong in a part, and be taken for the failure."""
    capsule: MoECapsule = make_moe_capsule(top_k=3).before_cuts()
    sizes = capsule.layers[1].size
    assert torch.allclose(sizes, capsule.expected(1).square().mean(1).sqrt().float())
    part = with_hidden(with_tokens(with_choices(capsule, [1]), [0, 2, 5]), 1)
    assert torch.equal(part.layers[1].size, sizes[[0, 2, 5]])
    assert torch.all(part.scale(1, part.expected(1) * 0)[:, 0] == sizes[[0, 2, 5]])
    assert torch.equal(capsule.before_cuts().layers[1].size, sizes), "and it stays what it is"


def test_padding_stays_if_the_failure_needs_it(
    make_moe_capsule: Any, make_moe_under_test: Any, fixture: DeviceFixture
) -> None:
    def wrong_next_to_padding(out: torch.Tensor, x: torch.Tensor, *_: Any) -> torch.Tensor:
        out[0] += 1.0 if len(x) > 2 else 0.0
        return out

    small = shrink(
        make_moe_capsule((1, 1), padded=3, phase="decode"), make_moe_under_test(wrong_next_to_padding), fixture
    )
    assert (sum(small.q_lens), small.real_tokens >= 1) == (3, True)
    assert not replay(small, make_moe_under_test(wrong_next_to_padding), fixture, repeats=0).passed


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_whatever_the_failure_needs_stays(make_moe_capsule: Any, data: st.DataObject) -> None:
    """For any wanted parts: what is kept still has them, and nothing of the rest."""
    capsule: MoECapsule = make_moe_capsule((4, 3), layers=3, top_k=3)
    layers = data.draw(st.sets(st.sampled_from([10, 11, 12]), min_size=1))
    uid = data.draw(st.sampled_from(capsule.uids))
    expert = data.draw(st.sampled_from(used_experts(capsule.with_layers([min(layers) - 10]))))
    width = data.draw(st.integers(1, 12))

    def fails(item: MoECapsule) -> bool:
        found = {layer.layer_id: layer for layer in item.layers}
        has_expert = min(layers) in found and expert in found[min(layers)].experts
        return layers <= found.keys() and has_expert and uid in item.uids and item.geometry.intermediate_size >= width

    if not fails(capsule):
        pytest.fail("the whole capsule has every part")
    small = shrink_while(capsule, fails)
    assert fails(small)
    assert {layer.layer_id for layer in small.layers} == layers
    assert uid in small.uids and sum(small.q_lens) <= 2, "one token of the request, and one of the expert"
    power = next(size for size in (1, 2, 4, 8, 12) if size >= width)
    assert (small.geometry.top_k, small.geometry.intermediate_size, small.geometry.hidden_size) == (1, power, 1)
    assert used_experts(small) == [expert]
