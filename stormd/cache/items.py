"""The shared host cache: named tensors that outlive the session that put them.

All tensors are in a space of their own, so cache and activations never take room from each other. A
name refers to one complete tensor or to none. The blocks of a tensor that is being read are not
freed, whatever happens to its name. Pure: this module uses no clock, socket or lane.

Names belong to users. Each user has its own names, and reads its own tensors and those of its
group. A look-up finds the user's own tensor first, then the one that a member of the group put
last. Only its owner replaces or deletes a tensor. So nobody can occupy a name for others, and a
user who may not read a tensor cannot tell that it exists.

The cache makes room for each chunk when the chunk arrives, by dropping the tensors that were least
recently put or read. So a client that announces much and sends nothing costs nobody anything. The
cache drops tensors of the user who holds most, and never of one who holds less than the user who
needs the room. Long work is done in small steps (`tidy`, `make_room`), with other clients' requests
in between.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, OrderedDict, deque
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, Final, NamedTuple, Protocol

from stormd.cache.names import NameIndex
from stormd.memory.arena import GRANULE, Block, Space, granules
from stormd.monitoring.counters import CacheCounts
from stormd.sizes import format_size

__all__ = ["MAX_ITEMS", "Cache", "CacheChunk", "Caller", "Item", "ItemRecords", "Label", "Loan"]

MAX_ITEMS: Final = 16384
"""Maximum tensors held, besides those that are being read, of which as many may be: a name and its
place in the lists take some 2 KiB of daemon memory."""

FREED_AT_ONCE: Final = 64
"""Maximum blocks freed, and expired tensors dropped, before other clients have a turn."""


class Caller(NamedTuple):
    """The client's process as the kernel knows it: its user and primary group."""

    uid: int
    gid: int


@dataclass(frozen=True, slots=True)
class Label:
    """A tensor's metadata. `dtype` and `shape` come from the client and are not interpreted."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    chunk_bytes: int


class CacheChunk(NamedTuple):
    """One stored chunk: its blob, its size before encoding, and its codec."""

    block: Block
    raw_bytes: int
    codec: str


@dataclass(eq=False, slots=True)
class Item:
    """One tensor. `expires` is a time of the caller's clock, infinite for none.

    `loans` counts the chunks that sessions may read. A `dropped` item has lost its name and is
    freed with its last loan. `charge` is the item's size in the space, in bytes. `cell` is the
    place of its record in the journal, 0 if it has none.
    """

    label: Label
    owner: Caller
    chunks: tuple[CacheChunk, ...]
    expires: float
    number: int
    loans: int = 0
    dropped: bool = False
    cell: int = 0
    charge: int = field(init=False)

    def __post_init__(self) -> None:
        """Compute the charge once: every attempt to make room reads it."""
        self.charge = sum(granules(chunk.block.nbytes) for chunk in self.chunks)


@dataclass(slots=True)
class Holding:
    """One user's tensors: their total size, and those nobody reads, least recently used first."""

    items: int = 0
    nbytes: int = 0
    idle_bytes: int = 0
    idle: OrderedDict[Item, None] = field(default_factory=OrderedDict)


class ItemRecords(Protocol):
    """Records what must outlive the process."""

    def cached(self, item: Item) -> None:
        """Record that a tensor is in the cache."""

    def dropped(self, item: Item) -> None:
        """Remove the record of a tensor that has lost its name."""


