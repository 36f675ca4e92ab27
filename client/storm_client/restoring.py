"""The way back: stored ranges to memory, on demand and ahead of it.

What stays true: what is fetched ahead waits in the staging area, never in memory of its own, and
takes at most AHEAD_SHARE of it; it gives way to anything that is needed now. The same holds for
stored parts that a lane keeps there because fetching them back costs more. A thread that fetches
on demand copies each part out as it comes, and waits for one with no slot that it could give up,
so a range of any size passes through a staging area of two parts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from storm_client.connection import Connection
from storm_client.errors import ActivationLost, StormError
from storm_client.lanes import Lane, Slot
from storm_client.ranges import span
from storm_client.records import Part, StoredRange
from stormd.protocol import Restore

__all__ = ["Restorer"]

AHEAD_SHARE = 0.75
"""Of the staging area; the rest is left to stores and to other threads' restores."""

REFILL_SHARE = 0.75
"""Of the window: only when no more than this is in use is it filled again."""

AHEAD_PARTS = 64
"""Parts under way at most, however small they are."""

STALL_SECONDS = 60.0
"""How long a restore may make no progress before it is given up; disks are not in the way."""


@dataclass(eq=False, slots=True)
class _Fetch:
    """One part on its way back; in `slot` from the request until it has been copied out.

    Or a part that was stored and is in its slot still: then it has arrived from the beginning.
    """

    slot: Slot
    arrived: bool = False
    abandoned: bool = False
    error: StormError | None = None


@dataclass(slots=True)
class _Retrieval:
    """The parts of one record that are on their way or wait in the staging area."""

    parts: list[Part]
    fetches: dict[int, _Fetch] = field(default_factory=dict)
    """By the part's place in `parts`."""
    demanded: bool = False


