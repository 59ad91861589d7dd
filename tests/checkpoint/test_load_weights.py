from __future__ import annotations

import logging
import sys
from collections.abc import Iterable

import pytest
import torch

from minisgl_core.checkpoint import WeightTarget, load_weights
from minisgl_core.errors import CheckpointError

ALL = slice(None)


class Memory:
    """A WeightSource over a dict that notes what is read."""

    def __init__(self, **tensors: torch.Tensor) -> None:
        self.tensors = {name.replace("__", "."): tensor for name, tensor in tensors.items()}
        self.reads: list[str] = []

    def names(self) -> frozenset[str]:
        return frozenset(self.tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.tensors[name].shape)

    def dtype(self, name: str) -> str:
        return str(self.tensors[name].dtype).removeprefix("torch.")

    def order(self, names: Iterable[str]) -> list[str]:
        return sorted(names, reverse=True)

    def read(self, name: str, index: tuple[slice, ...]) -> torch.Tensor:
        self.reads.append(name)
        return self.tensors[name][index]

    def close(self) -> None:
        pass


def target(name: str, storage: torch.Tensor, shape: tuple[int, ...], *index: slice) -> WeightTarget:
    return WeightTarget(name, shape, index, storage)


def test_slices_of_several_tensors_fill_one_storage() -> None:
    q, k = torch.arange(8.0).view(4, 2), torch.arange(8.0, 16.0).view(4, 2)
    merged = torch.full((4, 2), -1.0)
    report = load_weights(
        [target("q", merged[:2], (4, 2), slice(2, 4), ALL), target("k", merged[2:], (4, 2), slice(0, 2), ALL)],
        Memory(q=q, k=k),
    )
    assert merged.equal(torch.cat([q[2:4], k[0:2]]))
    assert (report.num_tensors, report.num_bytes, report.extra) == (2, 32, ())


def test_one_tensor_feeds_several_targets_and_dtypes_convert() -> None:
    fused = torch.arange(12.0).view(2, 3, 2)
    first, second = torch.empty(3, 2, dtype=torch.bfloat16), torch.empty(3, 2, dtype=torch.float64)
    targets = [target("e", first[None], (2, 3, 2), slice(0, 1)), target("e", second[None], (2, 3, 2), slice(1, 2))]
    source = Memory(e=fused)
    assert load_weights(targets, source).num_tensors == 1
    assert first.float().equal(fused[0])
    assert second.equal(fused[1].double())


def test_reads_in_the_order_of_the_source() -> None:
    source = Memory(a=torch.ones(1), c=torch.ones(1), b=torch.ones(1))
    load_weights([target(name, torch.empty(1), (1,), ALL) for name in "abc"], source)
    assert source.reads == ["c", "b", "a"]


def test_case_81_missing_tensors_are_named_before_reading() -> None:
    source = Memory(a=torch.ones(1))
    targets = [target(name, torch.empty(1), (1,), ALL) for name in ["a", *(f"x{i:02d}" for i in range(10))]]
    with pytest.raises(CheckpointError, match=r"lacks 10 of 11 tensors: x00, x01, .*, x07, and 2 more") as caught:
        load_weights(targets, source)
    assert caught.value.value == [f"x{i:02d}" for i in range(10)]
    assert source.reads == []


def test_case_81_a_wrong_shape_names_tensor_expected_and_found() -> None:
    source = Memory(a=torch.ones(2, 3))
    with pytest.raises(CheckpointError, match=r"a: expected \(3, 2\), found \(2, 3\)"):
        load_weights([target("a", torch.empty(3, 2), (3, 2), ALL, ALL)], source)
    assert source.reads == []


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool, torch.float8_e4m3fn])
def test_numbers_of_another_kind_are_named_and_not_cast(dtype: torch.dtype) -> None:
    source = Memory(a=torch.ones(2), b=torch.ones(2).to(dtype))
    targets = [target(name, torch.empty(2, dtype=torch.bfloat16), (2,), ALL) for name in "ab"]
    name = str(dtype).removeprefix("torch.")
    with pytest.raises(CheckpointError, match=rf"1 tensors hold other numbers .*: b: {name}; .* quantised") as caught:
        load_weights(targets, source)
    assert caught.value.value == [f"b: {name}"]
    assert source.reads == []


def test_a_target_of_packed_numbers_gets_just_those() -> None:
    packed = torch.empty(2, dtype=torch.uint8)
    load_weights([target("a", packed, (2,), ALL)], Memory(a=torch.tensor([3, 4], dtype=torch.uint8)))
    assert packed.tolist() == [3, 4]
    with pytest.raises(CheckpointError, match="a: float32"):
        load_weights([target("a", packed, (2,), ALL)], Memory(a=torch.ones(2)))


def test_case_81_extra_tensors_are_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    source = Memory(a=torch.ones(1), stray=torch.ones(1))
    with caplog.at_level(logging.WARNING):
        report = load_weights([target("a", torch.empty(1), (1,), ALL)], source)
    assert report.extra == ("stray",)
    assert "1 tensors that the model does not use: stray" in caplog.text


def test_case_81_buffers_and_tensors_left_out_on_purpose_are_fine(caplog: pytest.LogCaptureFixture) -> None:
    buffer = "model__layers__0__self_attn__rotary_emb__inv_freq"
    source = Memory(a=torch.ones(1), lm_head__weight=torch.ones(1), **{buffer: torch.ones(1)})
    with caplog.at_level(logging.WARNING):
        report = load_weights([target("a", torch.empty(1), (1,), ALL)], source, unused=["lm_head.weight"])
    assert report.extra == ()
    assert not caplog.records


def test_a_target_whose_index_and_storage_disagree_is_our_bug() -> None:
    with pytest.raises(ValueError, match=r"index selects \(1,\), storage has \(2,\)"):
        load_weights([target("a", torch.empty(2), (3,), slice(0, 1))], Memory(a=torch.ones(3)))


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_goes_to_stderr_where_that_is_a_terminal(
    terminal: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    load_weights([target("a", torch.empty(1), (1,), ALL)], Memory(a=torch.ones(1)), progress=True)
    captured = capsys.readouterr()
    assert ("Loading weights: 100%" in captured.err) is terminal
    assert captured.out == ""
