"""The kit's own parts: comparing, choosing values, references by hand, suites as pytest sees them."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from unittest import SkipTest

import numpy as np
import pytest
import torch

from minisgl_core import testing
from minisgl_core.errors import UsageError
from minisgl_core.plugin_api import ANY, BackendSpec, Caps, LayerFacts, MultipleOf, OneOf
from minisgl_core.testing import (
    TOLERANCE,
    AttentionCheck,
    AttentionSuite,
    BackendUnderTest,
    DeviceFixture,
    Mismatch,
    checks_of,
    moe,
    ops,
    ops_reference,
)
from minisgl_core.testing.attention_bench import AttentionBench, Geometry, whose
from minisgl_core.testing.compare import close, fresh, same, unchanged
from minisgl_core.testing.endurance import REPEATABLE
from minisgl_core.testing.reference import attention, experts
from minisgl_core.testing.values import inside, outside, usual


def test_close_names_the_worst_element() -> None:
    want = torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=torch.float64)
    assert close(want.float(), want, "it") == 0.0
    got = want.float()
    got[1, 0] = 3.5
    with pytest.raises(Mismatch, match=r"it: 1 of 4 elements are wrong; the worst is \[1, 0\]: expected 3, got 3.5"):
        close(got, want, "it")
    got[0, 1] = torch.nan
    with pytest.raises(Mismatch, match=r"the worst is \[0, 1\]: expected 2, got nan"):
        close(got, want, "it")
    assert close(torch.tensor([torch.inf]), torch.tensor([torch.inf], dtype=torch.float64), "it") == 0.0
    with pytest.raises(Mismatch, match="shape"):
        close(got[0], want, "it")


def test_same_compares_bits() -> None:
    nan = torch.tensor([1.0, torch.nan])
    same(nan, nan.clone(), "it")
    with pytest.raises(Mismatch, match=r"1 of 2 elements differ; the first is \[0\]: expected -0.0, got 0.0"):
        same(torch.tensor([0.0, 1.0]), torch.tensor([-0.0, 1.0]), "it")
    with pytest.raises(Mismatch, match="is float64, expected float32"):
        same(nan.double(), nan, "it")
    with pytest.raises(Mismatch, match="x was changed"):
        unchanged(nan + 1, nan, "x")


def test_close_says_whose_the_worst_element_is() -> None:
    want = torch.zeros(5, 2, dtype=torch.float64)
    got = want.float()
    got[3, 1] = 1.0
    with pytest.raises(Mismatch, match=r"the worst is \[3, 1\] \(of row 1: 3 new of 40 tokens\): expected 0, got 1"):
        close(got, want, "it", whose=whose(((1, 7), (3, 40), (1, 1))))


def test_the_bench_knows_rows_by_their_place_in_the_table() -> None:
    """A batch of rows 2 and 0 has their lengths, pages and contents, in that order."""
    bench = AttentionBench(
        DeviceFixture("cpu"), Geometry("float32", "float32", 4, 1, 1, 8, (LayerFacts(1.0),)), 3, 9, 0
    )
    lens, rows = ((1, 6), (2, 9)), (2, 0)
    bench.fill([6, 9], rows)
    view = bench.eager("prefill", lens, rows).view
    assert view.table_idx_device is not None and view.table_idx_device.tolist() == [2, 0]
    keys = bench.pool.k_cache(0).flatten(0, 1)
    for place, (row, (_, total)) in enumerate(zip(rows, lens, strict=True)):
        pages = view.page_ids_device[place].tolist()
        slots = [pages[token // 4] * 4 + token % 4 for token in range(total)]
        assert torch.equal(keys[slots], bench.kv[0, 0, row, :total])
    wide = bench.wide(3)
    bench.write_inputs(wide, lens, 0, rows)
    assert torch.equal(bench.views(wide)[1][1:], bench.kv[0, 0, 0, 7:9])
    before = bench.kv.clone()
    bench.renew()
    assert not torch.equal(bench.kv, before) and torch.equal(keys[slots], before[0, 0, 0, :9])


def test_fresh_sees_views() -> None:
    x = torch.zeros(4)
    fresh(x.clone(), {"x": x}, "the result")
    with pytest.raises(Mismatch, match="the result shares memory with x"):
        fresh(x[1:], {"x": x}, "the result")


def test_values_at_and_beyond_a_claim() -> None:
    assert inside(OneOf(64, 128, 256), (), quick=True) == (64, 256)
    assert inside(OneOf(64, 128, 256), (), quick=False) == (64, 128, 256)
    assert inside(MultipleOf(16), (), quick=True) == (16, 32)
    assert inside(ANY, (1, 3), quick=True) == (1, 3)
    assert inside(None, (1, 3), quick=True) == ()
    assert usual(OneOf(96, 128), 64, ()) == 96 and usual(MultipleOf(16), 64, ()) == 64 and usual(ANY, 64, (64,)) == 64
    assert outside(OneOf(64, 128), (32, 64, 80, 96, 128, 256), quick=True) == (32, 80)
    assert outside(MultipleOf(16), (), quick=True) == (8, 24)
    assert outside(ANY, (1, 2), quick=True) == outside(None, (1, 2), quick=True) == ()


def test_reference_attention_by_hand() -> None:
    # one head of one dimension; scores are q * k * scale = 0, 1, 2 for the three keys
    q, k = torch.tensor([[[1.0]], [[1.0]]]), torch.tensor([[[0.0]], [[2.0]], [[4.0]]])
    v = torch.tensor([[[1.0]], [[10.0]], [[100.0]]])
    e = math.e
    full = attention(q, k, v, LayerFacts(scale=0.5))
    assert full.flatten().tolist() == pytest.approx(
        [(1 + 10 * e) / (1 + e), (1 + 10 * e + 100 * e**2) / (1 + e + e**2)]
    )
    last_two = attention(q, k, v, LayerFacts(scale=0.5, window=2))
    assert float(last_two[1]) == pytest.approx((10 * e + 100 * e**2) / (e + e**2))
    alone = attention(q, k, v, LayerFacts(scale=0.5, window=1))
    assert alone.flatten().tolist() == [10.0, 100.0]
    capped = attention(q[1:], k, v, LayerFacts(scale=0.5, softcap=1.0))
    weights = [math.exp(math.tanh(s)) for s in (0, 1, 2)]
    assert float(capped) == pytest.approx((weights[0] + 10 * weights[1] + 100 * weights[2]) / sum(weights))


def test_reference_attention_groups_heads() -> None:
    q = torch.ones(1, 4, 1)
    k, v = torch.zeros(1, 2, 1), torch.tensor([[[5.0], [7.0]]])
    assert attention(q, k, v, LayerFacts(scale=1.0)).flatten().tolist() == [5.0, 5.0, 7.0, 7.0]


def test_reference_experts_by_hand() -> None:
    silu = 1 / (1 + math.exp(-1))
    w13 = torch.tensor([[[1.0], [3.0]], [[1.0], [5.0]]])  # gate rows first
    w2 = torch.tensor([[[2.0]], [[1.0]]])
    out = experts(torch.ones(2, 1), torch.tensor([[0, 1], [1, -1]]), torch.tensor([[0.5, 2.0], [1.0, 9.0]]), w13, w2)
    assert out.flatten().tolist() == pytest.approx([0.5 * 6 * silu + 2 * 5 * silu, 5 * silu])


def test_reference_filters_by_hand() -> None:
    probs = np.array([0.4, 0.3, 0.2, 0.1])
    kept = {
        (2, 1.0, 0.0): [True, True, False, False],
        (0, 0.65, 0.0): [True, True, False, False],
        (0, 1.0, 0.5): [True, True, True, False],
        (3, 0.7, 0.0): [True, True, False, False],
        (0, 0.0, 0.0): [True, False, False, False],
    }
    for (top_k, top_p, min_p), want in kept.items():
        assert ops_reference.kept_tokens(probs, top_k, top_p, min_p).tolist() == want


def test_a_check_prints_as_python_that_makes_it_again() -> None:
    check = AttentionCheck(name="x", head_dim=80, layers=(LayerFacts(scale=0.25, window=3),))
    assert eval(repr(check)) == check
    assert repr(AttentionCheck(name="plain")) == "AttentionCheck(name='plain')"


SPEC = BackendSpec(role="attention", name="x", factory="nowhere:X", caps=(Caps(devices=("cuda",), sm=(90, 90)),))


class WithoutDevice(AttentionSuite):
    spec = SPEC
    device = "cpu"


class OfAnotherRole(AttentionSuite):
    spec = BackendSpec(role="kv", name="x", factory="nowhere:X")
    device = "cpu"


def _collected(suite: type[AttentionSuite]) -> list[tuple[object, ...]]:
    found: list[tuple[object, ...]] = []
    metafunc = SimpleNamespace(
        fixturenames=["conformance"], parametrize=lambda name, values, ids: found.extend(zip(ids, values, strict=True))
    )
    suite().pytest_generate_tests(metafunc)
    return found


def test_a_suite_for_another_device_is_one_skipped_test() -> None:
    ((name, item),) = _collected(WithoutDevice)
    assert name == "none"
    with pytest.raises(SkipTest, match="its caps do not cover cpu"):
        WithoutDevice().test_conforms(item)  # type: ignore[arg-type]


def test_a_suite_refuses_a_spec_of_another_role() -> None:
    with pytest.raises(UsageError, match="OfAnotherRole tests role attention, its spec is of role kv"):
        _collected(OfAnotherRole)


def test_adjacent_capability_sets_are_not_outside() -> None:
    """A value outside one capability set and inside another is claimed."""
    caps = {"devices": ("cpu",), "phases": ("decode",), "kv_layouts": ("NHD",), "gqa_ratios": ANY, "page_sizes": ANY}
    halves = [Caps(dtypes=(d,), kv_dtypes=(d,), head_dims=OneOf(64), **caps) for d in ("float16", "bfloat16")]  # type: ignore[arg-type]
    fixture = DeviceFixture("cpu")
    under_test = BackendUnderTest(BackendSpec(role="attention", name="x", factory="nowhere:X", caps=tuple(halves)))
    names = [check.name for check in checks_of(under_test, fixture, quick=True)]
    assert "outside/dtype=float32" in names and "outside/dtype=float16" not in names
    assert "caps0/decode/float16/ragged" in names and "caps1/decode/bfloat16/ragged" in names
    assert len(set(names)) == len(names)


def test_the_documentation_names_what_the_kit_offers() -> None:
    text = (Path(__file__).resolve().parents[2] / "docs" / "conformance.md").read_text()
    table = set(re.findall(r"`(\w+)`", text.split("| part of the kit |")[1]))
    assert {name for name in testing.__all__ if name.endswith(("Suite", "Case"))} - {"Suite", "Case"} <= table
    code = re.findall(r"```python\n(.*?)```", text, re.DOTALL)[-1]
    with pytest.raises(UsageError, match="no installed plugin offers 'attention:mine@my-package'"):
        exec(code, {})


ROUNDING = {"float16": 2.0**-11, "bfloat16": 2.0**-8}
"""Half of the relative distance between adjacent numbers: 11 and 8 bits of precision."""


@pytest.mark.parametrize("tolerances", [TOLERANCE, moe.TOLERANCE, ops.NORM_TOLERANCE], ids=["kit", "moe", "norm"])
def test_tolerances_are_a_few_roundings(tolerances: Mapping[str, float]) -> None:
    """Two are the least: of what is computed inside in the model's dtype, and of the result. Ten times what the kit
    accepts would be more than 13.
    """
    for dtype, rounding in ROUNDING.items():
        assert 2 * rounding <= tolerances[dtype] <= 13 * rounding, dtype
    # float32: sums of 4,097 terms, the longest in the kit, err by 4,097 roundings of 2**-24 at most
    assert 2 * 2.0**-24 <= tolerances["float32"] <= 4097 * 2.0**-24
    assert max(REPEATABLE.values()) <= TOLERANCE["bfloat16"] / 2
    for dtype, rounding in ROUNDING.items():
        assert rounding <= REPEATABLE[dtype] <= 2.1 * rounding, dtype
