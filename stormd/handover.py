"""The state that one daemon passes to the next: pool memory, journal, and listening sockets.

The manager that starts daemons keeps their descriptors (`notify`), however a daemon ends. The next
daemon continues with this state, or logs why it cannot and starts empty. In the second case the
state is lost, and clients are told so. The settings of the earlier daemon determine the layout of
the memory. They stay in force as long as a session or a cached tensor is left in it.
"""

from __future__ import annotations

import logging
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
from stormd.open_files import close_all

__all__ = ["CONTROL", "LIFELINES", "Handover"]

log = logging.getLogger(__name__)

CONTROL: Final = "stormd-control"
LIFELINES: Final = "stormd-lifelines"
_POOL: Final = "stormd-pool"
_JOURNAL: Final = "stormd-journal"
"""The names under which the manager keeps the descriptors."""


class Handover:
    """The handover of one daemon.

    All methods are called in the order in which the daemon opens and ends. `state` is the state
    of an earlier daemon; None if there is none or it cannot be used.
    """

    def __init__(self, notifier: Notifier, kept: dict[str, int]) -> None:
        """Take ownership of `kept`, the descriptors kept for this process, by name."""
        self._notifier = notifier
        self._kept = kept
        self._pool = -1
        self._journal: Journal | None = None
        self._records: JournalRecords
        self._noted = Totals()
        self.state: State | None = None
        self.earlier = Totals()
        """The bytes that earlier daemons have stored."""

    def take(self, config: Config) -> Config:
        """Read the earlier daemon's state; return the settings to continue with."""
        pool, journal = self._kept.pop(_POOL, -1), self._kept.pop(_JOURNAL, -1)
        if pool < 0 or journal < 0:
            close_all((pool, journal))
            return config
        fitted = None
        try:
            fitted = self._read(journal, pool, config)
        except (JournalUnusable, ConfigError, OSError) as error:
            log.error("what an earlier daemon held is lost: %s", error)  # noqa: TRY400
        if fitted is None:
            self._drop_journal(journal)
            close_all((pool,))
            return config
        self._pool = pool
        return fitted

    def _read(self, journal: int, pool: int, config: Config) -> Config | None:
        """Read the state; return the settings to continue with, or None if nothing is left."""
        self._journal, found = Journal.open(journal)
        state = read_state(found)
        self.earlier = state.totals
        if state.is_empty:
            return None
        fitted = _config_for_layout(config, state.layout)
        if not is_sealed(pool, fitted.host_bytes):
            raise JournalUnusable("the memory is not of the size that it tells of")
        self.state = state
        return fitted

    def discard_state(self, reason: str) -> None:
        """Drop the earlier daemon's state, which contradicts itself, and start empty."""
        log.error("what an earlier daemon held is lost: %s", reason)
        self._drop_journal(-1)
        close_all((self._pool,))
        self._pool, self.state = -1, None

    def pool_file(self, nbytes: int) -> int:
        """Return the descriptor of the pool's memory; this object still owns it.

        Raises:
            PoolUnavailable: the kernel provides no memory file.
        """
        if self._pool < 0:
            try:
                self._pool = sealed_memory("stormd-pool", nbytes)
            except OSError as error:
                raise PoolUnavailable(f"no memory file for the pool: {error.strerror}") from error
        return self._pool

    def records(self) -> JournalRecords:
        """Return the journal's records, to which all state that outlives the process is written.

        Raises:
            PoolUnavailable: there is no descriptor or address space for the journal.
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
        """Hold the earlier daemon's sessions and cached tensors until its clients resume."""
        if self.state is None:
            return
        now = time.monotonic()
        for session in self.state.sessions:
            ledger.leases.adopt(session, now)
        for item in self.state.items:
            assert cache is not None, "a layout with a cache makes one"
            cache.adopt(item)
        log.info(
            "resumed an earlier daemon's state",
            extra={"sessions": len(self.state.sessions), "cached": len(self.state.items)},
        )

    def record_layout(self, config: Config, spaces: Sequence[Space]) -> None:
        """Write the current layout of the memory to the journal."""
        self._records.record_layout(
            Layout(
                pool_bytes=config.pool_bytes,
                cache_bytes=config.cache_bytes,
                committed=tuple(space.committed for space in spaces),
                chunk_bytes={"cpu": config.part_bytes_cpu, "cuda": config.part_bytes_cuda},
            )
        )

    def record_totals(self, stored: Mapping[str, Any]) -> None:
        """Write the bytes stored so far to the journal: those of earlier daemons, plus `stored`.

        `stored` has this daemon's counts, as in `Counters.throughput`.
        """
        totals = Totals(
            self.earlier.raw_bytes + stored["raw_bytes"],
            self.earlier.blob_bytes + stored["blob_bytes"],
        )
        if totals != self._noted:
            self._records.record_totals(totals)
            self._noted = totals

    def keep_memory(self, config: Config, spaces: Sequence[Space]) -> None:
        """Have the manager keep pool and journal, after writing the layout to the journal."""
        assert self._journal is not None, "there is no journal yet"
        self.record_layout(config, spaces)
        if self.state is None:
            self.keep(_POOL, self._pool)
            self.keep(_JOURNAL, self._journal.descriptor)

    def listening(self, name: str, path: Path) -> socket.socket | None:
        """Return the kept listening socket of that name, None if there is none.

        Clients may have connected to it in the meantime. A socket that is bound elsewhere, or whose
        file was removed, is closed.
        """
        descriptor = self._kept.pop(name, -1)
        if descriptor < 0:
            return None
        found = socket.socket(fileno=descriptor)
        if found.family == socket.AF_UNIX and found.getsockname() == str(path) and path.is_socket():
            return found
        found.close()
        return None

    def keep(self, name: str, descriptor: int) -> None:
        """Have the manager keep a descriptor, in place of an earlier one of that name."""
        self._notifier.forget(name)
        self._notifier.store(name, descriptor)

    def forget_all(self) -> None:
        """Have the manager drop all descriptors: the daemon has ended in order."""
        for name in (CONTROL, LIFELINES, _POOL, _JOURNAL):
            self._notifier.forget(name)

    def close(self) -> None:
        """Close this process's descriptors and the journal; the manager's copies stay open."""
        close_all((self._pool, *self._kept.values()))
        self._kept.clear()
        self._pool = -1
        self._drop_journal(-1)

    def _drop_journal(self, descriptor: int) -> None:
        if self._journal is not None:
            self._journal.close()
            self._journal = None
        else:
            close_all((descriptor,))


def _config_for_layout(config: Config, layout: Layout) -> Config:
    """Return the settings with the sizes of the existing layout; log which ones differ.

    Raises:
        ConfigError: these sizes do not fit the other settings.
    """
    kept: dict[str, Any] = {
        "pool_bytes": layout.pool_bytes,
        "cache_bytes": layout.cache_bytes,
        "part_bytes_cpu": layout.chunk_bytes["cpu"],
        "part_bytes_cuda": layout.chunk_bytes["cuda"],
    }
    differing = [name for name, value in kept.items() if getattr(config, name) != value]
    if differing:
        log.warning(
            "%s keep their earlier values: trainers have entries in that memory; restart the "
            "daemon again when none has",
            ", ".join(differing),
        )
    return replace(config, **kept)