class Restorer:
    """Fetches records. Methods without a remark are called with the lock held."""

    def __init__(self, connection: Connection, lane: Lane) -> None:
        """Restore over `connection` through the lane's staging area."""
        self._connection = connection
        self._lane = lane
        self._window = int(lane.staging_bytes * AHEAD_SHARE)
        self._in_use = 0  # bytes of all fetches' slots
        self._slots = 0
        self._tickets: dict[int, _Fetch] = {}
        self._kept: dict[_Fetch, tuple[_Retrieval, int]] = {}  # stored parts, the oldest first
        self._retrievals: dict[int, _Retrieval] = {}

    @property
    def in_use(self) -> int:
        """Bytes of the staging area that restores occupy."""
        return self._in_use

    def fetch(
        self, record: StoredRange, upcoming: Callable[[], list[StoredRange]]
    ) -> torch.UntypedStorage:
        """Return the record's bytes in new memory (without the lock held).

        As slots come free they are used to fetch what `upcoming` names.

        Raises:
            CorruptBlob, ActivationLost: the daemon cannot give the bytes back.
            DaemonLost: it is gone.
        """
        destination = self._lane.allocate(record.nbytes)
        lock = self._connection.lock
        with lock:
            retrieval = self._demand(record)
        try:
            for index, part in enumerate(record.parts):
                with lock:
                    fetch = self._arrival(retrieval, index)
                self._lane.unstage(fetch.slot, destination[part.begin : part.end])
                with lock:
                    self._drop(retrieval, index)
                    self._request_more(retrieval, index + 1)
                    self.fetch_ahead(upcoming)
        finally:
            with lock:
                self.forget(record.key)
        return destination.untyped_storage()

    def fetch_ahead(self, upcoming: Callable[[], list[StoredRange]]) -> None:
        """Request what `upcoming` names, and send all requests that have been posted.

        Nothing is done until a share of the window is free: looking is not free of charge, and
        what is requested together travels together.
        """
        if self._in_use <= self._window * REFILL_SHARE and self._slots <= AHEAD_PARTS // 2:
            self._request_all(upcoming())
        self._connection.flush()

    def keep(self, record: StoredRange, entry: int, slot: Slot) -> bool:
        """Keep a part that has been stored in its slot, if the lane gains by it.

        What is kept longest goes first: it was packed first, and is needed last. Returns whether
        the slot is the restorer's now.
        """
        if not self._lane.keeps_stored or record.being_restored or record.error is not None:
            return False
        while not self._has_room(slot.nbytes):
            if not self._drop_oldest_kept():
                return False
        retrieval = self._retrievals.setdefault(record.key, _Retrieval(record.parts))
        index = next(i for i, part in enumerate(record.parts) if part.entry == entry)
        if index in retrieval.fetches:
            return False
        fetch = retrieval.fetches[index] = _Fetch(slot, arrived=True)
        self._kept[fetch] = (retrieval, index)
        self._in_use += slot.nbytes
        self._slots += 1
        return True

    def make_room(self) -> bool:
        """Give up a part that waits to be needed; tell whether there was one.

        The one that is needed last: of those fetched ahead the newest, else the oldest kept.
        """
        return self._drop_newest_fetched() or self._drop_oldest_kept()

    def forget(self, key: int) -> None:
        """Give up what is left of a record's retrieval."""
        retrieval = self._retrievals.pop(key, None)
        if retrieval is not None:
            for index in list(retrieval.fetches):
                self._drop(retrieval, index)

    def __contains__(self, key: int) -> bool:
        """Tell whether parts of the record of that key are in the staging area or on their way."""
        return key in self._retrievals

    # --- replies ----------------------------------------------------------------------------

    def settled(self, ticket: int, error: StormError | None) -> None:
        """Note that a part is in its slot, or cannot be had."""
        fetch = self._tickets.pop(ticket, None)
        if fetch is None:
            return
        fetch.arrived = True
        fetch.error = error
        if fetch.abandoned:
            self._free(fetch)

    def concerns(self, request: int) -> bool:
        """Tell whether the number is that of a restore under way."""
        return request in self._tickets

    # --- helpers ----------------------------------------------------------------------------

    def _drop_oldest_kept(self) -> bool:
        for retrieval, index in self._kept.values():
            if not retrieval.demanded:
                self._drop(retrieval, index)
                return True
        return False

    def _drop_newest_fetched(self) -> bool:
        if self._slots == len(self._kept):
            return False
        for retrieval in reversed(self._retrievals.values()):
            if retrieval.demanded:
                continue
            for index, fetch in reversed(retrieval.fetches.items()):
                if fetch.arrived and fetch not in self._kept:
                    self._drop(retrieval, index)
                    return True
        return False

    def _drop_last(self, retrieval: _Retrieval) -> bool:
        for index in sorted(retrieval.fetches, reverse=True):
            if retrieval.fetches[index].arrived:
                self._drop(retrieval, index)
                return True
        return False

    def _request_all(self, records: list[StoredRange]) -> None:
        """Request the parts of `records`, in this order, while the window has room."""
        for record in records:
            if record.is_away:
                retrieval = self._retrievals.setdefault(record.key, _Retrieval(record.parts))
                with span("fetch ahead", record.nbytes, record.key):
                    has_room = self._request_more(retrieval, 0)
                if not has_room:
                    return

    def _demand(self, record: StoredRange) -> _Retrieval:
        retrieval = self._retrievals.setdefault(record.key, _Retrieval(record.parts))
        retrieval.demanded = True
        return retrieval

    def _arrival(self, retrieval: _Retrieval, index: int) -> _Fetch:
        """Wait until the part at `index` is in its slot, requesting it and those behind it."""

        def settled() -> bool:
            self._require(retrieval, index)
            fetch = retrieval.fetches.get(index)
            return fetch is not None and fetch.arrived

        self._connection.drain()
        if not self._connection.wait(settled, STALL_SECONDS):
            raise ActivationLost(
                f"the daemon did not restore entry {retrieval.parts[index].entry} within "
                f"{STALL_SECONDS:g} s; see `stormd status` and its log"
            )
        fetch = retrieval.fetches[index]
        if fetch.error is not None:
            raise fetch.error
        return fetch

    def _require(self, retrieval: _Retrieval, index: int) -> None:
        """Request the part at `index` even where that takes the room of what waits."""
        if index not in retrieval.fetches:
            slot = self._reserve_for(retrieval, retrieval.parts[index].nbytes)
            if slot is None:
                return
            self._request(retrieval, index, slot)
        self._request_more(retrieval, index + 1)
        self._connection.flush()

    def reserve(self, nbytes: int) -> Slot | None:
        """Return a slot, giving up what was fetched ahead where there is no other room."""
        slot = self._lane.reserve(nbytes)
        while slot is None and self.make_room():
            slot = self._lane.reserve(nbytes)
        return slot

    def _reserve_for(self, retrieval: _Retrieval, nbytes: int) -> Slot | None:
        """Return a slot for its next part, giving up its own later ones where nothing else helps.

        What is kept of a record may lie so that no free range is as long as a part.
        """
        slot = self.reserve(nbytes)
        while slot is None and self._drop_last(retrieval):
            slot = self._lane.reserve(nbytes)
        return slot

    def _request_more(self, retrieval: _Retrieval, begin: int) -> bool:
        """Request parts from `begin` on; return False when the window is full."""
        for index in range(begin, len(retrieval.parts)):
            if index in retrieval.fetches:
                continue
            nbytes = retrieval.parts[index].nbytes
            slot = self._lane.reserve(nbytes) if self._has_room(nbytes) else None
            if slot is None:
                return False
            self._request(retrieval, index, slot)
        return True

    def _has_room(self, nbytes: int) -> bool:
        return self._in_use + nbytes <= self._window and self._slots < AHEAD_PARTS

    def _request(self, retrieval: _Retrieval, index: int, slot: Slot) -> None:
        part = retrieval.parts[index]
        ticket = next(self._connection.numbers)
        sequence = self._lane.publish(slot)
        restore = Restore(
            ticket=ticket,
            entry=part.entry,
            segment=slot.segment,
            offset=slot.offset,
            nbytes=part.nbytes,
            sequence=sequence,
        )
        fetch = _Fetch(slot)
        self._connection.post(ticket, restore)  # first: nobody waits for what was never asked for
        self._tickets[ticket] = retrieval.fetches[index] = fetch
        self._in_use += slot.nbytes
        self._slots += 1

    def _drop(self, retrieval: _Retrieval, index: int) -> None:
        """Give a part's slot up, at once or as soon as the daemon no longer writes to it."""
        fetch = retrieval.fetches.pop(index)
        self._kept.pop(fetch, None)
        if fetch.arrived:
            self._free(fetch)
        else:
            fetch.abandoned = True

    def _free(self, fetch: _Fetch) -> None:
        self._in_use -= fetch.slot.nbytes
        self._slots -= 1
        self._lane.free(fetch.slot)
        self._connection.notify()
