"""FlashInfer on the device: the conformance kit over the variants that are usually prebuilt, and the page list."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch

from minisgl_core.plugin_api import OneOf
from minisgl_core.testing import AttentionSuite, OpsSuite
from minisgl_core.testing.device_fixture import DeviceFixture
from minisgl_flashinfer.plugin import minisgl_attention_backends, minisgl_layer_ops

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]  # the library warns when it is imported
(SPEC,) = minisgl_attention_backends()
PREBUILT = replace(
    SPEC,
    caps=tuple(
        replace(caps, head_dims=OneOf(64, 128), features=frozenset())
        for caps in SPEC.caps
        if caps.dtypes == ("bfloat16",)
    ),
)
"""Without window, softcap, float16 and head_dim 256: those kernels are compiled at first use, which takes minutes."""


@pytest.fixture(autouse=True, scope="module")
def _no_compilation() -> Iterator[None]:
    before = os.environ.get("FLASHINFER_DISABLE_JIT")
    os.environ["FLASHINFER_DISABLE_JIT"] = "1"
    yield
    del os.environ["FLASHINFER_DISABLE_JIT"]
    if before is not None:
        os.environ["FLASHINFER_DISABLE_JIT"] = before


class TestFlashInfer(AttentionSuite):
    spec = PREBUILT


class TestFlashInferOnTensorCores(AttentionSuite):
    spec = PREBUILT
    options: ClassVar[Mapping[str, Any]] = {"use_tensor_cores": True, "prefill_backend": "fa2"}


class TestFlashInferSampling(OpsSuite):
    spec = minisgl_layer_ops()[0]


def test_the_page_list_is_what_the_view_says() -> None:
    from minisgl_flashinfer.pages import flatten_pages

    fixture = DeviceFixture("auto")
    if fixture.facts.kind != "cuda":
        pytest.skip("the other body of the operation has a test of its own")
    fixture.platform.activate()
    device = fixture.device
    random = torch.Generator().manual_seed(1)
    for rows, width, size in ((1, 1, 1), (5, 7, 16), (256, 2560, 16), (3, 4000, 1), (512, 3, 64)):
        page_ids = torch.randint(0, 1 << 20, (rows, width + 3), generator=random, dtype=torch.int32)[:, :width]
        lens = torch.randint(1, width * size + 1, (rows,), generator=random, dtype=torch.int32)
        counts = (lens + size - 1) // size
        want = torch.cat([ids[:count] for ids, count in zip(page_ids, counts.tolist(), strict=True)])
        indptr, last = torch.full((rows + 1,), -1, dtype=torch.int32), torch.full((rows,), -1, dtype=torch.int32)
        indptr, last, pages = indptr.to(device), last.to(device), torch.full((rows * width,), -1, dtype=torch.int32)
        pages = pages.to(device)
        wide = torch.nn.functional.pad(page_ids, (0, 3)).to(device)[:, :width]
        flatten_pages(wide, lens.to(device), size, indptr, pages, last)
        assert indptr.tolist() == [0, *counts.cumsum(0).tolist()]
        assert torch.equal(pages[: len(want)].cpu(), want)
        assert (pages[len(want) :] == -1).all()
        assert torch.equal(last.cpu(), lens - (counts - 1) * size)
