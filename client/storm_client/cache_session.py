"""A session for the shared cache: tensors out and back, in parts through its own staging area.

What stays true: a slot is given back as soon as the daemon no longer uses it, whoever waits; a
put is committed whole or cancelled; what a get was lent is released; and no wait goes on for more
than STALL_SECONDS without a part arriving.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Final

import torch

from storm_client.connection import Connection
from storm_client.dtypes import codec_name, dtype_name
from storm_client.errors import (
    DaemonLost,
    ProtocolMismatch,
    QuotaExceeded,
    StormError,
    UsageError,
    named,
)
from storm_client.lanes import Lane, Slot
from storm_client.staging import ALIGNMENT
from stormd.protocol import (
    CACHE_FEATURE,
    CacheCancel,
    CacheCommit,
    CachePut,
    CacheTensor,
    Failed,
    Message,
    ProtocolError,
    Refused,
    Rejected,
    Release,
    Restore,
    Restored,
    Store,
    Stored,
)

__all__ = ["CacheSession"]

STAGING_BYTES: Final = 64 << 20
"""Asked for: a few parts under way each way, and little of a GPU's memory."""

STALL_SECONDS: Final = 60.0
"""How long a part may take, and how long room for one may be waited for."""


@dataclass(eq=False, slots=True)
class _Part:
    """One part under way. Its slot is taken back when it is settled, unless `kept` to be read."""

    slot: Slot
    kept: bool
    settled: bool = False
    error: StormError | None = None


