"""In which order saved tensors will be asked for, and how soon: a pure prediction, learned
step by step.

What stays true: a prediction only decides what is fetched early, never what is returned; a wrong
one costs time alone.

The unit is one packed tensor, named by its number in the order of packing. Until a step like
this one has been seen, the backward pass is expected to go backwards; after that, as it went.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator
from itertools import accumulate

__all__ = ["OrderHistory", "StepPlan"]

LOOK_AGAIN = 32
"""After so many tensors all that is in sight is looked at again: what was here may have left."""

KNOWN_STEPS = 8
"""Kinds of steps remembered (training, validation, several threads) before the oldest goes."""


class OrderHistory:
    """The order of the last step of each kind; a kind is the sequence of packed sizes.

    Steps of several threads may share one.
    """

    def __init__(self) -> None:
        """Start without experience."""
        self._lock = threading.Lock()  # protects the orders
        self._orders: OrderedDict[tuple[int, ...], list[int]] = OrderedDict()

    def replace(self, kind: tuple[int, ...], order: list[int]) -> list[int]:
        """Return the last step's order, empty for a new kind; `order` takes its place.

        `order` may still grow: the step that it describes is under way.
        """
        with self._lock:
            known = self._orders.pop(kind, [])
            self._orders[kind] = order
            if len(self._orders) > KNOWN_STEPS:
                self._orders.popitem(last=False)
        return known

    def soon(self) -> dict[int, int]:
        """Return what the last step needed at once, as sizes by number.

        Between such a tensor's packing and unpacking less than twice its own bytes of others came
        by, so it would have been asked back before it had crossed the link both ways.
        """
        with self._lock:
            if not self._orders:
                return {}
            sizes, order = next(reversed(self._orders.items()))
        packed_after = list(accumulate(reversed(sizes), initial=0))[-2::-1]
        largest = max(sizes, default=0)
        found, unpacked = {}, 0
        for number in order:
            if number >= len(sizes):
                break  # another thread's step has gone on packing, and is now of another kind
            if unpacked >= 2 * largest:
                break
            if packed_after[number] + unpacked < 2 * sizes[number]:
                found[number] = sizes[number]
            unpacked += sizes[number]
        return found


class StepPlan:
    """One step: what was packed, and what is expected to be unpacked next."""

    def __init__(self, history: OrderHistory) -> None:
        """Begin a step of the Offload that `history` belongs to."""
        self._history = history
        self._soon = history.soon()
        self._sizes: list[int] = []
        self._actual: list[int] = []
        self._asked: set[int] = set()
        self._expected: list[int] = []
        self._position: dict[int, int] = {}
        self._next = 0
        self._seen_to = 0  # how far the expected order has been looked at

    def packed(self, nbytes: int) -> int:
        """Note that a tensor of `nbytes` was packed; return its number."""
        self._sizes.append(nbytes)
        return len(self._sizes) - 1

    def needed_at_once(self, nbytes: int) -> bool:
        """Tell whether a tensor of `nbytes` that is packed next was needed at once last time."""
        return self._soon.get(len(self._sizes)) == nbytes

    def unpacked(self, number: int) -> None:
        """Note that the tensor `number` is being asked for, for the first time or again."""
        if len(self._expected) != len(self._sizes):
            self._predict()
        if number not in self._asked:
            self._asked.add(number)
            self._actual.append(number)
        position = self._position[number]
        if position < self._next or not position % LOOK_AGAIN:
            self._seen_to = 0
        self._next = position + 1

    @property
    def is_going_back(self) -> bool:
        """Whether nothing has been packed since a tensor was asked for."""
        return bool(self._sizes) and len(self._expected) == len(self._sizes)

    def upcoming(self) -> Iterator[int]:
        """Yield the numbers expected after the last one asked for, the nearest first."""
        for position in range(self._next, len(self._expected)):
            yield self._expected[position]

    def unseen(self, reach: int) -> list[int]:
        """Return those of the next `reach` expected that have not been looked at: see `saw`."""
        return self._expected[max(self._next, self._seen_to) : self._next + reach]

    def saw(self, count: int) -> None:
        """Note that the first `count` of the unseen need not be looked at again for a while."""
        self._seen_to = max(self._next, self._seen_to) + count

    def _predict(self) -> None:
        """Fix the order, at the first unpack and again when more was packed after it."""
        count = len(self._sizes)
        known = self._history.replace(tuple(self._sizes), self._actual)
        # The order of a step that went on packing names tensors that this one may never have.
        learned = [number for number in known if number < count]
        missing = set(range(count)).difference(learned)
        self._expected = learned + sorted(missing, reverse=True)
        self._position = {number: index for index, number in enumerate(self._expected)}
        self._seen_to = 0
