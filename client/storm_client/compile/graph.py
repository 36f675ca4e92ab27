"""What the runs of a pair of compiled graphs need to know of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from storm_client.compile.schedule import Schedule
    from storm_client.planner.plan import Plan

__all__ = ["Graph"]


@dataclass(frozen=True, slots=True)
class Graph:
    """What runs need to know of one pair of graphs."""

    plan: Plan
    schedule: Schedule
    ranks: dict[int, int]
    """The places in the schedule's order of the values that a run may keep by choice."""
    early: tuple[int, ...] = ()
    """Offloaded values whose fetches would be in time only if they began before the backward graph,
    in the order of use."""
    order: tuple[int, ...] = ()
    """All offloaded values, in the order in which the backward graph waits for them."""
    early_bytes: int = 0
    """Total bytes of the values in `early`."""
    last_fetched: int | None = None
    """The value whose fetch begins last."""
    free_bytes: int = 0
    """Bytes below the backward graph's peak that are free from that fetch on."""
    free_bytes_from: Mapping[int, int] = field(default_factory=dict)
    """The same from the wait for each offloaded value on."""
    planned: int | None = None
    """Bytes that a run may keep of a budget in bytes that others share; None if no others do."""

    @property
    def last(self) -> int | None:
        """The offloaded value that the backward graph waits for last."""
        return self.order[-1] if self.order else None
