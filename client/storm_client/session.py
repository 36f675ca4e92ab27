"""One device's session: stored ranges, what is known about them, and who may ask.

What stays true: every record is in the deduplication table and watched for its death from before
its first byte leaves; when it dies its entries are released, whoever dropped it, at the latest
with the next heartbeat; and no byte leaves before PyTorch could read no other in its place.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Collection
from contextlib import suppress
from itertools import islice

import torch

from storm_client.arriving import Arrivals
from storm_client.connection import IDS_PER_RELEASE, Connection
from storm_client.dedup import DedupTable
from storm_client.errors import ActivationLost, DaemonLost, StormError, UsageError, named
from storm_client.lanes import InPlace, Lane
from storm_client.memory_pressure import watch
from storm_client.records import Deaths, Handle, Located, StoredRange
from storm_client.restoring import STALL_SECONDS, Restorer
from storm_client.sharing import is_unshared
from storm_client.stats import StatsRecorder
from storm_client.storing import Storer
from storm_client.window import Window
from stormd.protocol import (
    Admitted,
    Failed,
    Mapped,
    Message,
    Refused,
    Rejected,
    Release,
    Restored,
    Stored,
    UnmapSegment,
)

__all__ = ["Session"]

LOOK_BACK = 8
"""Records looked at in each hook for whether somebody else holds them: what was saved last is what
is let go first. All are looked at where a block begins and ends."""

BARRIER_SECONDS = 2.0
"""How long a thread that is out of memory waits for the daemon to unmap what was freed."""


class Session:
    """The activations of one process on one device."""

    def __init__(self, address: str, lane: Lane, timeout: float) -> None:
        """Open a session for `lane` at `address` within `timeout` seconds.

        Raises:
            StormError: as Connection, and what the lane raises; nothing stays open then.
        """
        self.lane = lane
        self._in_place: InPlace | None = None
        self._arrivals: Arrivals | None = None
        self.connection = Connection(address, lane.hello, timeout)
        self.connection.on_lost = lane.poison
        self.connection.start()
        try:
            self._attach(timeout)
        except BaseException:
            self.close()
            raise
        self._in_place = lane.in_place
        self._window = Window(0 if self._in_place is None else self._in_place.budget_bytes)
        self._restorer = Restorer(self.connection, lane)
        if self._in_place is not None and self._in_place.maps_new_memory:
            self._arrivals = Arrivals(self.connection, lane, self._in_place, self._window)
        self._storer = Storer(
            self.connection,
            lane,
            self._restorer.reserve,
            self._restorer.keep,
            self.connection.welcome.part_bytes,
            window=self._window,
        )
        self.deaths = Deaths()
        self._known = DedupTable()
        self._shared: dict[int, weakref.ref[StoredRange]] = {}
        """Records that stay as long as somebody else holds their storage, the oldest first."""
        self.connection.on_message = self._on_message
        self.connection.on_wake = self._flush_dead
        self.connection.on_abandoned = self.close
        if self._in_place is not None:
            self._in_place.segments.post = self._post_about_segments
            watch(self)

    # --- what the hooks ask for -------------------------------------------------------------

    def find(self, storage: torch.UntypedStorage, tensor: torch.Tensor) -> StoredRange | None:
        """Return the record that has the bytes of `tensor`, which lies in `storage`, or will.

        That is any record that still holds the storage. Of one that was sent while somebody else
        held it, too, it has to be shown that the bytes are those that were sent.

        Raises:
            DaemonLost: the daemon is gone, and what its records hold with it.
        """
        self.connection.check()
        with self.connection.lock:
            record = self._known.find(storage)
            if record is None or record.key in self._shared:
                return record
            if record.error is not None or not record.is_whole(storage):
                return None
            return record if record.proof is not None and record.proof.holds_for(tensor) else None

    def hold(
        self,
        storage: torch.UntypedStorage,
        dtype: torch.dtype,
        codec: str,
        stats: StatsRecorder,
        *,
        from_result: bool = False,
        soon: bool = False,
    ) -> StoredRange:
        """Return a new record of `storage`, which leaves when nobody else holds it; send others.

        `from_result` says that all its changes are counted, `soon` that it will be needed at once.

        Raises:
            DaemonLost: the daemon is gone.
        """
        self.connection.check()
        self.send_unshared(latest=LOOK_BACK)
        stream = self.lane.current_stream()
        record = StoredRange(
            self,
            storage,
            dtype,
            stats,
            codec=codec,
            from_result=from_result,
            soon=soon,
            stream=stream,
        )
        with self.connection.lock:
            self._known.add(self.deaths.watch(record))
            self._shared[record.key] = weakref.ref(record)
            stats.stays_in_use(record.nbytes)
            self._release_dead()
        return record

    def send_unshared(
        self, latest: int | None = None, but: Collection[StoredRange] = frozenset()
    ) -> None:
        """Send the records that nobody else holds any more, of the `latest` or of all, `but` some.

        Raises:
            DaemonLost: the daemon is gone. What it has not admitted stays.
        """
        if not self._shared or self.lane.is_capturing():
            return
        ready: list[StoredRange] = []
        with self.connection.lock:
            for reference in islice(reversed(self._shared.values()), latest):
                record = reference()
                if record is not None and is_unshared(record) and record not in but:
                    ready.append(record)
        for record in reversed(ready):
            self.send(record)

    def send(self, record: StoredRange) -> None:
        """Send a record unless that was done, or it has been needed meanwhile.

        Raises:
            DaemonLost: the daemon is gone. The record keeps its storage.
        """
        if not self.lane.reaches(record.stream):
            return
        with self.connection.lock:
            if self._shared.pop(record.key, None) is None:
                return
            if record.source is None or not record.is_whole(record.source):
                return  # its memory is another since: what may be had is what is here
            record.leaves.clear()
            record.stats.leaves(record.nbytes)
        with self.lane.on(record.stream):
            self._storer.store(record)

    def load(self, handle: Handle, *, is_first: bool = False) -> Located:
        """Return where the bytes of `handle` are in memory, restoring them if need be.

        Where it `is_first` to be asked for since the forward pass, what somebody has let go since
        then leaves, unless it is needed next.

        Raises:
            CorruptBlob, ActivationLost, DaemonLost: they cannot be had again.
            UsageError: they cannot be had while a CUDA graph is captured.
        """
        record = handle.record
        with self.connection.lock:
            self._release_dead()
            self._shared.pop(record.key, None)  # what is needed here has no reason to leave
        if is_first and self._shared:
            self.send_unshared(but=handle.step.upcoming()[:LOOK_BACK])
        with self.connection.lock:
            located = self._claim(record)
            if located is not None:
                record.unpacked(handle)
        if located is None:
            located = self._restore(record, handle)
        elif not self.lane.is_capturing():
            self._look_ahead(handle)
        if not located.is_original:
            self.lane.use(located.storage)
        return located

    def settle(self, timeout: float) -> None:
        """Send what may leave, and wait `timeout` seconds at most until all that is encoded."""
        with suppress(DaemonLost):
            self.send_unshared()
        with self.connection.lock, suppress(DaemonLost):
            self.connection.wait(lambda: not self._storer.under_way, timeout)

    def sweep(self) -> None:
        """Give up what is not needed any more: entries of what died, mappings of freed memory.

        A lost daemon has done so.
        """
        with suppress(DaemonLost):
            self.send_unshared()
        with self.connection.lock, suppress(DaemonLost):
            is_due = self._release_dead()
            if self._in_place is not None:
                is_due |= self._in_place.sweep()
            if is_due:
                self.connection.flush()

    def give_back_memory(self) -> None:
        """Sweep, and return when the freed memory can be allocated again."""
        if self._in_place is None or self.connection.lost:
            return
        with suppress(StormError):  # the allocation that asks for it fails in any case
            with self.connection.lock:
                self._make_smaller()
                is_given_back = self._in_place.sweep()
                barrier = self._in_place.barrier()
            if is_given_back:
                self.connection.request(barrier, BARRIER_SECONDS)
                with self.connection.lock:
                    self.connection.send(0, UnmapSegment(barrier.segment))

    def abandon(self) -> None:
        """Have the session end by itself, for nobody can use it any more. Destructors call it."""
        self.connection.abandon()

    def close(self) -> None:
        """End the session; what it stored is lost. Calling it twice is fine."""
        self.connection.close()
        self._in_place = None
        if self._arrivals is not None:
            self._arrivals.close()
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
            self._forget(record.key)
            return located
        self.connection.check()
        if record.error is not None:
            raise type(record.error)(str(record.error))
        if not record.parts:
            raise ActivationLost(
                f"the {record.nbytes} bytes of a tensor that had stayed in memory are gone: its "
                "storage was resized after the tensor was saved"
            )
        self._storer.check_steady(record)
        if record.source is not None:
            self._await_admission(record)
            return self._claim(record)
        record.being_restored = True
        return None

    def _await_admission(self, record: StoredRange) -> None:
        """Wait until a record whose source was resized is the daemon's, or is not, for good.

        A part that it has yet to refuse takes those that it has admitted with it.
        """

        def is_settled() -> bool:
            return record.source is None or not record.parts or record.error is not None

        if not self.connection.wait(is_settled, STALL_SECONDS):
            raise ActivationLost(
                f"the storage of record {record.key} was resized before the daemon had said that "
                f"it takes it, and it said nothing for {STALL_SECONDS:g} s; see `stormd status`"
            )

    def _restore(self, record: StoredRange, handle: Handle) -> Located:
        try:
            if self.lane.is_capturing():
                raise UsageError(
                    f"the {record.nbytes} bytes of a tensor that was saved before a CUDA graph is "
                    "captured are with the daemon, and needed in the capture: capture the forward "
                    "pass with its backward pass, or save what the capture needs without offload"
                )
            storage = self._fetch(record, handle)
            with self.connection.lock:
                record.hold(storage)
                record.unpacked(handle)
        finally:
            with self.connection.lock:
                record.being_restored = False
                self.connection.notify()
        return Located(storage)

    def _fetch(self, record: StoredRange, handle: Handle) -> torch.UntypedStorage:
        """Return a record's bytes, in place where that is possible, and begin what follows it."""
        if self._arrivals is None:
            return self._restorer.fetch(record, handle.step.upcoming)
        with self.connection.lock:
            is_staged = record.key in self._restorer
        in_place = not is_staged and self._arrivals.begin(record)
        self._look_ahead(handle)
        if in_place:
            return self._arrivals.finish(record)
        return self._restorer.fetch(record, lambda: self._staged_later(handle))

    def _look_ahead(self, handle: Handle) -> None:
        """Begin to fetch what follows."""
        with suppress(DaemonLost):
            arrivals = self._arrivals
            if arrivals is not None and arrivals.ahead(handle.step, self._restorer):
                return
            with self.connection.lock:
                self._restorer.fetch_ahead(lambda: self._staged_later(handle))

    def _staged_later(self, handle: Handle) -> list[StoredRange]:
        """Return what follows and has to take the staging area; with the lock held."""
        arrivals = self._arrivals
        if arrivals is None:
            return handle.step.upcoming()
        if arrivals.in_use:
            return []  # what can come in place does, and the rest is fetched when it is needed
        return [record for record in handle.step.upcoming() if record.key not in arrivals]

    def _forget(self, key: int) -> None:
        """Give up what is under way of a record; with the lock held."""
        self._restorer.forget(key)
        if self._arrivals is not None:
            self._arrivals.forget(key)

    def _make_smaller(self) -> None:
        """Take less of the device's memory from now on; with the lock held."""
        self._window.shrink()
        if self._arrivals is not None:
            self._arrivals.relent()

    def _post_about_segments(self, message: Message) -> int:
        number = next(self.connection.numbers)
        self.connection.defer(number, message)
        return number

    def _flush_dead(self) -> None:
        self._release_dead()
        self.connection.flush()

    def _release_dead(self) -> bool:
        """Post the releases of what dead records held; call with the lock held.

        Returns whether there was any. One that is interrupted is done again, which does no harm.
        """
        if not self.deaths:
            return False
        for reference in self.deaths.records():
            self._known.remove(reference)
            self._shared.pop(reference.key, None)
            self._forget(reference.key)
            self._storer.forget(reference.key)
            entries = [part.entry for part in reference.parts]
            for begin in range(0, len(entries), IDS_PER_RELEASE):
                self.connection.post(0, Release(entries[begin : begin + IDS_PER_RELEASE]))
        return True

    # --- replies, with the lock held --------------------------------------------------------

    def _on_message(self, request: int, message: Message) -> None:
        try:
            self._handle(request, message)
        except KeyboardInterrupt:
            self.connection.again(request, message)
            raise

    def _handle(self, request: int, message: Message) -> None:
        """Do what a reply asks for; doing it twice is the same."""
        match message:
            case Admitted():
                self._storer.admitted(message)
            case Stored():
                self._storer.stored(message)
            case Restored():
                self._restored(message.ticket, None)
            case Rejected():
                self._storer.rejected(message.entry, message.reason)
            case Failed() if message.ticket:
                self._restored(message.ticket, named(message.kind, message.detail))
            case Failed():
                self._storer.failed(message)
            case Mapped():
                self._segment_answered(request, mapped=True)
            case Refused():
                self._refused(request, message)

    def _restored(self, ticket: int, error: StormError | None) -> None:
        """A part is back, or cannot be had."""
        if self._arrivals is not None and self._arrivals.concerns(ticket):
            self._arrivals.settled(ticket, error)
        else:
            self._restorer.settled(ticket, error)

    def _segment_answered(self, request: int, *, mapped: bool) -> None:
        if self._in_place is not None and self._in_place.segments.concerns(request):
            self._in_place.segments.answered(request, mapped=mapped)

    def _restores(self, request: int) -> bool:
        """Tell whether the number is that of a part on its way back."""
        if self._arrivals is not None and self._arrivals.concerns(request):
            return True
        return self._restorer.concerns(request)

    def _refused(self, request: int, message: Refused) -> None:
        """A refusal of the message itself; one that answers no request is about the session."""
        if self._storer.concerns(request):
            self._storer.rejected(request, message.kind)
        elif self._restores(request):
            self._restored(request, named(message.kind, message.detail))
        else:
            self._segment_answered(request, mapped=False)