class CacheSession:
    """Puts and fetches the tensors of one device. Any thread may use it; puts take turns."""

    def __init__(self, address: str, lane: Lane, timeout: float) -> None:
        """Open a session for the cache at `address` within `timeout` seconds.

        Raises:
            UsageError: the daemon keeps no cache, or what the lane raises.
            DaemonUnavailable: nobody answers, or takes no session.
            ProtocolMismatch: the daemon speaks another version, or one without the cache.
        """
        self._lane = lane
        self._timeout = timeout
        self._putting = threading.Lock()  # one put is open in a session at a time
        self._parts: dict[int, _Part] = {}  # by entry or ticket; the connection's lock protects it
        hello = replace(lane.hello, features=(CACHE_FEATURE,), staging_bytes=STAGING_BYTES)
        self._connection = Connection(address, hello, timeout)
        self._connection.on_message = self._on_message
        self._connection.on_lost = lane.poison
        self._connection.on_abandoned = self.close
        self._connection.start()
        try:
            self._attach()
        except BaseException:
            self.close()
            raise
        welcome = self._connection.welcome
        self._part_bytes = max(welcome.part_bytes - welcome.part_bytes % ALIGNMENT, 1)

    @property
    def device(self) -> torch.device:
        """Where the bytes of `put` are and those of `fetch` come to."""
        return self._lane.device

    @property
    def lost(self) -> bool:
        """Whether the daemon is gone or the session closed."""
        return self._connection.lost

    def ask(self, message: Message) -> Message:
        """Return the daemon's answer.

        Raises:
            StormError: the kind that the daemon names in a refusal.
            DaemonLost: it is gone, or does not answer in time.
        """
        return self._connection.request(message, self._timeout)

    def put(
        self,
        name: str,
        dtype: torch.dtype,
        shape: list[int],
        ttl_seconds: float,
        data: torch.Tensor,
    ) -> None:
        """Put `data`, a contiguous uint8 tensor on `device`, as one of `dtype` and `shape`.

        `ttl_seconds` is 0 for no limit.

        Raises:
            UsageError: the name, or a size beyond what a message can say.
            QuotaExceeded: the cache has no room for it.
            DaemonLost: the daemon is gone or hangs. After any error there is no put.
        """
        try:
            part_bytes, kind = self._part_bytes, dtype_name(dtype)
            begin = CachePut(
                name=name,
                dtype=kind,
                shape=shape,
                nbytes=data.numel(),
                part_bytes=part_bytes,
                ttl_seconds=ttl_seconds,
            )
        except ProtocolError as error:
            raise UsageError(str(error)) from error
        with self._putting:
            self.ask(begin)
            try:
                self.ask(CacheCommit(self._store(data, codec_name(dtype))))
            except BaseException:
                with suppress(StormError):  # where even that fails, the session's end cancels it
                    self.ask(CacheCancel())
                raise

    def fetch(self, found: CacheTensor) -> torch.Tensor:
        """Return the bytes of what a CacheGet found, as a new uint8 tensor; release it.

        Raises:
            CorruptBlob, ActivationLost: the daemon cannot give them back.
            DaemonLost: it is gone or hangs.
        """
        parts = -(-found.nbytes // found.part_bytes)
        try:
            data = self._lane.allocate(found.nbytes)
            self._restore(found.first_entry, _pieces(data, found.part_bytes))
        finally:
            entries = list(range(found.first_entry, found.first_entry + parts))
            with self._connection.lock, suppress(StormError):  # its loss has released them
                self._connection.send(0, Release(entries))
        self._lane.use(data.untyped_storage())
        return data

    def abandon(self) -> None:
        """Have the session end by itself, for nobody can use it any more. Destructors call it."""
        self._connection.abandon()

    def close(self) -> None:
        """End the session. Calling it twice is fine."""
        self._connection.close()
        self._lane.close()

    # --- out --------------------------------------------------------------------------------

    def _store(self, data: torch.Tensor, dtype: str) -> list[int]:
        """Store the parts and return their entries once all have arrived."""
        stored: dict[int, _Part] = {}
        for piece in _pieces(data, self._part_bytes):
            slot = self._reserve(piece.numel())
            try:
                self._lane.stage(piece, slot)
            except BaseException:
                self._free(slot)
                raise
            with self._connection.lock:
                entry, part = self._begin(slot, kept=False)
                stored[entry] = part
                sequence = self._lane.publish(slot)
                self._connection.send(
                    entry,
                    Store(
                        entry=entry,
                        segment=slot.segment,
                        offset=slot.offset,
                        nbytes=slot.nbytes,
                        dtype=dtype,
                        codec="ancf",
                        sequence=sequence,
                    ),
                )
        for part in stored.values():
            self._await(part)
        return list(stored)

    def _reserve(self, nbytes: int) -> Slot:
        """Return a slot once there is room.

        Raises:
            DaemonLost: there was none for too long.
        """
        slot: Slot | None = None

        def reserved() -> bool:
            nonlocal slot
            slot = self._lane.reserve(nbytes)
            return slot is not None

        with self._connection.lock:
            self._connection.drain()
            if not self._connection.wait(reserved, STALL_SECONDS):
                raise DaemonLost(self._stalled("frees no room in the staging area"))
        assert slot is not None
        return slot

    # --- back -------------------------------------------------------------------------------

    def _restore(self, first_entry: int, pieces: list[torch.Tensor]) -> None:
        """Fill the pieces from consecutive entries, several under way at a time."""
        waiting = deque(enumerate((piece.numel() for piece in pieces), start=first_entry))
        under_way: deque[_Part] = deque()
        try:
            for piece in pieces:
                self._request_more(waiting, under_way)
                self._await(under_way[0])
                self._lane.unstage(under_way[0].slot, piece)
                self._free(under_way.popleft().slot)
        finally:
            with self._connection.lock:
                for part in under_way:
                    self._abandon(part)

    def _request_more(self, waiting: deque[tuple[int, int]], under_way: deque[_Part]) -> None:
        """Request what waits while there is room, and wait for it where none is under way."""
        while waiting:
            entry, nbytes = waiting[0]
            with self._connection.lock:
                slot = self._lane.reserve(nbytes)
            if slot is None and under_way:
                return
            waiting.popleft()
            under_way.append(self._request(entry, slot or self._reserve(nbytes)))

    def _request(self, entry: int, slot: Slot) -> _Part:
        with self._connection.lock:
            ticket, part = self._begin(slot, kept=True)
            sequence = self._lane.publish(slot)
            self._connection.send(
                ticket,
                Restore(
                    ticket=ticket,
                    entry=entry,
                    segment=slot.segment,
                    offset=slot.offset,
                    nbytes=slot.nbytes,
                    sequence=sequence,
                ),
            )
        return part

    def _abandon(self, part: _Part) -> None:
        """Give the slot up, at once or when the daemon is done with it; with the lock held."""
        part.kept = False
        if part.settled:
            self._lane.free(part.slot)
            self._connection.notify()

    # --- either way -------------------------------------------------------------------------

    def _begin(self, slot: Slot, *, kept: bool) -> tuple[int, _Part]:
        """Return a new part and its number, right before its message; with the lock held."""
        number = next(self._connection.numbers)
        part = self._parts[number] = _Part(slot, kept)
        return number, part

    def _await(self, part: _Part) -> None:
        """Wait until the daemon is done with the part, and raise what it says of it."""
        with self._connection.lock:
            if not self._connection.wait(lambda: part.settled, STALL_SECONDS):
                raise DaemonLost(self._stalled("does not answer"))
        if part.error is not None:
            raise part.error

    def _stalled(self, what: str) -> str:
        return (
            f"the daemon at {self._connection.address} {what} for {STALL_SECONDS:g} s; see "
            "`stormd status` and its log"
        )

    def _free(self, slot: Slot) -> None:
        with self._connection.lock:
            self._lane.free(slot)
            self._connection.notify()

    def _attach(self) -> None:
        connection = self._connection
        try:
            if CACHE_FEATURE not in connection.welcome.features:
                raise ProtocolMismatch(
                    f"the daemon at {connection.address} knows no cache; install the client's "
                    "version of stormd there"
                )
            self._lane.attach(connection.welcome, connection.descriptors, self.ask)
        finally:
            for descriptor in connection.descriptors:
                os.close(descriptor)

    # --- replies, with the lock held --------------------------------------------------------

    def _on_message(self, request: int, message: Message) -> None:
        match message:
            case Stored():
                self._settle(message.entry, None)
            case Restored():
                self._settle(message.ticket, None)
            case Rejected():
                self._settle(message.entry, _rejection(message))
            case Failed():
                self._settle(message.ticket or message.entry, named(message.kind, message.detail))
            case Refused():
                self._settle(request, named(message.kind, message.detail))

    def _settle(self, number: int, error: StormError | None) -> None:
        """Note that the daemon is done with a part, and take its slot unless somebody reads it."""
        part = self._parts.pop(number, None)
        if part is None:
            return
        part.settled, part.error = True, error
        if not part.kept:
            self._lane.free(part.slot)


def _pieces(data: torch.Tensor, nbytes: int) -> list[torch.Tensor]:
    """Return views of `data`, `nbytes` each, the last of what is left."""
    return [data[begin : begin + nbytes] for begin in range(0, data.numel(), nbytes)]


def _rejection(message: Rejected) -> StormError:
    """Return the error for a part that was not admitted."""
    if message.reason == "draining":
        return DaemonLost(f"{message.detail}; what was put is not kept")
    return (UsageError if message.reason == "invalid" else QuotaExceeded)(message.detail)