class Cache:
    """Holds the tensors in `space`. Only puts in flight use that space besides them.

    `now` is in seconds of a clock that never goes back.
    """

    def __init__(self, space: Space, counts: CacheCounts, records: ItemRecords) -> None:
        self.space: Final = space
        self._counts = counts
        self._records = records
        self._items: dict[Item, None] = {}
        self._by_name: dict[str, dict[int, Item]] = {}  # name -> uid -> item; the same items
        self._by_user: dict[int, Holding] = {}  # the same, and those in _lent
        self._index = NameIndex()  # the same names, for listing
        self._lent: set[Item] = set()  # dropped, but still being read
        self._expiries: list[tuple[float, int, Item]] = []  # a heap; some items are dropped already
        self._garbage: deque[Block] = deque()  # without an owner, to be freed in the space
        self._numbers = 0

    # --- putting ----------------------------------------------------------------------------

    def shortage(self, nbytes: int) -> str | None:
        """Return why no room for `nbytes` can be made by dropping tensors, or None if it can.

        Nothing is reserved or dropped: a client that announces a tensor has not sent it. What is
        read cannot be dropped, so the number of these tensors has the same limit.
        """
        if sum(one.items - len(one.idle) for one in self._by_user.values()) >= MAX_ITEMS:
            return f"{MAX_ITEMS} tensors are being read at this moment, the limit: try again later"
        use = self.space.use()
        idle = sum(holding.idle_bytes for holding in self._by_user.values())
        free = use.capacity - use.used - use.promised + self._garbage_bytes()
        return _shortage(nbytes, use.capacity) if nbytes > free + idle else None

    def make_room(self, nbytes: int, owner: Caller, putting: int, now: float) -> bool:
        """Drop a little for a chunk of `owner`, whose session already holds `putting` bytes.

        Return True if it must be called again. When it returns False, the space has the room, or
        the tensors that may be dropped do not suffice and none was dropped for the chunk.
        """
        use = self.space.use()
        missing = nbytes - (use.capacity - use.used - use.promised)
        if missing <= 0:
            return False
        if self.tidy(now):
            return True
        mine = self._by_user.get(owner.uid)
        own = putting + (0 if mine is None else mine.nbytes)
        others = [
            (holding.nbytes, holding)
            for uid, holding in self._by_user.items()
            if uid != owner.uid and holding.nbytes >= own and holding.idle
        ]
        room = sum(_droppable(holding, own, missing) for _, holding in others)
        if mine is not None and mine.idle:
            others.insert(0, (own, mine))
            room += mine.idle_bytes
        if missing > room:
            return False
        _, most = max(others, key=_first)
        self._evict(next(iter(most.idle)))
        return True

    def put(
        self, label: Label, owner: Caller, chunks: tuple[CacheChunk, ...], expires: float
    ) -> Item:
        """Make the name refer to these chunks, whose blocks the cache owns from now on.

        The owner's earlier tensor of that name is dropped; reads of it finish.
        """
        before = self._by_name.get(label.name, {}).get(owner.uid)
        if before is not None:
            self._drop(before)
        if len(self._items) >= MAX_ITEMS:
            self._evict_of_many()
        item = Item(label, owner, chunks, expires, self._numbers + 1)
        self._records.cached(item)
        self.adopt(item)
        self._counts.puts += 1
        return item

    def adopt(self, item: Item) -> None:
        """Hold a tensor that is in the space and recorded, perhaps by an earlier daemon."""
        self._numbers = item.number
        label, owner, expires = item.label, item.owner, item.expires
        self._items[item] = None
        self._by_name.setdefault(label.name, {})[owner.uid] = item
        self._index.add(label.name, owner.uid, owner.gid)
        holding = self._by_user.setdefault(owner.uid, Holding())
        holding.items += 1
        holding.nbytes += item.charge
        self._mark_idle(item)
        if expires < math.inf:
            self._note_expiry(item)

    # --- looking up -------------------------------------------------------------------------

    def find(self, name: str, caller: Caller, now: float) -> Item | None:
        """Return the tensor that the name refers to for the caller, or None."""
        owners = self._by_name.get(name, {})
        own = owners.get(caller.uid)
        if own is not None and own.expires > now:
            return own
        shared = [
            item for item in owners.values() if item.owner.gid == caller.gid and item.expires > now
        ]
        return max(shared, key=lambda item: item.number, default=None)

    def lend(self, item: Item) -> list[Loan]:
        """Return one loan for each chunk; each must be ended. The item counts as used."""
        self._counts.hits += 1
        self._mark_busy(item)
        if not item.chunks:
            self._mark_idle(item)
        item.loans += len(item.chunks)
        return [Loan(self, item)] * len(item.chunks)

    def missed(self) -> None:
        """Count a look-up that found nothing."""
        self._counts.misses += 1

    def names(self, caller: Caller, after: str, limit: int) -> tuple[list[str], bool]:
        """Return the first names after `after` that the caller may read, and whether none follow.

        Expired names are included until `tidy` has dropped them.
        """
        return self._index.page(caller.uid, caller.gid, after, limit)

    # --- dropping ---------------------------------------------------------------------------

    def delete(self, name: str, caller: Caller, now: float) -> bool:
        """Drop the caller's own tensor of that name; return whether there was one."""
        item = self._by_name.get(name, {}).get(caller.uid)
        if item is None or item.expires <= now:
            return False
        self._drop(item)
        return True

    def tidy(self, now: float) -> bool:
        """Drop a few expired tensors, or free a few blocks that have no owner.

        Return True if it did something: there may be more to do.
        """
        return self._expire(now) or self.collect()

    def collect(self) -> bool:
        """Free a few blocks that have no owner; return whether there were any."""
        count = min(len(self._garbage), FREED_AT_ONCE)
        for _ in range(count):
            self.space.release(self._garbage.popleft())
        return count > 0

    @property
    def has_garbage(self) -> bool:
        """Whether there are blocks that have no owner and are not freed yet."""
        return bool(self._garbage)

    def discard(self, blocks: list[Block]) -> None:
        """Free blocks in the space: a few at once, many in steps by `collect`."""
        if len(blocks) > FREED_AT_ONCE:
            self._garbage += blocks
            return
        for block in blocks:
            self.space.release(block)

    def drop_damaged(self, item: Item) -> None:
        """Drop an item that proved to be damaged, unless it is dropped already."""
        if not item.dropped:
            self._drop(item)

    def end_loan(self, item: Item) -> None:
        """Take a loan back; free a dropped item with its last loan."""
        item.loans -= 1
        if item.loans:
            return
        if item.dropped:
            self._lent.remove(item)
            self._free(item)
        else:
            self._mark_idle(item)

    # --- what the operator sees -------------------------------------------------------------

    def as_status(self) -> dict[str, Any]:
        """Return the cache as `stormd status` shows it."""
        use = self.space.use()
        return {
            "capacity_bytes": self.space.capacity,
            "committed_bytes": self.space.committed,
            "used_bytes": use.used,
            "promised_bytes": use.promised,
            "items": len(self._items),
            "raw_bytes": sum(item.label.nbytes for item in self._items),
            "counters": self._counts.as_status(),
        }

    def held_bytes(self) -> int:
        """Return the bytes of all blocks held, including those being read or without an owner."""
        return self._garbage_bytes() + sum(holding.nbytes for holding in self._by_user.values())

    def assert_invariants(self) -> None:
        """Raise AssertionError if the cache contradicts itself: for tests."""
        self.space.assert_invariants()
        named = [item for owners in self._by_name.values() for item in owners.values()]
        assert len(named) == len(self._items)
        assert set(named) == set(self._items)
        assert all(self._by_name.values()), "a name without owners was kept"
        for name, owners in self._by_name.items():
            assert all(
                (item.label.name, item.owner.uid) == (name, uid) for uid, item in owners.items()
            )
        assert not any(item.dropped for item in named)
        assert all(item.dropped and item.loans > 0 for item in self._lent)
        assert all(item.loans >= 0 for item in named)
        waiting = {item for _, _, item in self._expiries}
        assert all(item in waiting for item in named if item.expires < math.inf)
        assert len(self._expiries) <= 2 * len(self._items) + FREED_AT_ONCE
        self._assert_holdings()
        assert self.held_bytes() <= self.space.use().used

    def _assert_holdings(self) -> None:
        items: Counter[int] = Counter(item.owner.uid for item in (*self._items, *self._lent))
        assert items == Counter({uid: one.items for uid, one in self._by_user.items()})
        for uid, holding in self._by_user.items():
            mine = [item for item in (*self._items, *self._lent) if item.owner.uid == uid]
            assert holding.nbytes == sum(item.charge for item in mine)
            idle = {item for item in mine if not item.loans}
            assert set(holding.idle) == idle
            assert holding.idle_bytes == sum(item.charge for item in idle)

    # --- helpers ----------------------------------------------------------------------------

    def _garbage_bytes(self) -> int:
        return sum(granules(block.nbytes) for block in self._garbage)

    def _note_expiry(self, item: Item) -> None:
        """Schedule the item's expiry. The heap does not grow with dropped items."""
        if len(self._expiries) >= 2 * len(self._items) + FREED_AT_ONCE:
            self._expiries = [one for one in self._expiries if not one[2].dropped]
            heapq.heapify(self._expiries)
        heapq.heappush(self._expiries, (item.expires, item.number, item))

    def _expire(self, now: float) -> bool:
        dropped = 0
        while self._expiries and self._expiries[0][0] <= now and dropped < FREED_AT_ONCE:
            _, _, item = heapq.heappop(self._expiries)
            dropped += 1
            if not item.dropped:
                self._drop(item)
                self._counts.expirations += 1
        return dropped > 0

    def _mark_busy(self, item: Item) -> None:
        """Exclude an item from those that may be dropped to make room."""
        holding = self._by_user[item.owner.uid]
        if item in holding.idle:
            del holding.idle[item]
            holding.idle_bytes -= item.charge

    def _mark_idle(self, item: Item) -> None:
        """Make an item that nobody reads the last of its user's to be dropped."""
        holding = self._by_user[item.owner.uid]
        holding.idle[item] = None
        holding.idle_bytes += item.charge

    def _evict_of_many(self) -> None:
        """Drop the least recently used item of the user who has most items."""
        idle = [holding for holding in self._by_user.values() if holding.idle]
        if idle:
            self._evict(next(iter(max(idle, key=lambda holding: holding.items).idle)))

    def _evict(self, item: Item) -> None:
        self._drop(item)
        self._counts.evictions += 1

    def _drop(self, item: Item) -> None:
        """Take the name away, and free the blocks as soon as nobody reads them."""
        self._records.dropped(item)
        item.dropped = True
        del self._items[item]
        owners = self._by_name[item.label.name]
        del owners[item.owner.uid]
        self._index.remove(item.label.name, item.owner.uid, item.owner.gid)
        if not owners:
            del self._by_name[item.label.name]
        if item.loans:
            self._lent.add(item)
        else:
            self._mark_busy(item)
            self._free(item)

    def _free(self, item: Item) -> None:
        holding = self._by_user[item.owner.uid]
        holding.items -= 1
        holding.nbytes -= item.charge
        if not holding.items:
            del self._by_user[item.owner.uid]
        self.discard([chunk.block for chunk in item.chunks])


