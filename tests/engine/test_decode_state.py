"""The device state: staged changes arrive packed, a steady step uploads nothing, padding stays with the dummy row."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from minisgl_core.builtin.platform import CpuPlatform
from minisgl_core.core import Batch, Req, ReqTable, SamplingParams
from minisgl_core.engine.inputs import BatchInputs
from minisgl_core.engine.sampler import pack_params
from minisgl_core.engine.state import DecodeState, PackedUpload
from minisgl_core.errors import ConfigError


def make_state(rows: int = 4, width: int = 32, max_tokens: int = 64) -> DecodeState:
    default = pack_params(SamplingParams(), seed=0)
    return DecodeState(CpuPlatform(), rows, width, 4, dummy_slot=400, max_tokens=max_tokens, params=default)


def req(row: int, length: int, cached: int) -> Req:
    return Req(torch.arange(100, 100 + length, dtype=torch.int32), row, cached, 8, row, SamplingParams(max_tokens=8))


def test_upload_returns_each_part_and_reuses_its_buffers():
    upload = PackedUpload(CpuPlatform(), 16)
    parts = [np.arange(3, dtype=np.int32), np.empty(0, dtype=np.int32), np.arange(5, 9, dtype=np.int32)]
    for _ in range(5):
        a, none, b = upload.send(parts)
        assert a.tolist() == [0, 1, 2] and none.tolist() == [] and b.tolist() == [5, 6, 7, 8]
        assert a.data_ptr() == upload._staging.data_ptr()


def test_slots_params_and_rows_arrive_with_the_next_decode_batch(monkeypatch):
    state = make_state()
    state.set_slots(1, 3, np.array([40, 41, 42], dtype=np.int32))
    params = SamplingParams(temperature=0.5, top_k=7, top_p=0.9, min_p=0.1)
    state.set_params(1, pack_params(params, seed=2**40 + 5))
    assert int(state.page_table[1].sum()) == 0  # nothing moves before the upload
    batch = Batch([req(1, 4, 3)], "decode", padded_size=2)
    state.upload_decode(batch)
    assert state.page_table[1, 3:6].tolist() == [40, 41, 42]
    assert batch.rows.tolist() == [1, state.dummy_row]
    floats = state.params.view(torch.float32)[1]
    assert floats[[0, 2, 3]].tolist() == pytest.approx([0.5, 0.9, 0.1])
    assert state.params[1, [1, 4, 5]].tolist() == [7, 5, 2**8]
    # The row's length and token come from the Req, whose prefill this state has not seen.
    assert state.lengths[1].item() == 3 and state.last_token[1].item() == 103

    monkeypatch.setattr(state, "send", lambda *_: pytest.fail("a steady step uploads nothing"))
    state.advance_host(batch)
    batch.reqs[0].complete_one()
    state.upload_decode(batch)


def test_slots_of_many_rows_are_set_at_once():
    one_by_one, at_once = make_state(), make_state()
    rows, starts, counts = np.array([3, 0, 1]), np.array([0, 5, 30]), np.array([4, 1, 2])
    slots = np.arange(50, 57, dtype=np.int32)
    at_once.extend_slots(rows, starts, counts, slots)
    for row, start, some in zip(rows, starts, np.split(slots, np.cumsum(counts)[:-1]), strict=True):
        one_by_one.set_slots(row, start, some)
    for state in (one_by_one, at_once):
        state.upload_decode(Batch([req(0, 2, 1)], "decode", padded_size=1))
    assert torch.equal(at_once.page_table, one_by_one.page_table)
    assert at_once.page_table[3, :4].tolist() == [50, 51, 52, 53]
    assert at_once.host_slots(1, 32)[-3:].tolist() == [-1, 55, 56]


def test_a_batch_is_known_by_its_array_of_rows_and_by_its_padding(monkeypatch):
    state, table = make_state(), ReqTable(4, 16)
    reqs = [Req(torch.zeros(3, dtype=torch.int32), row, 2, 8, row, SamplingParams(), table=table) for row in (2, 0)]
    batch = Batch(reqs, "decode", padded_size=2, table=table, table_idx=np.array([2, 0]))
    sends = []
    send = state.send
    monkeypatch.setattr(state, "send", lambda parts: (sends.append(len(parts)), send(parts))[1])
    for padded, total in ((2, 1), (2, 1), (4, 2), (4, 2), (2, 3)):
        batch.padded_size = padded
        state.upload_decode(batch)
        assert len(sends) == total
        assert batch.rows.tolist() == [2, 0] + [state.dummy_row] * (padded - 2)
    batch.reqs, batch.table_idx = batch.reqs[:1], batch.table_idx[:1]
    state.upload_decode(batch)
    assert len(sends) == 4 and batch.rows.tolist() == [2, state.dummy_row]


def test_hand_set_fields_win():
    state = make_state()
    batch = Batch([req(0, 4, 3)], "decode", padded_size=2)
    batch.positions = torch.tensor([9], dtype=torch.int32)
    batch.input_ids = torch.tensor([77], dtype=torch.int32)
    batch.out_loc = torch.tensor([5], dtype=torch.int32)
    BatchInputs(state, max_seq_len=32, dummy_slot=400).upload_decode(batch)
    assert state.lengths[0].item() == 9 and state.last_token[0].item() == 77 and state.page_table[0, 9].item() == 5


def test_write_back_moves_live_rows_only():
    state = make_state()
    rows = torch.tensor([2, state.dummy_row, state.dummy_row], dtype=torch.int32)
    state.write_back(rows, torch.tensor([6, 1, 1]).int(), torch.tensor([-1, 9, 9]).int())
    assert state.lengths.tolist() == [0, 0, 6, 0, 0]
    assert state.last_token.tolist() == [0] * 5  # -1 must not become an index, the dummy row stays at 0


def test_dummy_row_points_at_the_dummy_page():
    state = make_state(width=8)
    assert state.page_table[state.dummy_row].tolist() == [400, 401, 402, 403] * 2


def test_more_slots_than_the_buffer_holds_travel_in_parts():
    state = make_state(rows=4, width=40_000)
    for row in range(4):
        state.set_slots(row, 0, np.arange(row, 40_000 + row, dtype=np.int32))
    state.upload_decode(Batch([req(0, 2, 1)], "decode", padded_size=1))
    for row in range(4):
        assert torch.equal(state.page_table[row], torch.arange(row, 40_000 + row, dtype=torch.int32))


def test_everything_at_once_fits_the_buffer():
    rows, capacity = 100, 1 << 16
    for left in range(-200, 60, 20):  # numbers left in the buffer after all the others; negative: sent in parts
        state = make_state(rows, width=40_000)
        slots = np.arange((capacity - 11 * rows - left) // 2, dtype=np.int32)
        state.set_slots(0, 0, slots)
        for row in range(rows):
            state.set_params(row, pack_params(SamplingParams(), seed=row))
        state.upload_decode(Batch([req(row, 2, 1) for row in range(rows)], "decode", padded_size=rows))
        assert np.array_equal(state.page_table[0, : len(slots)].numpy(), slots)
        assert state.params[:rows, 4].tolist() == list(range(rows))
        assert state.lengths[:rows].tolist() == [1] * rows


def test_prefill_inputs_and_its_limit():
    state = make_state()
    sent = state.upload_prefill(Batch([req(2, 5, 1), req(0, 3, 0)], "prefill"))
    state.upload_prefill(Batch([req(1, 2, 0)], "prefill"))  # what was sent before is left alone
    assert sent.rows.tolist() == [2, 0] and sent.kv_lens.tolist() == [5, 3] and sent.last_rows.tolist() == [3, 6]
    assert sent.cu_q.tolist() == [0, 4, 7] and sent.input_ids.tolist() == [101, 102, 103, 104, 100, 101, 102]
    assert sent.positions.tolist() == [1, 2, 3, 4, 0, 1, 2]
    assert sent.places.tolist() == [2 * state.width + at for at in (1, 2, 3, 4)] + [0, 1, 2]
    assert all(part.data_ptr() % 16 == 0 for part in sent)
    assert state.host_length(2) == 5 and state.host_length(0) == 3
    with pytest.raises(ConfigError, match="max_prefill_tokens"):
        state.upload_prefill(Batch([req(1, 70_000, 0)], "prefill"))


@pytest.mark.parametrize("seed", [-1, 0, 2**63, 2**64 - 1])
def test_any_64_bit_seed_survives_packing(seed):
    row = pack_params(SamplingParams(), seed)
    low, high = row[4:].view(np.uint32)
    assert int(low) | int(high) << 32 == seed % 2**64
