"""What one daemon leaves to the next: the pool's memory, its journal, the sockets that listen.

The manager that starts daemons keeps their descriptors (`notify`), whatever ends a daemon. One that
comes finds all of it and goes on, or says why it cannot, and begins anew: what was there is lost
then, and clients are told so. What lies in memory was laid out by settings of then, which stay as
they were for as long as somebody has something there.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from stormd.cache.items import Cache
from stormd.config import Config
from stormd.errors import ConfigError, PoolUnavailable
from stormd.ledger.ledger import Ledger
from stormd.ledger.records import JournalRecords, Layout, State, Totals, read_state
from stormd.memory.arena import Space
from stormd.memory.journal import Journal, JournalUnusable
from stormd.memory.shared_memory import is_sealed, sealed_memory
from stormd.notify import Notifier

__all__ = ["CONTROL", "LIFELINES", "Handover"]

log = logging.getLogger(__name__)

CONTROL: Final = "stormd-control"
LIFELINES: Final = "stormd-lifelines"
_POOL: Final = "stormd-pool"
_JOURNAL: Final = "stormd-journal"
"""What the manager knows the descriptors by."""


class Handover:
    """Of one daemon; all methods are called in the order in which it opens and ends.

    `state` is what an earlier one has left, None where that is nothing, or of no use.
    """

    def __init__(self, notifier: Notifier, kept: dict[str, int]) -> None:
        """Own the descriptors that were kept for this process, by name."""
        self._notifier = notifier
        self._kept = kept
        self._pool = -1
        self._journal: Journal | None = None
        self._records: JournalRecords
        self._noted = Totals()
        self.state: State | None = None
        self.earlier = Totals()
        """What earlier daemons have stored."""

    def take(self, config: Config) -> Config:
        """Read what was left; return the settings to go on with."""
        pool, journal = self._kept.pop(_POOL, -1), self._kept.pop(_JOURNAL, -1)
        if pool < 0 or journal < 0:
            self._close(pool, journal)
            return config
        try:
            self._journal, found = Journal.open(journal)
            state = read_state(found)
            self.earlier = state.totals
            if state.is_empty:
                raise _NothingLeft  # noqa: TRY301 - as where it cannot be read
            fitted = _fitted(config, state.layout)
            if not is_sealed(pool, fitted.host_bytes):
                raise JournalUnusable("the memory is not of the size that it tells of")  # noqa: TRY301
        except (_NothingLeft, JournalUnusable, ConfigError, OSError) as error:
            if not isinstance(error, _NothingLeft):
                log.error("what an earlier daemon held is lost: %s", error)  # noqa: TRY400
            self._drop_journal(journal)
            self._close(pool)
            return config
        self._pool, self.state = pool, state
        return fitted

    def give_up(self, reason: str) -> None:
        """Begin anew: what was left contradicts itself."""
        log.error("what an earlier daemon held is lost: %s", reason)
        self._drop_journal(-1)
        self._close(self._pool)
        self._pool, self.state = -1, None

    def pool_file(self, nbytes: int) -> int:
        """Return the descriptor of the pool's memory, which stays this object's.

        Raises:
            PoolUnavailable: the kernel gives none.
        """
        if self._pool < 0:
            try:
                self._pool = sealed_memory("stormd-pool", nbytes)
            except OSError as error:
                raise PoolUnavailable(f"no memory file for the pool: {error.strerror}") from error
        return self._pool

    def records(self) -> JournalRecords:
        """Return where all that outlives the process is written down.

        Raises:
            PoolUnavailable: there is no address space for it.
        """
        if self._journal is None:
            try:
                self._journal = Journal.make()
            except OSError as error:
                raise PoolUnavailable(f"no memory for the journal: {error.strerror}") from error
        self._records = JournalRecords(self._journal)
        if self.state is not None:
            self._records.adopt(self.state)
        return self._records

    def adopt(self, ledger: Ledger, cache: Cache | None) -> None:
        """Have what an earlier daemon has left be held until its clients come."""
        if self.state is None:
            return
        now = time.monotonic()
        for session in self.state.sessions:
            ledger.leases.adopt(session, now)
        for item in self.state.items:
            assert cache is not None, "a layout with a cache makes one"
            cache.adopt(item)
        log.info(
            "went on with what was held",
            extra={"sessions": len(self.state.sessions), "cached": len(self.state.items)},
        )

    def note_layout(self, config: Config, spaces: Sequence[Space]) -> None:
        """Write down how the memory is laid out now."""
        self._records.laid_out(
            Layout(
                pool_bytes=config.pool_bytes,
                cache_bytes=config.cache_bytes,
                committed=tuple(space.committed for space in spaces),
                part_bytes={"cpu": config.part_bytes_cpu, "cuda": config.part_bytes_cuda},
            )
        )

    def note_totals(self, stored: Mapping[str, Any]) -> None:
        """Write down what has been stored by now: by this daemon `stored`, as counters have it."""
        totals = Totals(
            self.earlier.raw_bytes + stored["raw_bytes"],
            self.earlier.blob_bytes + stored["blob_bytes"],
        )
        if totals != self._noted:
            self._records.counted(totals)
            self._noted = totals

    def keep_memory(self, config: Config, spaces: Sequence[Space]) -> None:
        """Have pool and journal be kept, whose layout is written down first."""
        assert self._journal is not None, "there is no journal yet"
        self.note_layout(config, spaces)
        if self.state is None:
            self._keep(_POOL, self._pool)
            self._keep(_JOURNAL, self._journal.descriptor)

    def listening(self, name: str, path: Path) -> socket.socket | None:
        """Return the socket of that name, which clients have connected to meanwhile, if there is.

        One that is bound elsewhere, or whose file is gone, is closed.
        """
        descriptor = self._kept.pop(name, -1)
        if descriptor < 0:
            return None
        found = socket.socket(fileno=descriptor)
        if found.family == socket.AF_UNIX and found.getsockname() == str(path) and path.is_socket():
            return found
        found.close()
        return None

    def keep_listening(self, name: str, descriptor: int) -> None:
        """Have a socket be kept that listens, in the place of an earlier one of that name."""
        self._keep(name, descriptor)

    def end(self) -> None:
        """Have nothing be kept any more: the daemon has ended in order."""
        for name in (CONTROL, LIFELINES, _POOL, _JOURNAL):
            self._notifier.forget(name)

    def close(self) -> None:
        """Close what this process has; what is kept stays. Nothing is written down any more."""
        self._close(self._pool, *self._kept.values())
        self._kept.clear()
        self._pool = -1
        self._drop_journal(-1)

    def _keep(self, name: str, descriptor: int) -> None:
        self._notifier.forget(name)
        self._notifier.store(name, descriptor)

    def _drop_journal(self, descriptor: int) -> None:
        if self._journal is not None:
            self._journal.close()
            self._journal = None
        else:
            self._close(descriptor)

    def _close(self, *descriptors: int) -> None:
        for descriptor in descriptors:
            if descriptor >= 0:
                os.close(descriptor)


class _NothingLeft(Exception):
    """An earlier daemon has left memory that nobody has anything in."""


def _fitted(config: Config, layout: Layout) -> Config:
    """Return the settings with those of the layout that there is; tell of what differs.

    Raises:
        ConfigError: they do not go with the others.
    """
    kept: dict[str, Any] = {
        "pool_bytes": layout.pool_bytes,
        "cache_bytes": layout.cache_bytes,
        "part_bytes_cpu": layout.part_bytes["cpu"],
        "part_bytes_cuda": layout.part_bytes["cuda"],
    }
    differing = [name for name, value in kept.items() if getattr(config, name) != value]
    if differing:
        log.warning(
            "%s stay as they were: trainers that run have something in that memory; restart "
            "the daemon once more when none does",
            ", ".join(differing),
        )
    return replace(config, **kept)
