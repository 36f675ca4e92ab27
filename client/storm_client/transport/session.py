"""One device's session: its connection, its lane, and the stored ranges that it holds.

Hooks find, hold and load stored ranges here. Before a range's first byte is sent, the range is in
the table of storages and its death is watched. When a range is freed, its entries are released,
whoever dropped it, with the next heartbeat at the latest. No byte is sent while PyTorch could still
read a different one in its place. `outbound` and `inbound` move a range; `transfers` knows the
state of each chunk.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Collection
from contextlib import suppress
from itertools import groupby, islice
from operator import attrgetter

import torch
from storm_kernels.encoded_bytes import is_encoded

from storm_client.errors import ActivationLost, DaemonLost
from storm_client.lanes import Lane, Stream
from storm_client.lanes.dtypes import ENCODED
from storm_client.lanes.offers import Mappable
from storm_client.monitoring.shared_counts import RangeRecorder
from storm_client.planner import DeviceWindow
from storm_client.planner.plan import Plan
from storm_client.saved.ranges import (
    DeadRange,
    Located,
    RangePhase,
    SavedStorages,
    StoredRange,
    UpcomingUses,
    Use,
)
from storm_client.saved.snapshots import SnapshotProof, is_unshared
from storm_client.transport.connection import Connection, send_offers
from storm_client.transport.device_memory import DeviceMemory
from storm_client.transport.io_thread import Listener
from storm_client.transport.memory_pressure import retry_allocations, watch
from storm_client.transport.restore import LAST_WRITES_SECONDS, Inbound
from storm_client.transport.store import Outbound
from storm_client.transport.timeouts import STALL_SECONDS
from storm_client.transport.transfers import FAILURES, Transfers, number_of
from stormd.protocol import (
    Budget,
    Mapped,
    Message,
    PlanLearned,
    Refused,
    budget_text,
)

__all__ = ["Session"]

LOOK_BACK = 8
"""Records that each hook checks for whether somebody else still holds them; the tensors saved last
are freed first. All records are checked where a block begins and ends."""

RELEASE_BYTES = 1 << 20
"""Hooks release dead records' entries in one message up to this size, or at a heartbeat."""

DEATHS_TOGETHER = 4
"""Dead records that a backward pass handles in one go; fewer wait for a heartbeat. Dead uses are
handled at once, because restored memory may have been kept for them."""

_ABOUT_SEGMENTS = (Mapped, Refused)

_stream = attrgetter("stream")


