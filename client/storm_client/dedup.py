"""Finds the record of a tensor's storage.

What stays true: a record is found only for the very storage that it was made from. A storage is
known by the address of its implementation; a weak reference, kept as long as the table names it,
keeps that address from being used for another one.
"""

from __future__ import annotations

import torch

from storm_client.records import DeadRecord, StoredRange

__all__ = ["DedupTable"]


class DedupTable:
    """The latest record of each storage. The session's lock protects it."""

    def __init__(self) -> None:
        """Start empty."""
        self._records: dict[int, DeadRecord] = {}

    def find(self, storage: torch.UntypedStorage) -> StoredRange | None:
        """Return the living record of `storage`."""
        reference = self._records.get(storage._cdata)
        return None if reference is None else reference()

    def add(self, reference: DeadRecord) -> None:
        """Let the record be found until `remove`, or until its storage has another."""
        self._records[reference.address] = reference

    def remove(self, reference: DeadRecord) -> None:
        """Forget a record that died; another may have taken its place."""
        if self._records.get(reference.address) is reference:
            del self._records[reference.address]

    def __len__(self) -> int:
        """Return the number of storages known."""
        return len(self._records)
