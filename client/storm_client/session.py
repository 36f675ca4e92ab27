"""One device's session: stored ranges, what is known about them, and who may ask.

What stays true: every record is in the deduplication table and watched for its death from before
its first byte leaves; when it dies its entries are released, whoever dropped it.
"""

from __future__ import annotations

import os
from contextlib import suppress

import torch

from storm_client.connection import IDS_PER_RELEASE, Connection
from storm_client.dedup import DedupTable
from storm_client.errors import ActivationLost, DaemonLost, named
from storm_client.lanes import Lane
from storm_client.records import Handle, Located, RecordGrave, StoredRange
from storm_client.restoring import STALL_SECONDS, Restorer
from storm_client.stats import StatsRecorder
from storm_client.storing import Storer
from storm_client.versions import SavedVersion
from stormd.protocol import (
    Admitted,
    Failed,
    Message,
    Refused,
    Rejected,
    Release,
    Restored,
    Stored,
)

__all__ = ["Session"]


class Session:
    """The activations of one process on one device."""

    def __init__(self, address: str, lane: Lane, timeout: float) -> None:
        """Open a session for `lane` at `address` within `timeout` seconds.

        Raises:
            StormError: as Connection, and what the lane raises; nothing stays open then.
        """
        self.lane = lane
        self.connection = Connection(address, lane.hello, timeout)
        self.connection.on_lost = lane.poison
        self.connection.start()
        try:
            self._attach(timeout)
        except BaseException:
            self.close()
            raise
        self._restorer = Restorer(self.connection, lane)
        self._storer = Storer(
            self.connection,
            lane,
            self._restorer.reserve,
            self._restorer.keep,
            self.connection.welcome.part_bytes,
        )
        self._grave = RecordGrave(self.connection.wake)
        self._known = DedupTable()
        self.connection.on_message = self._on_message
        self.connection.on_wake = self._flush_dead

    # --- what the hooks ask for -------------------------------------------------------------

    def find(
        self, storage: torch.UntypedStorage, span: tuple[int, int], version: int
    ) -> StoredRange | None:
        """Return the record that holds these bytes already.

        Raises:
            DaemonLost: the daemon is gone, and what its records hold with it.
        """
        self.connection.check()
        with self.connection.lock:
            return self._known.find(storage, span, version)

    def store(
        self,
        storage: torch.UntypedStorage,
        span: tuple[int, int],
        version: SavedVersion,
        codec: str,
        stats: StatsRecorder,
    ) -> StoredRange:
        """Return a new record of the bytes `span` of `storage`, on its way to the daemon.

        Raises:
            DaemonLost: the daemon is gone.
        """
        self.connection.check()
        record = StoredRange(self, storage, span, version, stats)
        with self.connection.lock:
            self._known.add(self._grave.watch(record))
            self._release_dead()
        self._storer.store(record, codec)
        return record

    def load(self, handle: Handle) -> Located:
        """Return where the bytes of `handle` are in memory, restoring them if need be.

        Raises:
            CorruptBlob, ActivationLost, DaemonLost: they cannot be had again.
        """
        record = handle.record
        with self.connection.lock:
            located = self._claim(record)
        if located is None:
            located = self._restore(record, handle)
        else:
            self._look_ahead(handle)
        self.lane.use(located.storage)
        with self.connection.lock:
            record.unpacked(handle)
        return located

    def settle(self, timeout: float) -> None:
        """Wait until the daemon has encoded all that was stored, at most `timeout` seconds."""
        with self.connection.lock, suppress(DaemonLost):
            self.connection.wait(lambda: not self._storer.under_way, timeout)

    def close(self) -> None:
        """End the session; what it stored is lost. Calling it twice is fine."""
        self.connection.close()
        self.lane.close()

    # --- helpers ----------------------------------------------------------------------------

    def _attach(self, timeout: float) -> None:
        connection = self.connection
        try:
            self.lane.attach(
                connection.welcome,
                connection.descriptors,
                lambda message: connection.request(message, timeout),
            )
        finally:
            for descriptor in connection.descriptors:
                os.close(descriptor)

    def _claim(self, record: StoredRange) -> Located | None:
        """Return the bytes if they are in memory, else take the duty to restore them."""

        def free() -> bool:
            return not record.being_restored

        patience = STALL_SECONDS * len(record.parts)  # what the other thread has at the most
        if not free() and not self.connection.wait(free, patience):
            raise ActivationLost(
                f"another thread has been restoring record {record.key} for {patience:g} s; "
                "see `stormd status` and the daemon's log"
            )
        located = record.locate()
        if located is not None:
            self._restorer.forget(record.key)
            return located
        self.connection.check()
        if record.error is not None:
            raise type(record.error)(str(record.error))
        if not record.parts:
            raise ActivationLost(
                f"the {record.nbytes} bytes of a tensor that had stayed in memory are gone: its "
                "storage was resized after the tensor was saved"
            )
        record.being_restored = True
        return None

    def _restore(self, record: StoredRange, handle: Handle) -> Located:
        try:
            storage = self._restorer.fetch(record, handle.step.upcoming)
            with self.connection.lock:
                record.hold(storage)
        finally:
            with self.connection.lock:
                record.being_restored = False
                self.connection.notify()
        return Located(storage, record.start)

    def _look_ahead(self, handle: Handle) -> None:
        """Begin to fetch what follows although this handle needed nothing."""
        with self.connection.lock, suppress(DaemonLost):
            self._restorer.fetch_ahead(handle.step.upcoming)

    def _flush_dead(self) -> None:
        self._release_dead()
        self.connection.flush()

    def _release_dead(self) -> None:
        """Post the releases of what dead records held; call with the lock held."""
        entries: list[int] = []
        for reference in self._grave.empty():
            self._known.remove(reference)
            self._restorer.forget(reference.key)
            entries.extend(part.entry for part in reference.parts)
        for begin in range(0, len(entries), IDS_PER_RELEASE):
            self.connection.post(0, Release(entries[begin : begin + IDS_PER_RELEASE]))

    # --- replies, with the lock held --------------------------------------------------------

    def _on_message(self, request: int, message: Message) -> None:
        match message:
            case Admitted():
                self._storer.admitted(message)
            case Stored():
                self._storer.stored(message)
            case Restored():
                self._restorer.restored(message.ticket)
            case Rejected():
                self._storer.rejected(message.entry, message.reason)
            case Failed() if message.ticket:
                self._restorer.failed(message)
            case Failed():
                self._storer.failed(message)
            case Refused():
                self._refused(request, message)

    def _refused(self, request: int, message: Refused) -> None:
        """A refusal of the message itself; one that answers no request is about the session."""
        if self._storer.concerns(request):
            self._storer.rejected(request, message.kind)
        elif self._restorer.concerns(request):
            self._restorer.refused(request, named(message.kind, message.detail))
