"""Finds the record that already holds a tensor's bytes.

What stays true: a record is found only for the very storage that it was made from, with its
version unchanged. A storage is known by the address of its implementation; a weak reference,
kept as long as the table names it, keeps that address from being used for another one.
"""

from __future__ import annotations

import torch

from storm_client.records import DeadRecord, StoredRange

__all__ = ["DedupTable"]


class DedupTable:
    """Records by storage. The session's lock protects it."""

    def __init__(self) -> None:
        """Start empty."""
        self._records: dict[int, list[DeadRecord]] = {}

    def find(
        self, storage: torch.UntypedStorage, span: tuple[int, int], version: int
    ) -> StoredRange | None:
        """Return the living record that holds the bytes `span` of `storage` at `version`."""
        for reference in self._records.get(storage._cdata, ()):
            record = reference()
            if record is not None and record.covers(storage, span, version):
                return record
        return None

    def add(self, reference: DeadRecord) -> None:
        """Let the record be found until `remove`; it is held weakly."""
        self._records.setdefault(reference.origin.cdata, []).append(reference)

    def remove(self, reference: DeadRecord) -> None:
        """Forget a record that died; one whose making was interrupted may never have been known."""
        same_storage = self._records.get(reference.origin.cdata, [])
        if reference in same_storage:
            same_storage.remove(reference)
        if not same_storage:
            self._records.pop(reference.origin.cdata, None)

    def __len__(self) -> int:
        """Return the number of storages known."""
        return len(self._records)