class Session(Listener):
    """The activations of one process on one device."""

    def __init__(self, address: str, lane: Lane, timeout: float) -> None:
        """Open a session for `lane` at `address` within `timeout` seconds.

        Raises:
            StormError: as Connection, or from the lane; then nothing stays open.
        """
        self.lane = lane
        self.device = lane.device
        self.saved = SavedStorages()
        self._shared: dict[int, weakref.ref[StoredRange]] = {}
        """Records that are kept while somebody else holds their storage, the oldest first."""
        self._unreleased: list[int] = []
        """Entries of dead records that were not released yet."""
        self._unreleased_bytes = 0
        self._plan: PlanLearned | None = None
        """The latest plan that the daemon was told of."""
        self._offered: set[int] = set()
        """The segments that another daemon was asked to map."""
        self.connection = Connection(address, lane.hello, timeout)
        try:
            self.connection.attach(lane, timeout)
        except BaseException:
            self.connection.close()
            lane.close()
            raise
        self.transfers = Transfers(
            self.connection.numbers,
            self.connection.outbox,
            staging_bytes=lane.staging_bytes,
            part_bytes=self.connection.welcome.part_bytes,
            window=DeviceWindow(lane.budget_bytes),
            keeps_stored=lane.keeps_stored,
        )
        self._in_place = lane.in_place
        self.has_in_place = self._in_place is not None
        """Whether bytes may be restored into memory of their own, which must be used sparingly."""
        self._outbound = Outbound(self.connection, lane, self.transfers)
        self._inbound = Inbound(self.connection, lane, self.transfers)
        self.batch_bytes = self._outbound.batch_bytes
        """Smaller records are best held and sent together, up to this many bytes."""
        self.memory = DeviceMemory(self, self._outbound)
        """Frees memory when the device has none left."""
        self.connection.start(self)
        if self._in_place is not None or self.device.type == "cuda":
            watch(self.memory)

    # --- for the hooks ----------------------------------------------------------------------

    def find(
        self, storage: torch.UntypedStorage, tensor: torch.Tensor | None
    ) -> StoredRange | None:
        """Return the record that has, or will have, the bytes of `tensor`, which lies in `storage`.

        A record that still holds the storage qualifies. If its bytes are sent while somebody else
        holds the storage, too, the record's proof must show that the bytes are unchanged. Without a
        tensor this cannot be shown.

        Raises:
            DaemonLost: the daemon is gone, and with it the bytes of its records.
        """
        if self.connection.error is not None:
            self.connection.check()
        with self.connection.lock:
            record = self.saved.find(storage)
            if record is None:
                return None
            if record.phase is RangePhase.IN_USE:
                return record
            if record.error is not None or not record.is_whole(storage):
                return None
            if record.proof is None or tensor is None:
                return None
            return record if record.proof.holds_for(tensor) else None

    def hold(
        self,
        storage: torch.UntypedStorage,
        dtype: torch.dtype,
        codec: str,
        stats: RangeRecorder,
        *,
        soon: bool = False,
        proof: SnapshotProof | None = None,
    ) -> StoredRange:
        """Return a new record of `storage`, to be sent once nobody else holds it; send others now.

        `soon` says that the record will be needed at once. `proof` allows finding the record after
        its bytes were sent, while somebody else holds the storage.

        Raises:
            DaemonLost: the daemon is gone.
        """
        if self._shared:
            self.send_unshared(latest=LOOK_BACK)
        stream = self.lane.current_stream()
        record = self.new_record(storage, dtype, codec, stats, soon=soon, stream=stream)
        self.defer_until_unshared(record, proof)
        return record

    def new_record(
        self,
        storage: torch.UntypedStorage,
        dtype: torch.dtype,
        codec: str,
        stats: RangeRecorder,
        *,
        soon: bool = False,
        stream: Stream = None,
    ) -> StoredRange:
        """Return a new record of `storage`, which a stream's work fills, and watch its death.

        If nobody else holds its storage, send it with `send_results`; otherwise call
        `defer_until_unshared`.

        Raises:
            DaemonLost: the daemon is gone.
        """
        if self.connection.error is not None:
            self.connection.check()
        if is_encoded(storage):
            codec = ENCODED
        record = StoredRange(self, storage, dtype, stats, codec=codec, soon=soon, stream=stream)
        with self.connection.lock:
            if self.saved.deaths:
                self._forget_dead()
            self.saved.add(record)
        return record

    def defer_until_unshared(self, record: StoredRange, proof: SnapshotProof | None) -> None:
        """Keep a record until nobody else holds its storage: see `hold` and `send_unshared`."""
        record.proof = proof
        self._shared[record.key] = weakref.ref(record)
        record.stats.kept_in_use(record.nbytes)

    def send_results(self, records: list[StoredRange]) -> None:
        """Send records whose storages nobody else holds, and others that may be sent by now.

        Raises:
            DaemonLost: the daemon is gone. The client keeps all that the daemon has not admitted.
        """
        if self._shared:
            self.send_unshared(latest=LOOK_BACK)
        self._store(records, None)

    def send_unshared(
        self, latest: int | None = None, but: Collection[StoredRange] = frozenset()
    ) -> None:
        """Send the records that nobody else holds: of the `latest` or of all, but not of `but`.

        Raises:
            DaemonLost: the daemon is gone. The client keeps all that the daemon has not admitted.
        """
        if not self._shared:
            return
        ready: list[StoredRange] = []
        with self.connection.lock:
            for reference in islice(reversed(self._shared.values()), latest):
                record = reference()
                if record is not None and is_unshared(record) and record not in but:
                    ready.append(record)
        if not ready or self.lane.is_capturing():
            return
        for stream, records in groupby(reversed(ready), _stream):
            self._send_all(list(records), stream)

    def send(self, record: StoredRange) -> None:
        """Send a record unless it was sent already or is kept.

        Raises:
            DaemonLost: the daemon is gone. The record keeps its storage.
        """
        self._send_all([record], record.stream)

    def _send_all(self, records: list[StoredRange], stream: Stream) -> None:
        """Send records that a stream's work has filled, each as `send` does."""
        if not self.lane.can_use_stream(stream):
            return
        with self.connection.lock:
            to_send = [record for record in records if self._begin_offload(record)]
        self._store(to_send, stream)

    def _store(self, records: list[StoredRange], stream: Stream) -> None:
        """Store records in the stream order of the work that fills them."""
        elsewhere = self.lane.on_stream(stream)
        if elsewhere is None:
            self._outbound.store(records)
            return
        with elsewhere:
            self._outbound.store(records)

    def _begin_offload(self, record: StoredRange) -> bool:
        """Remove a record from `_shared` (locked); return whether it is to be sent."""
        if self._shared.pop(record.key, None) is None:
            return False
        if record.source is None or not record.is_whole(record.source):
            record.move_to(RangePhase.KEPT)
            return False  # its memory was replaced: only the present bytes can be returned
        record.leaves.clear()
        record.stats.undo_in_use(record.nbytes)
        return True

    def load(self, use: Use, *, is_first: bool = False, may_hand_out: bool = False) -> Located:
        """Return where the bytes of `use` are in memory; restore them if necessary.

        With `may_hand_out` the memory may be returned before its bytes are there; later work on the
        thread's stream finds them. `is_first` marks the first request since the forward pass: then
        records that nobody else holds any more are sent, except those that are needed next.

        Raises:
            CorruptBlob, ActivationLost, DaemonLost: the bytes cannot be restored.
            UsageError: they cannot be restored while a CUDA graph is captured.
        """
        record = use.record
        if is_first and self._shared:
            self.send_unshared(but=[record, *use.step.upcoming()[:LOOK_BACK]])
        deaths = self.saved.deaths
        claimed: list[StoredRange] = []
        try:
            with self.connection.lock:
                if deaths and (
                    len(deaths) >= DEATHS_TOGETHER or not isinstance(deaths[-1], DeadRange)
                ):
                    self._forget_dead()
                if self._shared.pop(record.key, None) is not None:
                    record.move_to(RangePhase.KEPT)  # needed now, so not worth sending
                located = self._claim(record, claimed)
                if located is not None:
                    record.unpacked(use)
            if located is None:
                return Located(self._inbound.restore(use, may_hand_out=may_hand_out))
        finally:
            if claimed:
                if record.phase is RangePhase.RESTORING:
                    record.phase = RangePhase.OFFLOADED  # without a call, so that it is done
                with self.connection.lock:
                    self.connection.notify()
        self.prefetch(use.step)
        if not located.is_original:
            self._inbound.order_after_writes(located.storage)
        return located

    def prefetch(self, uses: UpcomingUses) -> None:
        """Begin to prefetch the records used next, in this order, as far as there is room."""
        if not self.lane.is_capturing():
            self._inbound.prefetch(uses)

    def settle(self, timeout: float) -> None:
        """Send what may be sent; wait until all stores are encoded, at most `timeout` seconds.

        Does nothing for a signal handler that has interrupted this thread's work on the session.
        """
        if self.connection.lock._is_owned():  # type: ignore[attr-defined]  # typeshed's gap
            return
        with suppress(DaemonLost):
            self.send_unshared()
        deadline = time.monotonic() + timeout
        with self.connection.lock, suppress(DaemonLost):
            while self.transfers.is_storing and self.connection.wait(deadline):
                pass

    def sweep(self) -> None:
        """Release all that is no longer needed: dead records' entries, mappings of freed memory.

        The daemon learns of it with the next stores, or by a heartbeat. After the daemon's loss
        nothing is left to release.
        """
        if self.device.type == "cuda":
            retry_allocations()
        with suppress(DaemonLost):
            self.send_unshared()
            with self.connection.lock:
                self.connection.check()
                self._release_dead()
                if self._in_place is not None:
                    self._in_place.sweep()
                    send_offers(self.connection, self._in_place.segments)

    def apply_plan(self, plan: Plan, budget: Budget) -> None:
        """Limit held sources as the plan says, and tell the daemon of the plan, for monitoring."""
        sizes = plan.bytes_by_decision
        message = PlanLearned(
            kept_bytes=sizes["keep"],
            offloaded_bytes=sizes["offload"],
            replayed_bytes=sizes["replay"],
            budget=budget_text(budget),
        )
        with self.connection.lock:
            self.transfers.window.limit_at_forward_end = plan.turn_bytes
            self._plan = message
            self.connection.post(0, message)

    def close(self) -> None:
        """End the session; its stored data is lost. A second call has no effect."""
        self.connection.close()
        self._inbound.close()
        self.lane.close()

    # --- for the connection -----------------------------------------------------------------

    def on_message(self, request: int, message: Message) -> None:
        """Handle a reply; an interrupt may cause a second call, which has no further effect."""
        in_place = self._in_place
        if in_place is not None and isinstance(message, _ABOUT_SEGMENTS):
            segments = in_place.segments
            if segments.is_pending(request):
                self.transfers.on_offers_answered()
                segments.on_answer(request, getattr(message, "detail", None))
                send_offers(self.connection, segments)
                return
        if in_place is not None and isinstance(message, FAILURES):
            number = number_of(request, message)
            if number in self.transfers.handed_out:
                in_place.end_waits(number)
        self.transfers.on_reply(request, message)

    def on_wake(self) -> None:
        """Release dead records' entries, and streams that have waited too long for the daemon."""
        self._release_dead()
        self._inbound.end_stalled()

    def offers(self) -> list[Mappable]:
        """Return the segments in use that another daemon has to map.

        Freed segments are not among them.
        """
        segments = [] if self._in_place is None else self._in_place.offers()
        self._offered = {offer.segment for offer in segments}
        return segments

    def piece_descriptor(self, number: int) -> int | None:
        """Return the descriptor of a piece among the offers, None if the piece was freed."""
        return None if self._in_place is None else self._in_place.segments.piece_descriptor(number)

    def on_loss(self) -> None:
        """Drop what is retained for the daemon: PyTorch may want to free it."""
        if self._in_place is not None:
            self._in_place.segments.close()

    def settling_seconds(self) -> float:
        """Return for how many seconds a dead daemon's device may still write to our memory."""
        has_device = self._in_place is not None or self.device.type != "cpu"
        return LAST_WRITES_SECONDS if has_device and self.transfers.is_restoring else 0.0

    def on_resume(self, entries: frozenset[int], mapped: frozenset[int]) -> None:
        """Repeat unanswered requests to another daemon; release entries that no record has."""
        if self._plan is not None:
            self.connection.post(0, self._plan)
        in_place = self._in_place
        if in_place is None:
            asked = self.transfers.resume()
        else:
            in_place.segments.resume(self._offered, mapped & self._offered)
            self.transfers.on_offers_answered()
            send_offers(self.connection, in_place.segments)
            asked = self.transfers.resume(in_place.restore_status, in_place.last_number)
        self._forget_dead()
        there, held = entries.union(asked), set[int]()
        for record in self.saved.living():
            numbers = [part.entry for part in record.parts]
            held.update(numbers)
            missing = [number for number in numbers if number not in there]
            if missing:
                record.mark_lost(
                    ActivationLost(
                        f"the daemon that took over has no entry {missing[0]}, which the one "
                        "before had: repeat the step from its forward pass"
                    )
                )
        self._unreleased = sorted(there - held)
        self._post_releases()

    # --- helpers, with the lock held --------------------------------------------------------

    def _claim(self, record: StoredRange, claimed: list[StoredRange]) -> Located | None:
        """Return the bytes if they are in memory; otherwise take the duty to restore them.

        With the duty, in the same step, `claimed` gets the record.
        """
        if record.phase is RangePhase.RESTORING:
            self._await_restore(record)
        located = record.locate()
        if located is not None:
            if record.key in self.transfers.incoming:
                self.transfers.cancel(record.key)
            return located
        if self.connection.error is not None:
            self.connection.check()
        if record.error is not None:
            raise type(record.error)(str(record.error))
        if not record.parts:
            raise ActivationLost(
                f"the {record.nbytes} bytes of a tensor that had stayed in memory are gone: its "
                "storage was resized after the tensor was saved"
            )
        if record.source is not None:
            self._outbound.check_not_resized(record)
            self._await_admission(record)
            return self._claim(record, claimed)
        record.move_to(RangePhase.RESTORING)
        claimed.append(record)
        return None

    def _await_restore(self, record: StoredRange) -> None:
        """Wait until the thread that restores a record has succeeded or failed."""
        patience = STALL_SECONDS * len(record.parts)  # the other thread's longest wait
        deadline = time.monotonic() + patience
        while record.phase is RangePhase.RESTORING:
            if not self.connection.wait(deadline):
                raise ActivationLost(
                    f"another thread has been restoring record {record.key} for {patience:g} s; "
                    "see `stormd status` and the daemon's log"
                )

    def _await_admission(self, record: StoredRange) -> None:
        """Wait for the daemon's final answer about a record whose source was resized.

        If the daemon refuses one chunk, its admissions of the other chunks are void.
        """
        deadline = time.monotonic() + STALL_SECONDS
        while record.phase is RangePhase.OFFLOADING:
            if not self.connection.wait(deadline):
                raise ActivationLost(
                    f"the storage of record {record.key} was resized before the daemon had said "
                    f"that it takes it, and it said nothing for {STALL_SECONDS:g} s; see "
                    "`stormd status`"
                )

    def _release_dead(self) -> None:
        """Post the releases of all entries that dead records held."""
        self._forget_dead()
        if self._unreleased:
            self._post_releases()

    def _forget_dead(self) -> None:
        """Forget dead records, and release their entries once there are enough for a message.

        An interrupted call may be repeated without harm.
        """
        for reference in self.saved.dead():
            self._shared.pop(reference.key, None)
            if reference.key in self.transfers.incoming:
                self.transfers.cancel(reference.key)
            self.transfers.held.drop(reference.key)
            for part in reference.parts:
                self._unreleased.append(part.entry)
                self._unreleased_bytes += part.nbytes
        if self._unreleased_bytes >= RELEASE_BYTES:
            self._post_releases()

    def _post_releases(self) -> None:
        self.transfers.stores.release(self._unreleased)
        self._unreleased, self._unreleased_bytes = [], 0