@dataclass(frozen=True, slots=True)
class Loan:
    """One chunk of an item, which a session may read until `end`, called exactly once."""

    cache: Cache
    item: Item

    def end(self) -> None:
        """Give the chunk back."""
        self.cache.end_loan(self.item)

    def drop_damaged(self) -> None:
        """Note that the chunk is damaged: nobody can look the item up any more."""
        self.cache.drop_damaged(self.item)


_first = itemgetter(0)


def _droppable(holding: Holding, own: int, missing: int) -> int:
    """Return the bytes that another user gives before it holds less than `own`.

    They may be more than is returned, if that is `missing` or more.
    """
    least = min(holding.idle_bytes, holding.nbytes - own + GRANULE)
    if least >= min(missing, holding.idle_bytes):
        return least  # without a look at each tensor
    left = holding.nbytes
    for item in holding.idle:
        if left < own:
            break
        left -= item.charge
    return holding.nbytes - left


def _shortage(nbytes: int, capacity: int) -> str:
    asked = f"a put of up to {format_size(nbytes)}"
    if nbytes > capacity:
        return f"{asked} into a cache of {format_size(capacity)}: raise cache_bytes, or split it"
    return (
        f"{asked} finds too little of {format_size(capacity)} that is not being read or put at "
        "this moment: try again later, or raise cache_bytes"
    )
