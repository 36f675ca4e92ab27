"""How the daemon ends sessions: at its own end, or because their clients do not return.

Until the time is short, clients may fetch the entries that they have stored, and so not lose them.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from stormd.gateway import Gateway
from stormd.ledger.ledger import Ledger
from stormd.ledger.sessions import Session, session_name
from stormd.workers.fleet import Fleet

__all__ = ["DETACH_SECONDS", "SessionEnder"]

log = logging.getLogger(__name__)

DETACH_SECONDS: Final = 2.0
"""Time reserved at the end of a shutdown for lanes to finish, at most half of the shutdown's time.
Clients may fetch their entries before."""


class SessionEnder:
    """Ends the sessions of a ledger through its gateway; on the event loop.

    `progress` is set whenever an entry or a session may have ended, also in a worker process.
    """

    def __init__(
        self, ledger: Ledger, gateway: Gateway, fleet: Fleet | None, progress: asyncio.Event
    ) -> None:
        self._ledger = ledger
        self._gateway = gateway
        self._fleet = fleet
        self._progress = progress

    def end_orphans(self, resume_seconds: float) -> None:
        """End an earlier daemon's sessions whose clients are dead or did not resume in time."""
        now = time.monotonic()
        for record in self._ledger.leases.orphans():
            if now - record.seen > resume_seconds or not _lives(record):
                fields = {"session": session_name(record.info.session), "cause": "orphaned"}
                log.info("session ended", extra=fields)
                self._gateway.end(record.info.session, "orphaned")

    async def end_all(self, seconds: float) -> None:
        """End all sessions within `seconds`, and the worker processes with theirs."""
        deadline, ledger, fleet = time.monotonic() + seconds, self._ledger, self._fleet
        holdings = ledger.holdings
        ledger.drain()
        if fleet is not None:
            fleet.drain()
        if not await self._until(
            lambda: not holdings.entries, deadline - _reserved_seconds(seconds)
        ):
            log.warning("clients still hold %d entries, which are lost", holdings.entries)
        if fleet is not None:  # each ends its own sessions, by the same deadline
            await self._until(lambda: fleet.is_idle, deadline)
            await fleet.close(deadline)
        self._gateway.end_all("shutdown")
        if not await self._until(lambda: not ledger.sessions, deadline):
            log.error("%d sessions could not be ended in order", len(ledger.sessions))

    async def end_unresumable(self, seconds: float) -> None:
        """End, within `seconds`, the sessions that the next daemon cannot resume."""
        deadline, there = time.monotonic() + seconds, self._ledger.sessions
        bound = [one for one in there.values() if not one.cell]
        if not bound:
            return
        self._ledger.drain()
        if not await self._until(
            lambda: not any(one.entries for one in bound), deadline - _reserved_seconds(seconds)
        ):
            log.warning("sessions that cannot be resumed still hold entries, which are lost")
        for record in bound:
            self._gateway.end(record.info.session, "shutdown")
        await self._until(lambda: not any(one.info.session in there for one in bound), deadline)

    async def _until(self, condition: Callable[[], bool], deadline: float) -> bool:
        """Wait until the condition holds; return whether it does by the deadline."""
        while not condition():
            self._progress.clear()
            try:
                async with asyncio.timeout(deadline - time.monotonic()):
                    await self._progress.wait()
            except TimeoutError:
                return condition()
        return True


def _reserved_seconds(seconds: float) -> float:
    return min(DETACH_SECONDS, seconds / 2)


def _lives(record: Session) -> bool:
    """Return whether a session's process is alive; True if it is in another PID namespace."""
    if record.hello is None or not record.hello.pid:
        return True
    try:
        state = Path(f"/proc/{record.hello.pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"
