"""Sources that the daemon reads in place, and that are kept in memory though they were stored.

Tensors saved last are needed first, so as many of them are held as the device window allows.
"""

from __future__ import annotations

from storm_client.planner import DeviceWindow
from storm_client.transport.transfer import Outgoing

__all__ = ["HeldSources"]


class HeldSources:
    """The held sources of one session, whose lock protects them."""

    def __init__(self, window: DeviceWindow) -> None:
        """Hold as much as `window` allows."""
        self.nbytes = 0
        """The total bytes of the sources."""
        self.has_grown = False
        """Whether a source was added since the window was last told that a restore began."""
        self._window = window
        self._sources: dict[int, Outgoing] = {}
        """By the record's key, the oldest first."""

    def hold(self, out: Outgoing) -> None:
        """Hold a source."""
        self._window.record_store(out.nbytes)
        self.has_grown = True
        self._sources[out.key] = out
        self.nbytes += out.nbytes

    def on_backward_begin(self) -> None:
        """Tell the window that a restore begins."""
        self._window.on_backward_begin()
        self.has_grown = False

    def excess(self, limit: int | None = None) -> Outgoing | None:
        """Return the source to give up next, None if no more than `limit` bytes are held.

        The default for `limit` is the window's limit. The oldest source is given up first, because
        a backward pass needs it last.
        """
        most = self._window.may_hold() if limit is None else limit
        return next(iter(self._sources.values())) if self.nbytes > most else None

    def __contains__(self, key: int) -> bool:
        """Return whether the source of the record with that key is held."""
        return key in self._sources

    def drop(self, key: int) -> None:
        """Stop holding a source: its record was freed, or the source is given up."""
        out = self._sources.get(key)
        if out is None:
            return
        del self._sources[key]
        self.nbytes -= out.nbytes
        if out.sequence is None and out.refusal is None and out.stats is not None:
            out.stats.kept(out.nbytes, "needed_at_once")  # there was never a reason to send it

    def clear(self) -> None:
        """Stop holding all sources: no answer will come any more."""
        self._sources.clear()
        self.nbytes = 0

    def assert_invariants(self) -> None:
        """Check the count against what it counts."""
        assert self.nbytes == sum(out.nbytes for out in self._sources.values())
