from __future__ import annotations

import torch
from storm_client.saved import Deaths, SavedStorages, StoredRange
from support.records import record_of
from torch import Tensor


def add(table: SavedStorages, deaths: Deaths, tensor: Tensor) -> StoredRange:
    record = record_of(tensor)
    table.add(deaths.watch(record))
    return record


def clean(table: SavedStorages, deaths: Deaths) -> None:
    for reference in deaths.records():
        table.remove(reference)


def test_the_record_of_the_storage_is_found() -> None:
    table, deaths = SavedStorages(), Deaths()
    tensor = torch.ones(64)
    record = add(table, deaths, tensor)
    assert table.find(tensor[3:].untyped_storage()) is record
    assert table.find(torch.ones(64).untyped_storage()) is None


def test_a_later_record_takes_the_place_and_keeps_it() -> None:
    table, deaths = SavedStorages(), Deaths()
    tensor = torch.ones(64)
    first = add(table, deaths, tensor)
    second = add(table, deaths, tensor)
    del first
    clean(table, deaths)
    assert table.find(tensor.untyped_storage()) is second


def test_dead_records_are_removed() -> None:
    table, deaths = SavedStorages(), Deaths()
    tensor = torch.ones(64)
    record = add(table, deaths, tensor)
    del record
    assert table.find(tensor.untyped_storage()) is None
    assert len(table) == 1
    clean(table, deaths)
    assert len(table) == 0


def test_an_address_in_the_table_is_not_used_again() -> None:
    """The weak reference keeps it, so that another storage is never taken for the old one."""
    table, deaths = SavedStorages(), Deaths()
    tensor = torch.ones(64)
    address = tensor.untyped_storage()._cdata
    record = add(table, deaths, tensor)
    record.source = None
    del tensor
    storages = [torch.ones(64).untyped_storage() for _ in range(100)]
    assert address not in [storage._cdata for storage in storages]


def test_a_record_whose_making_was_interrupted_may_be_unknown() -> None:
    table, deaths = SavedStorages(), Deaths()
    tensor = torch.ones(64)
    known = add(table, deaths, tensor)
    table.remove(deaths.watch(record_of(tensor)))
    table.remove(deaths.watch(record_of(torch.ones(64))))
    assert table.find(tensor.untyped_storage()) is known
