from __future__ import annotations

import gc
from collections import deque

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from storm_client.prefetch import OrderHistory
from storm_client.records import DeadRecord, Handle, Located, Part, RecordGrave, StoredRange, View
from storm_client.steps import Step
from storm_client.versions import SavedVersion
from support.records import record_of
from torch import Tensor


def handle_of(record: StoredRange, tensor: Tensor) -> Handle:
    return Step(OrderHistory()).handle(record, View.of(tensor), SavedVersion.of(tensor))


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
def test_a_view_is_rebuilt_from_its_span_alone(tensor: Tensor) -> None:
    view = View.of(tensor)
    begin, end = view.span()
    begin -= begin % 64
    whole = tensor.untyped_storage()
    flat = torch.empty(0, dtype=torch.uint8).set_(whole, 0, (whole.nbytes(),), (1,))
    moved = flat[begin:end].clone().untyped_storage()
    rebuilt = view.rebuild(Located(moved, begin))
    assert (rebuilt.dtype, rebuilt.shape, rebuilt.stride()) == (
        tensor.dtype,
        tensor.shape,
        tensor.stride(),
    )
    assert (rebuilt.is_conj(), rebuilt.is_neg()) == (tensor.is_conj(), tensor.is_neg())
    assert torch.equal(rebuilt, tensor)


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


def test_a_record_finds_the_original_as_long_as_it_lives() -> None:
    tensor = torch.ones(64)
    record = record_of(tensor)
    record.source = None  # the daemon has it
    located = record.locate()
    assert located is not None
    assert located.storage.data_ptr() == tensor.data_ptr()
    del located, tensor
    assert record.locate() is None


def test_a_storage_that_lost_its_memory_is_not_the_original() -> None:
    """FSDP frees parameters by resizing their storages, and gathers them into the same ones."""
    tensor = torch.ones(64)
    record = record_of(tensor)
    record.source = None
    tensor.untyped_storage().resize_(0)
    assert record.locate() is None
    assert not record.covers(tensor.untyped_storage(), (0, 0), 0)


def test_covering_needs_the_range_and_the_version() -> None:
    tensor = torch.ones(64)
    record, storage = record_of(tensor), tensor.untyped_storage()
    assert record.covers(storage, (0, 256), 0)
    assert record.covers(storage, (64, 128), 0)
    assert not record.covers(storage, (0, 257), 0)
    assert not record.covers(storage, (0, 256), 1)
    tensor.add_(1)
    assert not record.covers(storage, (0, 256), 0)
    assert not record.covers(storage, (0, 256), 1)


def test_what_was_restored_is_held_until_each_handle_has_had_it() -> None:
    tensor = torch.ones(64)
    record = record_of(tensor)
    one, two, three = (handle_of(record, tensor) for _ in range(3))
    record.source = None
    del tensor
    record.hold(torch.ones(64).untyped_storage())
    record.unpacked(one)
    assert record.locate() is not None
    record.unpacked(two)
    assert record.locate() is not None
    del three  # never unpacked: its death counts as well
    assert record.locate() is None


def test_what_was_restored_and_is_still_used_is_found_again() -> None:
    tensor = torch.ones(64)
    record = record_of(tensor)
    handle = handle_of(record, tensor)
    record.source = None
    del tensor
    restored = torch.ones(64).untyped_storage()
    record.hold(restored)
    record.unpacked(handle)
    located = record.locate()
    assert located is not None
    assert located.storage.data_ptr() == restored.data_ptr()


def test_only_handles_keep_a_record() -> None:
    """Its death is noticed at once, without the garbage collector, and only once."""
    woken = []
    grave = RecordGrave(lambda: woken.append(True))
    tensor = torch.ones(64)
    record = record_of(tensor)
    reference = grave.watch(record)
    record.parts.append(Part(7, 0, 256))
    one, two = handle_of(record, tensor), handle_of(record, tensor)
    gc.disable()
    try:
        del record, one
        assert not woken
        del two
        assert woken == [True]
    finally:
        gc.enable()
    assert len(grave) == 1
    assert grave.empty() == [reference]
    assert [part.entry for part in reference.parts] == [7]
    assert len(grave) == 0
    assert grave.empty() == []


def test_the_grave_wakes_once_for_several_deaths() -> None:
    woken = []
    grave = RecordGrave(lambda: woken.append(True))
    records = [record_of(torch.ones(4)) for _ in range(5)]
    for record in records:
        grave.watch(record)
    del record
    records.clear()
    assert woken == [True]
    assert len(grave.empty()) == 5


def test_records_that_die_in_two_threads_at_once_wake() -> None:
    """The second dies while the first has been buried and not been counted yet."""
    wakes: list[int] = []
    grave = RecordGrave(lambda: wakes.append(len(grave._dead)))
    records = [record_of(torch.ones(8)) for _ in range(2)]
    for record in records:
        grave.watch(record)
    del record

    class Interrupted(deque[DeadRecord]):
        def append(self, reference: DeadRecord) -> None:
            super().append(reference)
            records.clear()

    grave._dead = Interrupted()
    records.pop()
    assert wakes
    assert len(grave.empty()) == 2
