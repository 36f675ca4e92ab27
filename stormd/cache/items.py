"""The shared host cache: named tensors that outlive the session that put them.

All of it lies in a space of its own, so activations neither lose room to it nor give it any. A name
means one complete tensor or none. The blocks of a tensor that is being read are not given back,
whatever becomes of its name. Pure: no clock, socket or lane inside.

Names belong to users: each user has names of its own, and reads those of its own and of its
group. Looked up is the user's own tensor first, then the one that was put last by anybody of the
group. Only its owner replaces or deletes a tensor. So nobody can occupy a name for others, and
who may not read a tensor cannot tell that it is there.

Room is made by dropping what was least recently put or read, and for a whole tensor before its
first byte is stored, so that a put never fails halfway for want of it.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from stormd.arena import Block, Space, granules
from stormd.cache.names import NameIndex
from stormd.counters import CacheCounts
from stormd.sizes import format_size

__all__ = ["MAX_ITEMS", "Cache", "CachePart", "Caller", "Item", "Label", "Loan"]

MAX_ITEMS: Final = 16384
"""Tensors held; looking for what has expired among more would stop the loop for too long."""


class Caller(NamedTuple):
    """Who asks, as the kernel knows it: user and primary group of the client's process."""

    uid: int
    gid: int


@dataclass(frozen=True, slots=True)
class Label:
    """What is told about a tensor besides its bytes. `dtype` and `shape` are the client's own."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    part_bytes: int


class CachePart(NamedTuple):
    """One stored part: its blob, its size before encoding, its codec."""

    block: Block
    raw_bytes: int
    codec: str


@dataclass(eq=False, slots=True)
class Item:
    """One tensor. `expires` is a time of the caller's clock, infinite for none.

    `loans` counts the parts that sessions may read; `gone` items have no name any more and are
    freed with the last loan. `charge` is the bytes of the space that it takes.
    """

    label: Label
    owner: Caller
    parts: tuple[CachePart, ...]
    expires: float
    number: int
    loans: int = 0
    gone: bool = False
    charge: int = field(init=False)

    def __post_init__(self) -> None:
        """Add up once what is looked at whenever room is to be made."""
        self.charge = sum(granules(part.block.nbytes) for part in self.parts)


class Cache:
    """Holds what is in `space`, which it shares with the puts that are under way alone.

    `now` is in seconds of a clock that does not step back.
    """

    def __init__(self, space: Space, counts: CacheCounts) -> None:
        self.space: Final = space
        self._counts = counts
        self._items: OrderedDict[Item, None] = OrderedDict()  # least recently used first
        self._by_name: dict[str, dict[int, Item]] = {}  # name -> uid -> item; the same items
        self._index = NameIndex()  # the same names, for lists of them
        self._lent: set[Item] = set()  # gone, and still being read
        self._next_expiry = math.inf
        self._numbers = 0

    # --- putting ----------------------------------------------------------------------------

    def reserve(self, nbytes: int, now: float) -> str | None:
        """Promise `nbytes` of the space, dropping what was used longest ago where that helps.

        Returns None, or why there is no room; then nothing was dropped but what had expired.
        """
        self.expire(now)
        use = self.space.use()
        if nbytes > use.capacity:
            return _shortage(nbytes, use.capacity)
        missing = nbytes - (use.capacity - use.used - use.promised)
        victims = self._victims(missing)
        if victims is None:
            return _shortage(nbytes, use.capacity)
        for item in victims:
            self._evict(item)
        if not self.space.promise(nbytes):
            raise AssertionError(f"{len(victims)} dropped tensors made no room for {nbytes} bytes")
        return None

    def put(
        self, label: Label, owner: Caller, parts: tuple[CachePart, ...], expires: float
    ) -> Item:
        """Make the name mean these parts, whose blocks are the cache's from now on.

        The owner's tensor of that name is dropped; who reads it finishes.
        """
        before = self._by_name.get(label.name, {}).get(owner.uid)
        if before is not None:
            self._drop(before)
        idle = (item for item in self._items if not item.loans)
        if len(self._items) >= MAX_ITEMS and (oldest := next(idle, None)) is not None:
            self._evict(oldest)
        self._numbers += 1
        item = Item(label, owner, parts, expires, self._numbers)
        self._items[item] = None
        self._by_name.setdefault(label.name, {})[owner.uid] = item
        self._index.add(label.name, owner.uid, owner.gid)
        self._next_expiry = min(self._next_expiry, expires)
        self._counts.puts += 1
        return item

    # --- looking up -------------------------------------------------------------------------

    def find(self, name: str, caller: Caller, now: float) -> Item | None:
        """Return what the name means to the caller."""
        self.expire(now)
        owners = self._by_name.get(name, {})
        own = owners.get(caller.uid)
        if own is not None:
            return own
        shared = [item for item in owners.values() if item.owner.gid == caller.gid]
        return max(shared, key=lambda item: item.number, default=None)

    def lend(self, item: Item) -> list[Loan]:
        """Return a loan for each part, which must be ended; the item counts as used."""
        self._counts.hits += 1
        self._items.move_to_end(item)
        item.loans += len(item.parts)
        return [Loan(self, item) for _ in item.parts]

    def missed(self) -> None:
        """Count a look-up that found nothing."""
        self._counts.misses += 1

    def names(self, caller: Caller, after: str, limit: int, now: float) -> tuple[list[str], bool]:
        """Return the first names behind `after` that the caller may read; whether none follow."""
        self.expire(now)
        return self._index.page(caller.uid, caller.gid, after, limit)

    # --- dropping ---------------------------------------------------------------------------

    def delete(self, name: str, caller: Caller, now: float) -> bool:
        """Drop the caller's own tensor of that name; tell whether there was one."""
        self.expire(now)
        item = self._by_name.get(name, {}).get(caller.uid)
        if item is None:
            return False
        self._drop(item)
        return True

    def expire(self, now: float) -> None:
        """Drop what has outlived its time. Costs nothing until the next one is due."""
        if now < self._next_expiry:
            return
        for item in [item for item in self._items if item.expires <= now]:
            self._drop(item)
            self._counts.expirations += 1
        self._next_expiry = min((item.expires for item in self._items), default=math.inf)

    def spoil(self, item: Item) -> None:
        """Drop an item that turned out to be damaged, unless it is gone already."""
        if not item.gone:
            self._drop(item)

    def end_loan(self, item: Item) -> None:
        """Take a loan back."""
        item.loans -= 1
        if item.gone and not item.loans:
            self._lent.remove(item)
            self._free(item)

    # --- what the operator sees -------------------------------------------------------------

    def as_status(self) -> dict[str, Any]:
        """Return the cache as `stormd status` shows it."""
        use = self.space.use()
        return {
            "capacity_bytes": use.capacity,
            "used_bytes": use.used,
            "promised_bytes": use.promised,
            "items": len(self._items),
            "raw_bytes": sum(item.label.nbytes for item in self._items),
            "counters": self._counts.as_status(),
        }

    def held_bytes(self) -> int:
        """Return the bytes of all items, also of those that are only read any more."""
        return sum(item.charge for item in (*self._items, *self._lent))

    def assert_invariants(self) -> None:
        """Raise AssertionError where the cache contradicts itself: for tests."""
        self.space.assert_invariants()
        named = [item for owners in self._by_name.values() for item in owners.values()]
        assert len(named) == len(self._items)
        assert set(named) == set(self._items)
        assert all(self._by_name.values()), "a name without owners was kept"
        for name, owners in self._by_name.items():
            assert all(
                (item.label.name, item.owner.uid) == (name, uid) for uid, item in owners.items()
            )
        assert not any(item.gone for item in named)
        assert all(item.gone and item.loans > 0 for item in self._lent)
        assert all(item.loans >= 0 for item in named)
        assert all(item.expires >= self._next_expiry for item in named)
        assert self.held_bytes() <= self.space.use().used

    # --- parts of the above -----------------------------------------------------------------

    def _victims(self, missing: int) -> list[Item] | None:
        """Return what must go to win `missing` bytes, in its order; None where nothing helps."""
        victims: list[Item] = []
        for item in self._items:
            if missing <= 0:
                break
            if not item.loans:
                victims.append(item)
                missing -= item.charge
        return victims if missing <= 0 else None

    def _evict(self, item: Item) -> None:
        self._drop(item)
        self._counts.evictions += 1

    def _drop(self, item: Item) -> None:
        """Take the name away, and the blocks as soon as nobody reads them."""
        item.gone = True
        del self._items[item]
        owners = self._by_name[item.label.name]
        del owners[item.owner.uid]
        self._index.remove(item.label.name, item.owner.uid, item.owner.gid)
        if not owners:
            del self._by_name[item.label.name]
        if item.loans:
            self._lent.add(item)
        else:
            self._free(item)

    def _free(self, item: Item) -> None:
        for part in item.parts:
            self.space.release(part.block)


@dataclass(frozen=True, slots=True)
class Loan:
    """One part of an item that a session may read until `end`, which comes exactly once."""

    cache: Cache
    item: Item

    def end(self) -> None:
        """Give the part back."""
        self.cache.end_loan(self.item)

    def spoil(self) -> None:
        """Note that the part is damaged: nobody gets the item any more."""
        self.cache.spoil(self.item)


def _shortage(nbytes: int, capacity: int) -> str:
    asked = f"a put of up to {format_size(nbytes)}"
    if nbytes > capacity:
        return f"{asked} into a cache of {format_size(capacity)}: raise cache_bytes, or split it"
    return (
        f"{asked} finds too little of {format_size(capacity)} that is not being read or put at "
        "this moment: try again later, or raise cache_bytes"
    )
