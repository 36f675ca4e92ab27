"""Sources that are read where they lie, and stay there though they were stored.

What was saved last is needed first, so as much of it is held back as the device window allows.
"""

from __future__ import annotations

from storm_client.planner import DeviceWindow
from storm_client.transport.transfer import Outgoing

__all__ = ["HeldSources"]


class HeldSources:
    """Of one session, whose lock protects them."""

    def __init__(self, window: DeviceWindow) -> None:
        """Hold as much as `window` allows."""
        self.nbytes = 0
        """Of the sources."""
        self.has_grown = False
        """Whether the window has seen a source since it was told that something is brought back."""
        self._window = window
        self._sources: dict[int, Outgoing] = {}
        """By the record's key, the oldest first."""

    def hold(self, out: Outgoing) -> None:
        """Hold one back."""
        self._window.saw(out.nbytes)
        self.has_grown = True
        self._sources[out.key] = out
        self.nbytes += out.nbytes

    def turned(self) -> None:
        """Note that something is brought back."""
        self._window.turned()
        self.has_grown = False

    def excess(self, limit: int | None = None) -> Outgoing | None:
        """Return whose source has to go next, None where no more than `limit` bytes are held.

        That is the window's unless it is given. The oldest goes first, because a backward pass
        needs it last.
        """
        most = self._window.may_hold() if limit is None else limit
        return next(iter(self._sources.values())) if self.nbytes > most else None

    def __contains__(self, key: int) -> bool:
        """Tell whether the source of the record of that key is held."""
        return key in self._sources

    def let_go(self, key: int) -> None:
        """Hold a source no longer: its record died, or its turn to go has come."""
        out = self._sources.get(key)
        if out is None:
            return
        del self._sources[key]
        self.nbytes -= out.nbytes
        if out.sequence is None and out.refusal is None and out.stats is not None:
            out.stats.kept(out.nbytes, "needed_at_once")  # before there was a reason to send it

    def clear(self) -> None:
        """Hold nothing any longer: no answer will come any more."""
        self._sources.clear()
        self.nbytes = 0

    def assert_invariants(self) -> None:
        """Check the count against what it counts."""
        assert self.nbytes == sum(out.nbytes for out in self._sources.values())
