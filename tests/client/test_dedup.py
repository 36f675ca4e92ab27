from __future__ import annotations

import torch
from storm_client.dedup import DedupTable
from storm_client.records import DeadRecord, RecordGrave, StoredRange
from support.records import record_of
from torch import Tensor


def add(
    table: DedupTable, grave: RecordGrave, tensor: Tensor, span: tuple[int, int]
) -> StoredRange:
    record = record_of(tensor, span)
    table.add(grave.watch(record))
    return record


def make() -> tuple[DedupTable, RecordGrave]:
    return DedupTable(), RecordGrave(lambda: None)


def test_the_record_that_holds_the_bytes_is_found() -> None:
    table, grave = make()
    tensor = torch.ones(64)
    storage = tensor.untyped_storage()
    head, rest = add(table, grave, tensor, (0, 64)), add(table, grave, tensor, (64, 256))
    assert table.find(storage, (0, 32), 0) is head
    assert table.find(storage, (64, 256), 0) is rest
    assert table.find(storage, (32, 128), 0) is None
    assert table.find(torch.ones(64).untyped_storage(), (0, 32), 0) is None


def test_a_changed_tensor_is_not_found() -> None:
    table, grave = make()
    tensor = torch.ones(64)
    record = add(table, grave, tensor, (0, 256))
    tensor.add_(1)
    assert table.find(tensor.untyped_storage(), (0, 256), tensor._version) is None
    assert record.error is None


def test_dead_records_are_removed_one_by_one() -> None:
    table, grave = make()
    tensor = torch.ones(64)
    storage = tensor.untyped_storage()
    first, second = add(table, grave, tensor, (0, 64)), add(table, grave, tensor, (0, 256))
    del first
    dead: list[DeadRecord] = grave.empty()
    assert table.find(storage, (0, 64), 0) is second
    for reference in dead:
        table.remove(reference)
    assert len(table) == 1
    del second
    assert table.find(storage, (0, 64), 0) is None
    for reference in grave.empty():
        table.remove(reference)
    assert len(table) == 0


def test_an_address_in_the_table_is_not_used_again() -> None:
    """The weak reference keeps it, so that another storage is never taken for the old one."""
    table, grave = make()
    tensor = torch.ones(64)
    address = tensor.untyped_storage()._cdata
    record = add(table, grave, tensor, (0, 256))
    record.source = None
    del tensor
    storages = [torch.ones(64).untyped_storage() for _ in range(100)]
    assert address not in [storage._cdata for storage in storages]


def test_a_record_whose_making_was_interrupted_may_be_unknown() -> None:
    table, grave = make()
    tensor = torch.ones(64)
    known = add(table, grave, tensor, (0, 64))
    table.remove(grave.watch(record_of(tensor)))
    table.remove(grave.watch(record_of(torch.ones(64))))
    assert table.find(tensor.untyped_storage(), (0, 64), 0) is known
