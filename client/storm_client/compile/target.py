"""Targets, to which compiled graphs offload values.

With a budget in bytes, what a run may keep depends on what other runs keep meanwhile
(`shared_budget.py`).
"""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING, Any

from storm_client.compile.announced import Announced
from storm_client.compile.figures import measured
from storm_client.compile.shared_budget import SharedBudget, shared_budget_for
from storm_client.connecting import shared_supply
from storm_client.monitoring.stats import OffloadStats, StatsRecorder
from storm_client.planner.machine import Machine
from storm_client.policy import Policy
from stormd.protocol import Budget

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from storm_client.compile.graph import Graph
    from storm_client.saved.ranges import Holder
    from storm_client.transport.daemon_loss import Supply

__all__ = ["Target", "shared_target"]

SETTLE_SECONDS = 1.0
"""How long statistics wait until the daemon has encoded the values that were stored last."""


class Target:
    """The daemon of one client, to which compiled graphs offload values. Threads may share it."""

    def __init__(
        self,
        supply: Callable[[], Supply],
        budget: Budget,
        codec: str,
        min_bytes: int,
        shared_budget: SharedBudget | None = None,
    ) -> None:
        """Use the sessions of `supply()`, which is called when the first value is offloaded.

        Values that runs keep by choice count against `shared_budget`, by default one of its own.
        """
        self.budget = budget
        self.shared_budget = SharedBudget(budget) if shared_budget is None else shared_budget
        """The shared budget of what runs keep by choice, where runs decide that."""
        self.codec = codec
        self.min_bytes = min_bytes
        self.recorder = StatsRecorder()
        self.graphs: list[Graph] = []
        """The graphs compiled so far."""
        self.shared_budget.add_graphs(self)
        self.policy = Policy((), min_bytes)
        self._supply = supply
        self._lock = threading.Lock()  # protects all below
        self._is_used = False
        self._announced: dict[int, tuple[weakref.ref[Holder], Announced]] = {}
        """By the session's id. A WeakKeyDictionary would lose an interrupt in its callback."""

    def __deepcopy__(self, memo: dict[int, object]) -> Target:
        """Return itself: copies of a compiled model use the same client."""
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the options; elsewhere they give the target of the process's shared client."""
        return shared_target, (self.budget, self.codec, self.min_bytes)

    @property
    def supply(self) -> Supply:
        """The supply of sessions.

        Raises:
            StormError: there is no client yet, and none can be had.
        """
        return self._supply()

    def measured(self, machine: Machine, device: torch.device) -> Machine:
        """Return default figures with those measured for graphs on a device, as `figures` does."""
        return measured(machine, device, self._supply)

    @property
    def least(self) -> int:
        """Bytes that one of the backward graphs needs at the most, with nothing kept by choice."""
        return max((graph.schedule.least for graph in self.graphs), default=0)

    @property
    def planned(self) -> int | None:
        """The most bytes that a run of any graph may keep by its plan; None without graphs."""
        return max((graph.planned or 0 for graph in self.graphs), default=None)

    def stats(self) -> OffloadStats:
        """Return the statistics, after waiting up to a second for stores in flight to end."""
        if self._is_used:
            self.supply.sessions.settle(SETTLE_SECONDS)
        return self.recorder.snapshot()

    def announced(self, session: Holder) -> Announced:
        """Return the records of a session that graphs have announced."""
        with self._lock:
            known = self._announced.get(id(session))
            if known is None or known[0]() is not session:
                known = self._announced[id(session)] = (weakref.ref(session), Announced())
            return known[1]

    def record_save(self) -> None:
        """Note that a value is saved."""
        self.is_in_backward, self._is_used = False, True

    def record_restore(self) -> bool:
        """Note that a value is waited for; return whether it is the first since one was saved."""
        is_first, self.is_in_backward = not self.is_in_backward, True
        self.shared_budget.record_backward()
        return is_first

    is_in_backward = False
    """Whether a value was waited for since one was saved, in any thread: a hint."""


def shared_target(budget: Budget, codec: str, min_bytes: int) -> Target:
    """Return the target for these options of the client that the process shares."""
    key = (budget, codec, min_bytes)
    found = _SHARED.get(key)
    if found is None:
        found = _SHARED.setdefault(
            key, Target(shared_supply, *key, shared_budget_for(None, budget))
        )
    return found


_SHARED: dict[tuple[Budget, str, int], Target] = {}
