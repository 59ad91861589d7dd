"""FlashAttention on the device: the conformance kit on each variant, and what its claim about page tails rests on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import pytest

from minisgl_core.plugin_api import BackendSpec, LayerFacts
from minisgl_core.testing import AttentionCheck, AttentionSuite
from minisgl_core.testing.backend_under_test import BackendUnderTest
from minisgl_core.testing.compare import Mismatch
from minisgl_core.testing.device_fixture import DeviceFixture
from minisgl_fa.plugin import minisgl_attention_backends

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]  # the library warns when it is imported
SPECS = {spec.variant: spec for spec in minisgl_attention_backends()}


def _bfloat16(spec: BackendSpec) -> BackendSpec:
    return replace(spec, caps=tuple(caps for caps in spec.caps if caps.dtypes == ("bfloat16",)))


class TestFlashAttention3(AttentionSuite):
    spec = _bfloat16(SPECS["fa3"])


class TestFlashAttention3PerLayerSchedule(AttentionSuite):
    spec = _bfloat16(SPECS["fa3"])
    options: ClassVar[Mapping[str, Any]] = {
        "schedule_once": False,
        "decode_num_splits": 4,
        "prefill_num_splits": 1,
        "pack_gqa": True,
        "unpaged_prefill": False,
    }


class TestFlashAttention4(AttentionSuite):
    spec = _bfloat16(SPECS["fa4"])


class TestFlashAttention2(AttentionSuite):
    spec = _bfloat16(SPECS["fa2"])


@pytest.mark.parametrize("options", [{}, {"prefill_num_splits": 3, "pack_gqa": True}, {"unpaged_prefill": False}])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(("kv_heads", "gqa_ratio"), [(8, 2), (1, 5)])
def test_fa3_prefill_without_any_prefix(options: dict[str, Any], head_dim: int, kv_heads: int, gqa_ratio: int) -> None:
    fixture = DeviceFixture("auto")
    if fixture.facts.sm != 90:
        pytest.skip("FlashAttention 3 runs on Hopper")
    check = AttentionCheck(
        name="fresh",
        phase="prefill",
        dtype="bfloat16",
        head_dim=head_dim,
        kv_heads=kv_heads,
        gqa_ratio=gqa_ratio,
        layers=(LayerFacts(0.1), LayerFacts(0.1, window=50)),
        rows=((1, 1), (70, 70), (1000, 1000), (129, 129)),
    )
    with fixture.active():
        check.run(BackendUnderTest(_bfloat16(SPECS["fa3"]), options=options), fixture)


def _with_nan_tails(**changes: Any) -> bool:
    """Does fa3 give right results although the unused tail of each last page is NaN?"""
    fixture = DeviceFixture("auto")
    if fixture.facts.sm != 90:
        pytest.skip("FlashAttention 3 runs on Hopper")
    spec = SPECS["fa3"]
    under_test = BackendUnderTest(replace(spec, caps=tuple(replace(caps, finite_tail=False) for caps in spec.caps)))
    check = AttentionCheck(
        **{
            "name": "tail",
            "dtype": "bfloat16",
            "head_dim": 128,
            "layers": (LayerFacts(0.1),),
            "rows": ((1, 1), (1, 129), (1, 300)),
            **changes,
        }
    )
    try:
        with fixture.active():
            check.run(under_test, fixture)
    except Mismatch as found:
        print(f"NaN tails, {check!r}: {found}")
        return False
    return True


@pytest.mark.parametrize("page_size", [16, 64, 128, 256])
def test_fa3_decode_never_reads_past_a_rows_end(page_size: int) -> None:
    assert _with_nan_tails(phase="decode", page_size=page_size)


@pytest.mark.parametrize("page_size", [16, 64])
def test_fa3_prefill_over_small_pages_never_reads_past_a_rows_end(page_size: int) -> None:
    rows = ((70, 70), (1, 129), (300, 333))
    assert _with_nan_tails(phase="prefill", page_size=page_size, rows=rows)


def test_fa3_needs_the_finite_tail_that_its_spec_declares() -> None:
    """If this fails, every page size is safe and the spec may drop ``finite_tail``."""
    rows = ((70, 70), (200, 200), (300, 333))
    safe = {size: _with_nan_tails(phase="prefill", page_size=size, rows=rows) for size in (128, 256)}
    assert not all(safe.values()), f"no NaN came through: {safe}"
