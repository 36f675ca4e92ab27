"""The shared budget: the bytes that runs of compiled graphs may keep by choice, all together.

A kept value occupies the device until its graph's backward pass, beside the values that other
graphs keep. So all graphs that are compiled for one client with the same budget in bytes share it,
such as blocks that are compiled one by one. Each gets its share when it is compiled, and the share
decides what it recomputes.
"""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from storm_client.devices import devices_in_use
from storm_client.planner.in_flight import free_bytes
from storm_client.transport.interrupts import SafeWeakSet
from stormd.protocol import Budget

if TYPE_CHECKING:
    from storm_client.transport.daemon_loss import Supply

__all__ = ["WHOLE", "BudgetShare", "SharedBudget", "shared_budget_for"]


class BudgetShare(NamedTuple):
    """The bytes that one model may keep of a budget that several separately compiled ones share."""

    number: int = 0
    """How many of the models were compiled before."""
    of: int = 1
    taken: int = 0
    """Bytes that the models compiled before may keep."""
    is_training: bool = False
    """Whether a backward pass has begun before: a graph is compiled in the middle of a training."""

    def left(self, limit: int, least: int) -> int:
        """Return this share of `limit` in bytes; one model at a time needs `least` of it besides.

        Shares are equal, plus the bytes that earlier models did not use of theirs. A model's blocks
        are alike. If the first ones kept everything, the link would be idle beside them, and could
        not carry all values beside the others.
        """
        return max(0, (self.number + 1) * max(0, limit - least) // self.of - self.taken)


WHOLE: Final = BudgetShare()
"""The share of a model that shares its budget with no other."""


class Sharing(Protocol):
    """Compiled graphs that share a budget."""

    @property
    def least(self) -> int:
        """Bytes that one of them needs at the most, with nothing kept by choice."""

    @property
    def planned(self) -> int | None:
        """The most bytes that a run of one may keep by its plan; None without graphs."""


class Kept(Protocol):
    """A value that is kept by choice."""

    nbytes: int


class SharedBudget:
    """One shared budget, from which several threads may take bytes at once."""

    def __init__(self, budget: Budget) -> None:
        """Let runs keep the bytes of `budget`, or with "fit" as many as the device has free."""
        self._budget = budget
        self._has_seen_backward = False
        """Whether a backward pass has begun, in any thread; never reset."""
        self._sharing: SafeWeakSet[Sharing] = SafeWeakSet()
        self._kept: SafeWeakSet[Kept] = SafeWeakSet()

    def add_graphs(self, graphs: Sharing) -> None:
        """Let graphs share this budget for as long as they are alive."""
        self._sharing.add(graphs)

    def share_of(self, graphs: Sharing) -> BudgetShare:
        """Return the share of `graphs`, of which one is about to be compiled."""
        others = [one for one in self._sharing if one is not graphs]
        taken = [one.planned for one in others if one.planned is not None]
        return BudgetShare(len(taken), len(others) + 1, sum(taken), self._has_seen_backward)

    @property
    def kept_bytes(self) -> int:
        """Bytes that are kept by choice in runs whose backward pass is still to come."""
        return sum(held.nbytes for held in self._kept)

    def left(self, planned: int | None = None) -> int:
        """Return how many bytes a run that begins now may keep by choice.

        This is at most `planned`, or an equal share without a plan for it. The least that any graph
        needs is left free. Before a backward pass has begun, it is not known which graphs a step
        has, so nothing is kept.
        """
        if not self._has_seen_backward:
            return 0
        kept = self.kept_bytes
        if type(self._budget) is int:
            limit = self._budget
        else:
            devices = devices_in_use()
            limit = kept + free_bytes(devices) if devices else 0
        leasts = [one.least for one in self._sharing]
        least = max(leasts, default=0)
        if planned is None:
            planned = BudgetShare(of=max(1, len(leasts))).left(limit, least)
        return min(limit - kept - least, planned)

    def keep(self, held: Kept) -> None:
        """Count a value that is kept by choice, until it is freed."""
        self._kept.add(held)

    def record_backward(self) -> None:
        """Note that a backward pass has begun."""
        self._has_seen_backward = True


def shared_budget_for(supply: Supply | None, budget: Budget) -> SharedBudget:
    """Return the budget that graphs of one client share; None stands for the process's own client.

    With a budget that lets no run decide what is kept, each caller gets a new one, of which nothing
    is taken.
    """
    if type(budget) is not int and budget != "fit":
        return SharedBudget(budget)
    key = (None if supply is None else id(supply), budget)
    with _LOCK:
        reference = _BUDGETS.get(key)
        shared = None if reference is None else reference()
        if shared is None:
            for dead in [old for old, one in _BUDGETS.items() if one() is None]:
                del _BUDGETS[dead]
            shared = SharedBudget(budget)
            _BUDGETS[key] = weakref.ref(shared)
        return shared


_LOCK = threading.Lock()  # protects the table
_BUDGETS: dict[tuple[int | None, Budget], weakref.ref[SharedBudget]] = {}
"""By the id of the client's supply, which lives as long as graphs that hold its `SharedBudget`."""
