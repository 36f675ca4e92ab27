"""Views, stored ranges and handles: how they lie, how they die, and how a storage is found."""

from __future__ import annotations

import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from storm_client.planner import OrderHistory, Step
from storm_client.saved.ranges import Handle, SavedStorages, StoredRange
from storm_client.saved.snapshots import SnapshotProof
from storm_client.saved.versions import View
from support.records import record_of, version_of
from torch import Tensor


def handle_of(record: StoredRange, tensor: Tensor, table: SavedStorages) -> Handle:
    handle = Step(OrderHistory()).handle(record, View.of(tensor), version_of(tensor))
    table.add_use(handle)
    return handle


# --- views ----------------------------------------------------------------------------------

BASE = torch.arange(240, dtype=torch.float32)


@pytest.mark.parametrize(
    "tensor",
    [
        BASE,
        BASE[7:50:3],
        BASE.view(12, 20).t(),
        BASE.view(4, 6, 10)[1:3, ::2, 3:],
        BASE[5],
        BASE[:0],
        BASE[3:4].expand(9),
        BASE.as_strided((3, 3), (1, 1), 4),
        BASE.view(torch.complex64),
        BASE.view(torch.complex64).conj(),
        BASE.view(torch.complex64).conj().imag,
        BASE.view(torch.int16)[3:90],
        BASE > 10,
    ],
)
def test_a_view_is_rebuilt_where_it_was(tensor: Tensor) -> None:
    rebuilt = View.of(tensor).rebuild(tensor.untyped_storage().clone())
    assert (rebuilt.dtype, rebuilt.shape, rebuilt.stride()) == (
        tensor.dtype,
        tensor.shape,
        tensor.stride(),
    )
    assert rebuilt.storage_offset() == tensor.storage_offset()
    assert (rebuilt.is_conj(), rebuilt.is_neg()) == (tensor.is_conj(), tensor.is_neg())
    assert torch.equal(rebuilt, tensor)


@pytest.mark.parametrize(
    "other",
    [
        BASE[:8],
        BASE[1:9],
        BASE[:16:2],
        BASE[:8].view(torch.int32),
        BASE[:8].view(2, 4),
        BASE[:8].view(torch.complex64).conj(),
        BASE.view(torch.complex64)[:8].conj().imag,
    ],
)
def test_a_view_describes_what_lies_like_it(other: Tensor) -> None:
    view = View.of(BASE[:8])
    assert view.describes(BASE.clone()[:8])
    assert view.describes(other) == (View.of(other) == view)


@given(st.data())
def test_a_span_is_what_the_elements_touch(data: st.DataObject) -> None:
    size = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    stride = [data.draw(st.integers(0, 5)) for _ in size]
    offset = data.draw(st.integers(0, 10))
    tensor = torch.empty(100, dtype=torch.int32).as_strided(size, stride, offset)
    addresses = torch.zeros(tuple(size), dtype=torch.int64) + offset
    for dimension, step in enumerate(stride):
        shape = [-1 if d == dimension else 1 for d in range(len(size))]
        addresses = addresses + torch.arange(size[dimension]).view(shape) * step
    expected = (int(addresses.min()) * 4, (int(addresses.max()) + 1) * 4)
    assert View.of(tensor).span() == expected


# --- records --------------------------------------------------------------------------------


def test_a_storage_that_was_filled_again_is_what_pytorch_would_read() -> None:
    tensor = torch.ones(64)
    record = record_of(tensor)
    storage = tensor.untyped_storage()
    storage.resize_(0)
    torch.empty(1 << 20)  # takes its place, as far as the allocator likes
    storage.resize_(256)
    located = record.locate()
    assert located.storage.data_ptr() == tensor.data_ptr()


def result() -> Tensor:
    return torch.ones(8, 8, requires_grad=True) * 2


def test_a_snapshot_is_proven_by_the_version_that_all_views_share() -> None:
    tensor = result()
    proof = SnapshotProof(tensor[2:5])
    assert proof.holds_for(tensor)
    assert proof.holds_for(tensor.t()[1:])
    with torch.no_grad():
        tensor[0].zero_()
    assert not proof.holds_for(tensor)


def test_siblings_of_an_unsafe_chunk_prove_nothing_of_each_other() -> None:
    """They share a storage, and each counts its own changes."""
    one, other = result().unsafe_chunk(2)
    assert one.untyped_storage()._cdata == other.untyped_storage()._cdata
    proof = SnapshotProof(one)
    assert proof.holds_for(one)
    assert not proof.holds_for(other)
    assert not proof.holds_for(one.as_strided((64,), (1,), 0))


def test_a_base_that_died_proves_nothing() -> None:
    tensor = result()
    alias = tensor.detach()
    proof = SnapshotProof(tensor)
    del tensor
    assert not proof.holds_for(alias)


def test_what_was_restored_is_held_until_each_handle_has_had_it() -> None:
    tensor, table = torch.ones(64), SavedStorages()
    record = record_of(tensor)
    one, two, three = (handle_of(record, tensor, table) for _ in range(3))
    record.source = None
    del tensor
    record.keep_restored(torch.ones(64).untyped_storage(), one)
    assert record.locate() is not None
    record.unpacked(two)
    assert record.locate() is not None
    del three  # never unpacked: its death counts as well
    assert not list(table.dead())
    assert record.locate() is None


def test_deaths_run_no_code_of_ours() -> None:
    """A signal's exception would be swallowed in it."""
    table = SavedStorages()
    ran: list[str] = []

    def note(frame: object, event: str, argument: object) -> None:
        ran.append(event)

    record = record_of(torch.ones(64))
    handle = handle_of(record, torch.ones(64), table)
    reference = table.add(record)
    del record
    sys.setprofile(note)
    del handle
    sys.setprofile(None)
    assert reference() is None
    assert "call" not in ran


def test_a_later_record_takes_the_place_and_keeps_it() -> None:
    table, tensor = SavedStorages(), torch.ones(64)
    first, second = record_of(tensor), record_of(tensor)
    for record in (first, second):
        table.add(record)
    del first, record
    assert len(list(table.dead())) == 1
    assert table.find(tensor.untyped_storage()) is second
    assert len(table) == 1
