"""What is read from the disk, and when: what restores wait for, then what they will want next.

Read ahead is the newest, in a backward pass, where there is room to spare. For what is waited for
clean blocks are given back; for what holds up all other restores of a session also those that are
waited for and have not begun. So it can always be read: at least the reserve is for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from stormd.ledger.bandwidth import Direction
from stormd.ledger.holdings import State
from stormd.ledger.on_disk import Disk, DiskPhase
from stormd.ledger.sessions import Entry
from stormd.ledger.spill_events import ReadJob, SpillJob
from stormd.ledger.spill_order import Numbered, SpillOrder, SpillOrders

__all__ = ["Reads"]


class Reads:
    """Chooses what is read. `reserve` are bytes of the pool that no store is promised."""

    def __init__(self, state: State, disk: Disk, orders: SpillOrders, reserve: int) -> None:
        self._state = state
        self._disk = disk
        self._orders = orders
        self._reserve = reserve
        self.direction: Final = Direction()

    def begin(self, now: float, *, ahead: bool) -> list[SpillJob]:
        """Return what is to be read now; `ahead` where nobody else wants the pool's room."""
        jobs: list[SpillJob] = []
        while self.direction.has_room:
            found = self._next(ahead=ahead)
            if found is None:
                break
            jobs.append(self._read(*found, now))
        return jobs

    def _next(self, *, ahead: bool) -> Numbered | None:
        """Return what is read next, for which room is promised; None where nothing is.

        Of those whose turn it is the one of whom least is being read. While what holds up others
        finds no room, nothing else begins: else it would be taken by what can wait, for ever.
        """
        orders = sorted(self._orders.living(), key=self._read_of)
        for order in orders:
            found = order.head()
            if found is not None:
                return found if self._make_room(found[1], is_first=True) else None
        for order in orders:
            found = order.first_asked()
            if found is not None and self._make_room(found[1], is_first=False):
                return found
        return self._ahead(orders) if ahead else None

    def _ahead(self, orders: Sequence[SpillOrder]) -> Numbered | None:
        """Return what a backward pass will want next, where there is room to spare for it."""
        for order in orders:
            found = order.last_away() if order.record.is_restoring else None
            if found is not None and order.first_asked() is None:
                place = found[1].disk
                assert place is not None
                if self._state.space.promise(place.room, keep=self._reserve):
                    return found
        return None

    def _read_of(self, order: SpillOrder) -> int:
        return self.direction.by_session[order.record.info.session]

    def _read(self, number: int, entry: Entry, now: float) -> ReadJob:
        """Begin to read an entry, for which room is promised."""
        place = entry.disk
        assert place is not None
        place.into = self._state.space.place(place.room, place.nbytes)
        place.enter(DiskPhase.READING)
        self.direction.begin(place, now)
        return ReadJob(
            session=place.session,
            entry=number,
            generation=place.generation,
            block=place.into,
            extent=place.extent,
        )

    def _make_room(self, entry: Entry, *, is_first: bool) -> bool:
        """Have the pool promise room for what is to be read, giving clean blocks back for it.

        For what holds up others, also those that are waited for.
        """
        assert entry.disk is not None
        room = entry.disk.room
        while not self._state.space.promise(room, keep=self._kept_for_shares(room)):
            if not self._orders.drop_idle() and not (is_first and self._orders.drop_waiting()):
                wanted = room + self._kept_for_shares(room)
                if self._state.space.lacks(wanted):
                    self._state.space.want(wanted)
                    self._state.holdings.has_changed = True
                return False
        return True

    def _kept_for_shares(self, nbytes: int) -> int:
        """Return what must stay free for those who have not taken their shares.

        Nothing, where what is read fits into the reserve, which is nobody's share.
        """
        limits, shares = self._state.limits, self._state.holdings.shares
        if not limits.share_bytes or self._disk.held_bytes + nbytes <= self._reserve:
            return 0
        return limits.max_sessions * limits.share_bytes - shares.within_bytes
