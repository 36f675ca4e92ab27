"""The order in which the saved tensors of a step are needed.

A step is planned from the last step of its signature: from the order in which its tensors were
unpacked, and which of them were needed at once. Such a plan only decides which tensors are sent and
which are prefetched, never which bits are returned: a wrong one costs only time.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Iterator
from itertools import accumulate, islice

from storm_client.saved.ranges import Handle, StoredRange, Use
from storm_client.saved.versions import SavedVersion, View

__all__ = ["OrderHistory", "Step"]

RECHECK_AFTER = 32
"""After so many tensors, all in sight are checked again: the device's copies may be gone."""

KNOWN_STEPS = 8
"""Step signatures remembered (training, validation, several threads) before the oldest is
dropped."""

LOOKAHEAD = 64
"""Handles considered at a time; more than fit into a staging area, fewer than a step has."""

CHECK_EVERY = 16
"""After all in sight were checked, so many are unpacked before the next check. A check, and the
request that it sends to the daemon, cost about the same for one tensor as for several."""

PASS_HANDLES = 4096
"""Handles packed before another pass begins, even if none was unpacked."""


class OrderHistory:
    """The order of the last step of each signature, which here is the number of packed tensors.

    Sizes may differ, as the lengths of batches do. Steps of several threads may share a signature.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # protects the orders
        self._orders: OrderedDict[int, tuple[list[int], list[int]]] = OrderedDict()
        """By number of tensors: the sizes of the last step, and its order."""

    def replace(self, sizes: list[int], order: list[int]) -> list[int]:
        """Return the last step's order, empty for a new signature; `order` replaces it.

        `order` may still grow: its step is still running.
        """
        with self._lock:
            _, known = self._orders.pop(len(sizes), ([], []))
            self._orders[len(sizes)] = list(sizes), order
            if len(self._orders) > KNOWN_STEPS:
                self._orders.popitem(last=False)
        return known

    def needed_at_once(self) -> dict[int, float]:
        """Return the tensors that the last step needed at once, with sizes relative to the first's.

        While such a tensor was packed, fewer than twice its bytes of others were packed or
        unpacked. So it would have been needed before it could cross the link both ways.
        """
        with self._lock:
            if not self._orders:
                return {}
            sizes, order = next(reversed(self._orders.values()))
        packed_after = list(accumulate(reversed(sizes), initial=0))[-2::-1]
        largest = max(sizes, default=0)
        found, unpacked = {}, 0
        for number in order:
            if number >= len(sizes):
                break  # another thread's step has packed more, and now has another signature
            if unpacked >= 2 * largest:
                break
            if packed_after[number] + unpacked < 2 * sizes[number]:
                found[number] = sizes[number] / sizes[0]
            unpacked += sizes[number]
        return found


class StepPlan:
    """One step: the packed tensors, and the order in which they will probably be unpacked."""

    def __init__(self, history: OrderHistory) -> None:
        """Begin a step of the Offload that owns `history`."""
        self._history = history
        self._needed_at_once: dict[int, float] | None = None
        """Tensors that the step before needed at once; None before the first query."""
        self._sizes: list[int] = []
        self._actual: list[int] = []
        self._asked: set[int] = set()
        self._expected: list[int] = []
        self._position: dict[int, int] = {}
        self._next = 0
        self._checked_to = 0  # how far the expected order has been checked

    def packed(self, nbytes: int) -> int:
        """Note that a tensor of `nbytes` was packed; return its number."""
        self._sizes.append(nbytes)
        return len(self._sizes) - 1

    def needed_at_once(self, nbytes: int) -> bool:
        """Return whether the tensor of `nbytes` that is packed next was needed at once last time.

        It is the same tensor if its size relative to the first is equal, for batches of any length.
        """
        if self._needed_at_once is None:
            self._needed_at_once = self._history.needed_at_once()
        first = self._sizes[0] if self._sizes else nbytes
        return self._needed_at_once.get(len(self._sizes)) == nbytes / first

    def unpacked(self, number: int) -> None:
        """Note that the tensor `number` is unpacked, for the first time or again."""
        if len(self._expected) != len(self._sizes):
            self.predict()
        if number not in self._asked:
            self._asked.add(number)
            self._actual.append(number)
        position = self._position[number]
        if position < self._next or not position % RECHECK_AFTER:
            self._checked_to = 0
        self._next = position + 1

    @property
    def is_in_backward(self) -> bool:
        """Whether a tensor was unpacked, and none has been packed since then."""
        return bool(self._sizes) and len(self._expected) == len(self._sizes)

    @property
    def remaining(self) -> int:
        """Number of tensors that are expected to be unpacked still."""
        return len(self._expected) - self._next

    def upcoming(self) -> Iterator[int]:
        """Yield the numbers expected after the last one that was unpacked, the nearest first."""
        for position in range(self._next, len(self._expected)):
            yield self._expected[position]

    def unseen(self, reach: int) -> list[int]:
        """Return the unchecked ones of the next `reach` expected tensors; see `saw`."""
        return self._expected[max(self._next, self._checked_to) : self._next + reach]

    def saw(self, count: int) -> None:
        """Note that the first `count` of the unseen need no new check for a while."""
        self._checked_to = max(self._next, self._checked_to) + count

    def predict(self) -> None:
        """Fix the expected order, at the first unpack and again if more was packed after it."""
        count = len(self._sizes)
        if len(self._expected) == count:
            return
        known = self._history.replace(self._sizes, self._actual)
        # If that step packed more tensors, its order has numbers that this step may never have.
        learned = [number for number in known if number < count]
        missing = set(range(count)).difference(learned)
        expected = learned + sorted(missing, reverse=True)
        position = {number: index for index, number in enumerate(expected)}
        # No call is between these statements: an interrupt leaves the order as it was.
        self._expected, self._position, self._checked_to = expected, position, 0


class _Pass:
    """The tensors packed before any of them was unpacked. Its `plan` counts from `first` on."""

    def __init__(self, history: OrderHistory, earlier: _Pass | None, first: int) -> None:
        self.plan = StepPlan(history)
        self.records: list[weakref.ref[StoredRange]] = []
        self.earlier = earlier
        self.first = first

    @property
    def is_alive(self) -> bool:
        """Whether any of its records is alive, and so may be needed."""
        return any(record() is not None for record in self.records)

    def with_number(self, number: int) -> _Pass:
        """Return the pass that packed the handle with that number."""
        found = self
        while number < found.first and found.earlier is not None:
            found = found.earlier
        return found

    def in_sight(self) -> Iterator[tuple[_Pass, int]]:
        """Yield this pass, then earlier ones, each with the number of handles to consider in it."""
        one: _Pass | None = self
        reach = LOOKAHEAD
        while one is not None and reach > 0:
            one.plan.predict()
            yield one, reach
            reach -= one.plan.remaining
            one = one.earlier


class Step:
    """The handles that one `with` block packed. Several threads may unpack them."""

    def __init__(self, history: OrderHistory) -> None:
        """Begin a step of the Offload that owns `history`."""
        self._history = history
        self._lock = threading.Lock()  # protects all attributes below
        self._packing = _Pass(history, None, 0)
        self._asked = self._packing
        """The pass whose handle was unpacked last."""
        self._rests = 0
        """How many more handles are unpacked before the next check."""

    def handle(self, record: StoredRange, view: View, version: SavedVersion) -> Handle:
        """Return a new handle of `record`, next in the plan."""
        return Handle(record, view, version, self, self._number(record))

    def use(self, record: StoredRange) -> Use:
        """Return a new use of `record`, next in the plan."""
        return Use(record, self, self._number(record))

    def first_use(self, record: StoredRange) -> Use:
        """Return the first use of a new record; `record.soon` now says if it is needed at once."""
        if record.session.has_in_place:
            record.soon = self.needed_at_once(record.nbytes)
        return self.use(record)

    def _number(self, record: StoredRange) -> int:
        with self._lock:
            packing = self._pass_of_next()
            packing.records.append(weakref.ref(record))
            return packing.first + packing.plan.packed(record.nbytes)

    def needed_at_once(self, nbytes: int) -> bool:
        """Return whether a record of `nbytes` that is made now will be needed at once."""
        with self._lock:
            return self._pass_of_next().plan.needed_at_once(nbytes)

    def unpacked(self, use: Use) -> bool:
        """Note that `use` is unpacked; return whether it is the first since the last packing."""
        with self._lock:
            asked = self._packing
            if use.number < asked.first:
                asked = asked.with_number(use.number)
            self._asked = asked
            is_first = not asked.plan.is_in_backward
            asked.plan.unpacked(use.number - asked.first)
            self._rests = 0 if is_first else self._rests - 1
            return is_first

    @property
    def is_due(self) -> bool:
        """Whether it is time to check which records are needed next."""
        return self._rests <= 0

    def upcoming(self) -> list[StoredRange]:
        """Return the next living records, in the order in which they will probably be needed."""
        found: list[StoredRange | None] = []
        with self._lock:
            for one, reach in self._asked.in_sight():
                numbers = islice(one.plan.upcoming(), reach)
                found += [one.records[number]() for number in numbers]
        return [record for record in found if record is not None]

    def unseen(self) -> list[StoredRange | None]:
        """Return the unchecked ones of the upcoming records: each once, None for a freed one.

        The thread that has checked them calls `saw`. If another thread checks them meanwhile, this
        costs only time.
        """
        found: list[StoredRange | None] = []
        with self._lock:
            for one, reach in self._asked.in_sight():
                found += [one.records[number]() for number in one.plan.unseen(reach)]
        return found

    def saw(self, count: int) -> None:
        """Note that the first `count` of the unseen are on the device or were requested."""
        with self._lock:
            is_all = True
            for one, reach in self._asked.in_sight():
                unseen = len(one.plan.unseen(reach))
                seen = min(count, unseen)
                one.plan.saw(seen)
                count -= seen
                is_all = is_all and seen == unseen
            self._rests = CHECK_EVERY if is_all else 0

    def _pass_of_next(self) -> _Pass:
        """Return the pass of the next packed handle, which may differ from that of the last."""
        packing = self._packing
        if packing.plan.is_in_backward or len(packing.records) >= PASS_HANDLES:
            earlier = _living(packing)
            if earlier is not None:
                earlier.earlier = _living(earlier.earlier)
            first = 0 if earlier is None else earlier.first + len(earlier.records)
            packing = self._packing = _Pass(self._history, earlier, first)
        return packing


def _living(latest: _Pass | None) -> _Pass | None:
    """Return the latest pass, up to this one, with a living record."""
    while latest is not None and not latest.is_alive:
        latest = latest.earlier
    return latest
