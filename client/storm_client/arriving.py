"""The way back where the daemon writes into the tensors' own memory, on demand and ahead of it.

What stays true: memory that the daemon may still write to is kept, whoever has lost interest in
it, until the daemon has answered for every part; nothing is handed out before all of its parts
have been verified; and what is fetched ahead stays within the window.

The memory comes from PyTorch's allocator, on the stream that is current when it is asked for.
The daemon writes behind that stream's work so far, so memory that was just freed there may be
taken at once.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from storm_client.connection import Connection
from storm_client.errors import ActivationLost, StormError
from storm_client.lanes import InPlace, Lane, Slot
from storm_client.ranges import span
from storm_client.records import Course, StoredRange
from storm_client.restoring import STALL_SECONDS, Restorer
from storm_client.window import Window
from stormd.protocol import Restore

__all__ = ["Arrivals"]

REFILL_SHARE = 0.75
"""Of the window: only when no more than this is in use is it looked at again."""

TOGETHER_BYTES = 8 << 20
"""Of records fetched ahead: so many share an event on the stream and a frame to the daemon."""

LAST_WRITES_SECONDS = 0.5
"""How long the memory of restores that a dead daemon left under way is not given back."""


@dataclass(eq=False, slots=True)
class _Arrival:
    """A record on its way to `storage`, or there; parts under way keep it through their tickets."""

    storage: torch.UntypedStorage
    outstanding: int
    error: StormError | None = None
    demanded: bool = False
    abandoned: bool = False

    @property
    def nbytes(self) -> int:
        return int(self.storage.nbytes())


class Arrivals:
    """Fetches records in place. Methods without a remark are called without the lock held."""

    def __init__(
        self, connection: Connection, lane: Lane, in_place: InPlace, window: Window
    ) -> None:
        """Restore over `connection` into memory of `lane` that the daemon has mapped."""
        self._connection = connection
        self._lane = lane
        self._in_place = in_place
        self._window = window
        # The session's lock protects all below.
        self._arrivals: dict[int, _Arrival] = {}
        self._tickets: dict[int, _Arrival] = {}
        self._early = 0  # bytes of arrivals that nobody waits for, abandoned ones included
        self._is_mapped = False
        self._allowed = window.limit  # how many of these there may be, as last measured

    def begin(self, record: StoredRange) -> bool:
        """Have a record fetched now; False where its bytes must take the staging area."""
        with self._connection.lock:
            arrival = self._arrivals.get(record.key)
            if arrival is not None:
                self._demand(arrival)
                return True
        return self._open([record], demanded=True)

    def ahead(self, step: Course, staged: Restorer) -> bool:
        """Request what `step` needs next, in this order, while the window has room.

        What is `staged`, fetched through the staging area, is left out. Returns False where the
        others have to take that way, too.
        """
        with self._connection.lock:
            if self._early > self._allowed * REFILL_SHARE:
                return True
            wanted, seen = self._chosen(step.unseen(), staged)
        if not all(self._open_early(records) for records in _together(wanted)):
            return False
        step.saw(seen)
        return True

    def finish(self, record: StoredRange) -> torch.UntypedStorage:
        """Return the bytes of a record that was begun, once they are all there.

        Raises:
            CorruptBlob, ActivationLost: the daemon cannot give the bytes back.
            DaemonLost: it is gone.
        """
        with self._connection.lock:
            arrival = self._arrivals[record.key]
            self._demand(arrival)
            try:
                self._await(arrival, record)
            finally:
                self.forget(record.key)
        if arrival.error is not None:
            raise arrival.error
        return arrival.storage

    def forget(self, key: int) -> None:
        """Give up what nobody wants any more; called with the lock held."""
        arrival = self._arrivals.pop(key, None)
        if arrival is None:
            return
        arrival.abandoned = True
        if not arrival.demanded and not arrival.outstanding:
            self._early -= arrival.nbytes

    def relent(self) -> None:
        """Give all up that nobody waits for: the device is out of memory (with the lock held)."""
        for key in [key for key, arrival in self._arrivals.items() if not arrival.demanded]:
            self.forget(key)

    @property
    def in_use(self) -> bool:
        """Whether the daemon could map the memory that was allocated last."""
        return self._is_mapped

    def close(self) -> None:
        """Let all go. Memory that a daemon was writing to when it died is kept for its last writes.

        Nothing tells when the device has ended a dead process's kernels; it takes milliseconds.
        """
        with self._connection.lock:
            self._arrivals.clear()
            is_written = bool(self._tickets)
        if is_written:
            time.sleep(LAST_WRITES_SECONDS)
        self._tickets.clear()

    def __contains__(self, key: int) -> bool:
        """Tell whether the record of that key is on its way or there; with the lock held."""
        return key in self._arrivals

    # --- replies, with the lock held --------------------------------------------------------

    def concerns(self, ticket: int) -> bool:
        """Tell whether the number is that of a part under way."""
        return ticket in self._tickets

    def settled(self, ticket: int, error: StormError | None) -> None:
        """Note that the daemon writes a part no more: it is there, or cannot be had."""
        arrival = self._tickets.pop(ticket)
        arrival.outstanding -= 1
        arrival.error = arrival.error or error
        if arrival.abandoned and not arrival.demanded and not arrival.outstanding:
            self._early -= arrival.nbytes
        self._connection.notify()

    # --- helpers ----------------------------------------------------------------------------

    def _open(self, records: list[StoredRange], *, demanded: bool) -> bool:
        """Allocate records' memory and request their parts; False where the daemon cannot."""
        storages = [self._allocate(record.nbytes, demanded=demanded) for record in records]
        with self._connection.lock:
            placed, can_all = self._placed(records, storages)
            if placed:
                sequence = self._in_place.produced(1)[0]  # behind whoever had the memory before
                for record, storage, slot in placed:
                    self._request(record, storage, slot, sequence)
                self._connection.flush()
            for record in records if demanded else ():
                if record.key in self._arrivals:
                    self._demand(self._arrivals[record.key])
        return can_all

    def _open_early(self, records: list[StoredRange]) -> bool:
        nbytes = sum(record.nbytes for record in records)
        with span("fetch ahead", nbytes, records[0].key):
            return self._open(records, demanded=False)

    def _placed(
        self, records: list[StoredRange], storages: list[torch.UntypedStorage | None]
    ) -> tuple[list[tuple[StoredRange, torch.UntypedStorage, Slot]], bool]:
        """Return where the daemon can write each record; False with it if it cannot write all."""
        placed: list[tuple[StoredRange, torch.UntypedStorage, Slot]] = []
        for record, storage in zip(records, storages, strict=True):
            if storage is None or record.key in self._arrivals:
                continue  # no memory for what nobody waits for; or another thread has begun it
            slot = self._in_place.find(storage.data_ptr(), record.nbytes)
            self._is_mapped = slot is not None
            if slot is None:
                return placed, False
            placed.append((record, storage, slot))
        return placed, True

    def _allocate(self, nbytes: int, *, demanded: bool) -> torch.UntypedStorage | None:
        """Return memory; None where there is none for what nobody waits for."""
        try:
            return self._lane.allocate(nbytes).untyped_storage()
        except torch.OutOfMemoryError:  # the observer has had what was fetched ahead given up
            if not demanded:
                return None
        with self._connection.lock:
            self._connection.wait(lambda: not self._early, STALL_SECONDS)
        return self._lane.allocate(nbytes).untyped_storage()

    def _request(
        self, record: StoredRange, storage: torch.UntypedStorage, slot: Slot, sequence: int
    ) -> None:
        arrival = _Arrival(storage, len(record.parts))
        self._arrivals[record.key] = arrival
        self._early += arrival.nbytes
        for part in record.parts:
            ticket = next(self._connection.numbers)
            self._tickets[ticket] = arrival
            place = slot.offset + part.begin
            request = Restore(
                ticket=ticket,
                entry=part.entry,
                segment=slot.segment,
                offset=place,
                nbytes=part.nbytes,
                sequence=sequence,
            )
            self._connection.post(ticket, request)

    def _demand(self, arrival: _Arrival) -> None:
        if not arrival.demanded:
            arrival.demanded = True
            self._early -= arrival.nbytes

    def _await(self, arrival: _Arrival, record: StoredRange) -> None:
        while left := arrival.outstanding:
            if not self._connection.wait(lambda: arrival.outstanding < left, STALL_SECONDS):
                raise ActivationLost(
                    f"the daemon restored no part of record {record.key} for {STALL_SECONDS:g} s; "
                    f"{left} of {len(record.parts)} are missing; see `stormd status` and its log"
                )

    def _chosen(
        self, upcoming: Iterable[StoredRange | None], staged: Restorer
    ) -> tuple[list[StoredRange], int]:
        """Return the next records to fetch, as many as there is room for, and how far that was.

        Measuring the room costs as much as all the rest of a hook, so it is done where it counts.
        """
        chosen: dict[int, StoredRange] = {}  # each once, however many handles it has
        room: int | None = None
        count = 0
        for count, record in enumerate(upcoming, 1):
            if record is None or record.key in chosen or not self._is_wanted(record, staged):
                continue
            if room is None:
                room = self._room()
            room -= record.nbytes
            if room < 0:
                return list(chosen.values()), count - 1
            chosen[record.key] = record
        return list(chosen.values()), count

    def _is_wanted(self, record: StoredRange, staged: Restorer) -> bool:
        key = record.key
        return record.is_away and key not in self._arrivals and key not in staged

    def _room(self) -> int:
        """Return how much more may be fetched early now."""
        self._allowed = self._window.ahead(self._in_place.headroom())
        return self._allowed - self._early


def _together(records: list[StoredRange]) -> Iterator[list[StoredRange]]:
    """Yield the records, those together that are so small that what each costs would count."""
    group: list[StoredRange] = []
    for record in records:
        group.append(record)
        if sum(one.nbytes for one in group) >= TOGETHER_BYTES:
            yield group
            group = []
    if group:
        yield group
